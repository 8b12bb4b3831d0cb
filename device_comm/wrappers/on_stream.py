"""Runs a backend's operations on a stream of its own, whatever the current stream is."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from device_comm.cuda.device.streams import CudaMark
from device_comm.wrappers.wrapper import Wrapper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from device_comm.backend import Backend
    from device_comm.operation import Operation
    from device_comm.work import Pending
    from shm_broadcast.deadline import Deadline


class SideStream(Protocol):
    """A stream that is not the current one."""

    def entered(self) -> AbstractContextManager[None]:
        """A context in which it is the current stream; it first waits for the one before."""

    def follow(self) -> None:
        """Have the current stream wait for all work on this stream."""

    def mark(self) -> Callable[[], bool]:
        """Record an event; the result tells, without blocking, whether the device has passed it.

        Neither this nor the result may be called while `captured` is true.
        """

    def captured(self) -> bool:
        """Whether the current stream is being captured into a graph."""


class CudaSideStream:
    """One of torch's streams."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Use ``stream``; nothing here closes it."""
        self._stream = stream

    @contextmanager
    def entered(self) -> Iterator[None]:
        """As `SideStream.entered`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def follow(self) -> None:
        """As `SideStream.follow`."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def mark(self) -> Callable[[], bool]:
        """As `SideStream.mark`."""
        return CudaMark(self._stream).passed

    def captured(self) -> bool:
        """As `SideStream.captured`."""
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
        with self._stream.entered():
            self._inner.flush(deadline)

    def start(self, operation: Operation) -> Pending | None:
        """Start ``operation`` on the stream."""
        captured = self._stream.captured()
        while not captured and self._under_way and self._under_way[0][0]():
            self._under_way.popleft()
        with self._stream.entered():
            pending = self._inner.start(operation)
            if pending is not None and not operation.background:
                pending.wait(operation.deadline)
        if not operation.background:
            self._stream.follow()
            return None
        # The graph itself keeps the memory of what is captured.
        done = (lambda: True) if captured else self._stream.mark()
        # torch's allocator would give the memory of a freed tensor to new work on the current
        # stream, which does not wait for this stream. So the operation, and with it its tensors,
        # is kept here until the device is done, even if the caller drops the handle.
        self._under_way.append((done, operation))
        return _Behind(self._stream, done, pending)


class _Behind:
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
            with self._stream.entered():
                self._pending.wait(deadline)
        self._stream.follow()
