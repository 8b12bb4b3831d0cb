"""The interface to CUDA streams that stream-ordered backends use, and torch's streams."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED in cuda.h."""


class StreamMark(Protocol):
    """A point in a stream: an event."""

    def passed(self) -> bool:
        """Whether the device has reached it. Never blocks."""

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
        return _CudaMark(self._stream)


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)
        self._device = stream.device

    def passed(self) -> bool:
        with _beside_captures():
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


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
