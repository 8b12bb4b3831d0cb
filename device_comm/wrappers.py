"""Wrap a backend: start its operations from host memory, or on a stream of their own.

Inputs are copied to the CPU, a CPU backend carries out the operation, and the output is copied
back. A call returns when its result is there, so it cannot be captured into a CUDA graph.
"""

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
    """Passes everything on to ``inner``, except `start`, which a subclass defines."""

    def __init__(
        self,
        inner: Backend,
        identity: Identity | None = None,
        capabilities: Capabilities | None = None,
        *,
        closes: bool = True,
    ) -> None:
        """Wrap ``inner``.

        Args:
            inner: the backend that does the work.
            identity: this backend's; None: that of ``inner``.
            capabilities: this backend's; None: those of ``inner``.
            closes: whether ``inner`` is closed with this backend; False: its maker closes it.
        """
        super().__init__(identity or inner.identity, capabilities or inner.capabilities)
        self._inner = inner
        if closes:
            self._closing.callback(inner.close)

    def flush(self, deadline: Deadline) -> None:
        """As ``inner``."""
        self._inner.flush(deadline)

    def check(self) -> None:
        """As ``inner``."""
        self._inner.check()

    def norms(self, x: Tensor, weight: Tensor) -> bool:
        """As ``inner``."""
        return self._inner.norms(x, weight)

    def sends_eagerly(self, peer: int, size: int) -> bool:
        """As ``inner``."""
        return self._inner.sends_eagerly(peer, size)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, like: Tensor | None = None) -> Tensor:
        """As ``inner``."""
        return self._inner.empty(shape, dtype, like)

    def explain(self) -> Explanation:
        """As ``inner``."""
        return self._inner.explain()

    def graph_capture(self) -> AbstractContextManager[None]:
        """As ``inner``. Collective: yes, every member."""
        return self._inner.graph_capture()

    def discard(self) -> None:
        """As ``inner``."""
        self._inner.discard()


class HostStaging(Wrapper):
    """One rank's end of a group whose tensors are on a device. One thread at a time."""

    def __init__(self, inner: Backend, device: torch.device | str) -> None:
        """Move tensors of ``device`` by ``inner``.

        Args:
            inner: a CPU backend of the same ranks. Its maker closes it, and may use it as well.
            device: this rank's device.
        """
        super().__init__(
            inner,
            replace(inner.identity, device=torch.device(device)),
            replace(inner.capabilities, backend="host", series=False, normed=frozenset()),
            closes=False,
        )

    def empty(self, shape: Sequence[int], dtype: torch.dtype, like: Tensor | None = None) -> Tensor:
        """As `Backend.empty`, on this rank's device."""
        return Backend.empty(self, shape, dtype, like)

    def norms(self, x: Tensor, weight: Tensor) -> bool:  # noqa: ARG002 - none of them
        """No: what is added and normed stays on the device."""
        return False

    def explain(self) -> Explanation:
        """As `Backend.explain`, with what the CPU backend has refused. Collective: no."""
        return replace(Backend.explain(self), unavailable=self._inner.explain().unavailable)

    def start(self, operation: Operation) -> Pending | None:
        """Carry out ``operation`` on the CPU, then copy its output back."""
        output = operation.output
        there = output
        if output is not NO_TENSOR:
            there = torch.empty(output.shape, dtype=output.dtype, device="cpu")
        pending = self._inner.start(operation.replace(operation.source.cpu(), there))
        if pending is not None:
            return PendingThen(pending, lambda: output.copy_(there))
        output.copy_(there)
        return None


class SideStream(Protocol):
    """A stream that is not the current one."""

    def as_current(self) -> AbstractContextManager[None]:
        """A context in which it is the current stream; it first waits for the one before."""

    def stream_wait(self) -> None:
        """Have the current stream wait for all work on this stream."""

    def mark(self) -> Callable[[], bool]:
        """Record an event; the result tells, without blocking, whether the device has passed it.

        Neither this nor the result may be called while `is_capturing` is true.
        """

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""


class CudaSideStream:
    """One of torch's streams."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Use ``stream``; nothing here closes it."""
        self._stream = stream

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """As `SideStream.as_current`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def stream_wait(self) -> None:
        """As `SideStream.stream_wait`."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def mark(self) -> Callable[[], bool]:
        """As `SideStream.mark`."""
        return CudaEvent(self._stream).query

    def is_capturing(self) -> bool:
        """As `SideStream.is_capturing`."""
        return torch.cuda.is_current_stream_capturing()


class OnStream(Wrapper):
    """Runs ``inner`` on another stream, in order with the current one.

    An operation runs after all work that is on the current stream already. Work that the caller
    puts on the current stream later runs after the operation; with ``async_op=True`` only work that
    is put there after ``wait()``.
    """

    def __init__(self, inner: Backend, stream: SideStream) -> None:
        """Wrap a stream-ordered backend; it is closed with this one."""
        super().__init__(inner)
        self._stream = stream
        self._under_way: deque[tuple[Callable[[], bool], Operation]] = deque()

    def flush(self, deadline: Deadline) -> None:
        """As the inner backend's, on the stream."""
        with self._stream.as_current():
            self._inner.flush(deadline)

    def start(self, operation: Operation) -> Pending | None:
        """Start ``operation`` on the stream."""
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
        # The graph itself keeps the memory of what is captured.
        done = (lambda: True) if captured else self._stream.mark()
        # torch's allocator would give the memory of a freed tensor to new work on the current
        # stream, which does not wait for this stream. So the operation, and with it its tensors,
        # is kept here until the device is done, even if the caller drops the handle.
        self._under_way.append((done, operation))
        return _SideStreamPending(self._stream, done, pending)


class _SideStreamPending:
    """A pending operation on a side stream."""

    def __init__(
        self, stream: SideStream, done: Callable[[], bool], pending: Pending | None
    ) -> None:
        self._stream = stream
        self._done = done
        self._pending = pending

    def ready(self) -> bool:
        """Whether the device has finished the operation."""
        return self._done() if self._pending is None else self._pending.ready()

    def wait(self, deadline: Deadline) -> None:
        """Have the current stream wait for the operation."""
        if self._pending is not None:
            with self._stream.as_current():
                self._pending.wait(deadline)
        self._stream.stream_wait()
