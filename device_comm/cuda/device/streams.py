"""The interface to CUDA streams that stream-ordered backends use, torch's streams, and waiting for
points in them.
"""

from __future__ import annotations

import ctypes
import time
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

from device_comm.cuda.errors import DeviceError
from shm_broadcast.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED in cuda.h."""

_POLL_SECONDS = 0.001


class StreamMark(Protocol):
    """A point in a stream: an event."""

    def passed(self) -> bool:
        """Whether the device has reached it. Never blocks, and ends no capture of other threads."""

    def follow(self) -> None:
        """Have the current stream wait for it."""


class Stream(Protocol):
    """One stream, identified by its address."""

    @property
    def address(self) -> int:
        """The stream's handle (cudaStream_t) as an integer."""

    def mark(self) -> StreamMark:
        """The end of the work that is on it now. Not in a capture. Any thread may call."""


class Streams(Protocol):
    """The streams of one device, as the calling thread sees them."""

    def current(self) -> Stream:
        """The current stream."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""

    def device(self) -> AbstractContextManager[object]:
        """Make the device the current one, inside this context."""


class CudaStreams:
    """torch's streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        """For ``device``, which must have an index."""
        self._device = device

    def current(self) -> Stream:
        """torch's current stream."""
        return _CudaStream(torch.cuda.current_stream(self._device))

    def capturing(self) -> bool:
        """Whether the current stream is being captured."""
        return torch.cuda.is_current_stream_capturing()

    def device(self) -> AbstractContextManager[object]:
        """torch's context for the device."""
        return torch.cuda.device(self._device)


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self.address = int(stream.cuda_stream)

    def mark(self) -> StreamMark:
        return CudaMark(self._stream)


class CudaMark:
    """The end of the work that is on a stream now: torch's event, whose failing query leaves no
    CUDA error behind that a later call would raise.

    Methods raise `DeviceError`.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Record the event. Not in a capture of the stream."""
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._device = stream.device
        with device_errors("cudaEventRecord"):
            self._event.record(stream)

    def passed(self) -> bool:
        """Whether the device has reached it. Allowed while other threads capture."""
        with device_errors("cudaEventQuery"), _beside_captures():
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Have the current stream wait for it, if the device has not reached it yet: a stream that
        is captured cannot wait for what is outside the graph.
        """
        if self.passed():
            return
        with device_errors("cudaStreamWaitEvent"):
            torch.cuda.current_stream(self._device).wait_event(self._event)


class Passage:
    """Operations on a stream; a `device_comm.work.Pending`."""

    def __init__(self, mark: StreamMark) -> None:
        """For those before ``mark``."""
        self._mark = mark

    def ready(self) -> bool:
        """Whether the device has done them."""
        return self._mark.passed()

    def wait(self, deadline: Deadline) -> None:  # noqa: ARG002 - the host does not wait
        """Have the current stream wait for them, and for nothing that follows on theirs."""
        self._mark.follow()


def pass_within(seconds: float, marks: Sequence[StreamMark]) -> bool:
    """Wait until the device has reached all ``marks``; False after ``seconds``."""
    deadline = Deadline.after(seconds)
    while not all(mark.passed() for mark in marks):
        if deadline.expired:
            return False
        time.sleep(_POLL_SECONDS)
    return True


@contextmanager
def device_errors(call: str) -> Iterator[None]:
    """Translate torch's errors to `DeviceError`; they may be about an earlier kernel."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(call, str(error).partition("\n")[0]) from error


@contextmanager
def _beside_captures() -> Iterator[None]:
    """Allow this thread to query events while another one captures.

    By default such a query is forbidden during any capture in the process, and invalidates it.
    """
    exchange = _driver().cuThreadExchangeStreamCaptureMode
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
