"""Wrap a backend: run its operations from host memory, or on a side stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from device_comm.backend import Backend, Capabilities, Explanation, Identity
from device_comm.cuda.driver import CudaEvent
from device_comm.operation import NO_TENSOR, Operation
from device_comm.work import Pending, PendingThen
from shm_broadcast.deadline import Deadline


class Wrapper(Backend):
    """A backend that delegates to ``inner``, except `start`, which a subclass defines."""

    def __init__(
        self,
        inner: Backend,
        identity: Identity | None = None,
        capabilities: Capabilities | None = None,
        *,
        closes: bool = True,
    ) -> None:
        """Wrap ``inner``, which `close` closes as well if ``closes``.

        Identity and capabilities are those of ``inner`` by default.
        """
        super().__init__(identity or inner.identity, capabilities or inner.capabilities)
        self._inner = inner
        if closes:
            self._closing.callback(inner.close)

    def flush(self, deadline: Deadline) -> None:
        """Delegate to ``inner``."""
        self._inner.flush(deadline)

    def check(self) -> None:
        """Delegate to ``inner``."""
        self._inner.check()

    def norms(self, x: Tensor, weight: Tensor) -> bool:
        """Delegate to ``inner``."""
        return self._inner.norms(x, weight)

    def sends_eagerly(self, peer: int, size: int) -> bool:
        """Delegate to ``inner``."""
        return self._inner.sends_eagerly(peer, size)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, like: Tensor | None = None) -> Tensor:
        """Delegate to ``inner``."""
        return self._inner.empty(shape, dtype, like)

    def explain(self) -> Explanation:
        """Delegate to ``inner``."""
        return self._inner.explain()

    def graph_capture(self) -> AbstractContextManager[None]:
        """Delegate to ``inner``. Collective: yes, every member."""
        return self._inner.graph_capture()

    def discard(self) -> None:
        """Delegate to ``inner``."""
        self._inner.discard()


class HostStaging(Wrapper):
    """A backend for device tensors over a CPU backend. One thread at a time.

    It copies inputs to the CPU and outputs back. A call returns when its result is complete, so
    CUDA graphs cannot capture it.
    """

    def __init__(self, inner: Backend, device: torch.device | str) -> None:
        """Stage tensors of ``device``; ``inner`` is a CPU backend of the same ranks.

        The caller closes ``inner``, and may use it as well.
        """
        super().__init__(
            inner,
            replace(inner.identity, device=torch.device(device)),
            replace(inner.capabilities, backend="host", series=False, normed=frozenset()),
            closes=False,
        )

    def empty(self, shape: Sequence[int], dtype: torch.dtype, like: Tensor | None = None) -> Tensor:
        """Make the tensor on this rank's device."""
        return Backend.empty(self, shape, dtype, like)

    def norms(self, x: Tensor, weight: Tensor) -> bool:  # noqa: ARG002 - constant
        """Return False: the operands of a norm stay on the device."""
        return False

    def explain(self) -> Explanation:
        """Add the parts that the CPU backend does not use."""
        return replace(Backend.explain(self), unavailable=self._inner.explain().unavailable)

    def start(self, operation: Operation) -> Pending | None:
        """Run ``operation`` on the CPU, then copy its output back."""
        output = operation.output
        staged = output
        if output is not NO_TENSOR:
            staged = torch.empty(output.shape, dtype=output.dtype, device="cpu")
        pending = self._inner.start(operation.replace(operation.source.cpu(), staged))
        if pending is not None:
            return PendingThen(pending, lambda: output.copy_(staged))
        output.copy_(staged)
        return None


class SideStream(Protocol):
    """A stream other than the current one."""

    def as_current(self) -> AbstractContextManager[None]:
        """Return a context in which it is current; it waits for the previous stream first."""

    def stream_wait(self) -> None:
        """Make the current stream wait for all work on this stream."""

    def mark(self) -> Callable[[], bool]:
        """Record an event; return its non-blocking query.

        Call neither during a capture.
        """

    def is_capturing(self) -> bool:
        """Return True while the current stream is captured into a graph."""


class CudaSideStream:
    """A stream of torch."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """See `SideStream.as_current`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def stream_wait(self) -> None:
        """See `SideStream.stream_wait`."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def mark(self) -> Callable[[], bool]:
        """See `SideStream.mark`."""
        return CudaEvent(self._stream).query

    def is_capturing(self) -> bool:
        """See `SideStream.is_capturing`."""
        return torch.cuda.is_current_stream_capturing()


class OnStream(Wrapper):
    """Runs ``inner`` on a side stream, in order with the current one.

    An operation runs after all earlier work on the current stream. Later work on the current stream
    runs after the operation; with ``async_op=True`` only work queued after ``wait()``.
    """

    def __init__(self, inner: Backend, stream: SideStream) -> None:
        """Wrap a stream-ordered backend, which `close` closes."""
        super().__init__(inner)
        self._stream = stream
        self._under_way: deque[tuple[Callable[[], bool], Operation]] = deque()

    def flush(self, deadline: Deadline) -> None:
        """Flush ``inner`` on the side stream."""
        with self._stream.as_current():
            self._inner.flush(deadline)

    def start(self, operation: Operation) -> Pending | None:
        """Start ``operation`` on the side stream."""
        captured = self._stream.is_capturing()
        while not captured and self._under_way and self._under_way[0][0]():
            self._under_way.popleft()
        with self._stream.as_current():
            pending = self._inner.start(operation)
            if pending is not None and not operation.background:
                pending.wait(operation.deadline)
        if not operation.background:
            self._stream.stream_wait()
            return None
        # A graph owns the memory of captured operations.
        done = (lambda: True) if captured else self._stream.mark()
        # torch's allocator reuses a freed tensor's memory for new work on the current stream, which
        # does not wait for this stream. So the tensors stay referenced until the device is done.
        self._under_way.append((done, operation))
        return _SideStreamPending(self._stream, done, pending)


class _SideStreamPending:
    def __init__(
        self, stream: SideStream, done: Callable[[], bool], pending: Pending | None
    ) -> None:
        self._stream = stream
        self._done = done
        self._pending = pending

    def ready(self) -> bool:
        return self._done() if self._pending is None else self._pending.ready()

    def wait(self, deadline: Deadline) -> None:
        if self._pending is not None:
            with self._stream.as_current():
                self._pending.wait(deadline)
        self._stream.stream_wait()
