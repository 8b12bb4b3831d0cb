"""A communicator whose operations run on one stream, whatever the current one is."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from device_comm.base import ALL_VERBS, DeviceCommunicator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from device_comm.base import Call
    from device_comm.choice import Explanation
    from device_comm.work import Pending
    from shm_broadcast.deadline import Deadline


class SideStream(Protocol):
    """A stream beside the current one."""

    def entered(self) -> AbstractContextManager[None]:
        """Make it the current one, behind all that the current one has been given."""

    def follow(self) -> None:
        """Let the current stream wait for all that this one has been given."""

    def mark(self) -> Callable[[], bool]:
        """Whether the device has done all that this one has been given by now; never blocks.

        Neither this nor what it returns may be called while `captured`.
        """

    def captured(self) -> bool:
        """Whether what the current stream is given goes into a graph."""


class CudaSideStream:
    """One of torch's streams."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Use ``stream``, which stays its maker's."""
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
        event = self._stream.record_event()
        return event.query  # type: ignore[no-any-return]

    def captured(self) -> bool:
        """As `SideStream.captured`."""
        return torch.cuda.is_current_stream_capturing()


class OnStream(DeviceCommunicator):
    """``inner`` on a stream of its own.

    A call sees what the current stream was given before, and what the current stream is given
    after it sees the result; after ``wait()``, with ``async_op=True``.
    """

    def __init__(self, inner: DeviceCommunicator, stream: SideStream) -> None:
        """Wrap a communicator that works in stream order; it is closed with this one."""
        super().__init__(
            rank=inner.rank,
            world_size=inner.world_size,
            device=inner.device,
            capabilities=inner.capabilities,
            name=inner.name,
            timeout=inner.timeout,
            watch=inner.watch,
            members=inner.members,
        )
        self._inner = inner
        self._stream = stream
        self._under_way: deque[tuple[Callable[[], bool], object]] = deque()
        for verb in ALL_VERBS:
            setattr(self, f"_{verb}", getattr(inner, f"_{verb}"))

    def flush(self, timeout: float | Deadline | None = None) -> None:
        """Return once all that was sent ahead of its receivers has arrived. Collective: no."""
        with self._stream.entered():
            self._inner.flush(timeout)

    def explain(self) -> Explanation:
        """As what it wraps. Collective: no."""
        return self._inner.explain()

    @contextmanager
    def graph_capture(self) -> Iterator[None]:
        """Capture CUDA graphs in this context. Collective: yes, every member."""
        with self._inner.graph_capture():
            yield

    def _close(self) -> None:
        self._inner.close()

    def _discard(self) -> None:
        self._inner._discard()

    def _empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        return self._inner._empty(shape, like)

    def _launch(self, primitive: Callable[[Call], Pending | None], call: Call) -> Pending | None:
        captured = self._stream.captured()
        while not captured and self._under_way and self._under_way[0][0]():
            self._under_way.popleft()
        with self._stream.entered():
            pending = self._inner._launch(primitive, call)
            if pending is not None and not call.background:
                pending.wait(call.deadline)
        if not call.background:
            self._stream.follow()
            return None
        done = _captured if captured else self._stream.mark()
        # What is freed is given to the current stream again, which does not wait for this one:
        # until then the operation keeps its tensors, also if nobody keeps its handle.
        self._under_way.append((done, primitive))
        return _Behind(self._stream, done, pending)


def _captured() -> bool:
    """Of a captured operation, looked at when the capture is over: the graph keeps its memory."""
    return True


class _Behind:
    """An operation on a side stream."""

    def __init__(
        self, stream: SideStream, done: Callable[[], bool], pending: Pending | None
    ) -> None:
        self._stream = stream
        self._done = done
        self._pending = pending

    def ready(self) -> bool:
        """Whether the device is done."""
        return self._done() if self._pending is None else self._pending.ready()

    def wait(self, deadline: Deadline) -> None:
        """Let the current stream wait for the operation."""
        if self._pending is not None:
            with self._stream.entered():
                self._pending.wait(deadline)
        self._stream.follow()
