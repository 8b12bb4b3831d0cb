"""Define the interface to a CUDA device: errors, streams, memory, launches, kernel source.

CoordinatorError
├── DeviceError               a call of the device's driver failed
├── NotShareableError         other processes cannot map this device memory
└── IpcUnavailableError       the ranks of a group cannot use each other's device memory

`device_comm.cuda.cupy_driver.CupyDriver` implements it; a test double emulates a device on the CPU.
Addresses and streams are integers. The communicator's thread uses the driver; other threads only
read `HostBlock`s. Methods raise `DeviceError` unless noted otherwise.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol, TypeAlias

import torch

from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import CoordinatorError


class DeviceError(CoordinatorError):
    """``call``, a call of the device's driver, failed; ``detail`` is the driver's text."""

    def __init__(self, call: str, detail: str) -> None:
        self.call = call
        self.detail = detail
        super().__init__(f"{call}: {detail}")


class NotShareableError(CoordinatorError):
    """Other processes cannot map this device memory, at ``pointer``, for ``reason``."""

    def __init__(self, pointer: int, reason: str) -> None:
        self.pointer = pointer
        self.reason = reason
        super().__init__(f"memory at {pointer:#x} cannot be shared: {reason}")


class IpcUnavailableError(CoordinatorError):
    """The ranks of a group cannot use each other's device memory; all of them raise this.

    ``rank`` is the lowest rank that failed, for ``reason``.
    """

    def __init__(self, rank: int, reason: str) -> None:
        self.rank = rank
        self.reason = reason
        super().__init__(f"rank {rank} cannot use its peers' device memory: {reason}")


_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED in cuda.h."""

_POLL_SECONDS = 0.001


class StreamEvent(Protocol):
    """An event: a point in a stream."""

    def query(self) -> bool:
        """Return True if the device has reached it. Never blocks, and invalidates no capture."""

    def stream_wait(self) -> None:
        """Make the current stream wait for the event."""


class Stream(Protocol):
    """A stream, identified by its address."""

    @property
    def address(self) -> int:
        """Return the stream's handle (cudaStream_t) as an integer."""

    def mark(self) -> StreamEvent:
        """Record an event now, on any thread; not in a capture."""


class Streams(Protocol):
    """The streams of one device in the calling thread."""

    def current(self) -> Stream:
        """Return the current stream."""

    def capturing(self) -> bool:
        """Return True while the current stream is captured into a graph."""

    def device(self) -> AbstractContextManager[object]:
        """Return a context in which the device is the current one."""


class CudaStreams:
    """torch's streams of a CUDA device, which must have an index."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Stream:
        """Return torch's current stream."""
        return _CudaStream(torch.cuda.current_stream(self._device))

    def capturing(self) -> bool:
        """Return True while torch's current stream is captured."""
        return torch.cuda.is_current_stream_capturing()

    def device(self) -> AbstractContextManager[object]:
        """Return torch's context of the device."""
        return torch.cuda.device(self._device)


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self.address = int(stream.cuda_stream)

    def mark(self) -> StreamEvent:
        return CudaEvent(self._stream)


class CudaEvent:
    """torch's event, whose failed query leaves no sticky CUDA error. Raises `DeviceError`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Record the event; not in a capture of the stream."""
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._device = stream.device
        with device_errors("cudaEventRecord"):
            self._event.record(stream)

    def query(self) -> bool:
        """Return True if the device has reached it. Allowed while other threads capture."""
        with device_errors("cudaEventQuery"), _beside_captures():
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def stream_wait(self) -> None:
        """Make the current stream wait for the event, unless the device has reached it."""
        if self.query():  # a captured stream cannot wait for an event outside the graph
            return
        with device_errors("cudaStreamWaitEvent"):
            torch.cuda.current_stream(self._device).wait_event(self._event)


class StreamEventPending:
    """A `device_comm.work.Pending` for the operations before ``mark``."""

    def __init__(self, mark: StreamEvent) -> None:
        self._mark = mark

    def ready(self) -> bool:
        """Return True if the device is done."""
        return self._mark.query()

    def wait(self, deadline: Deadline) -> None:  # noqa: ARG002 - the host does not wait
        """Make the current stream wait for the event."""
        self._mark.stream_wait()


def pass_within(seconds: float, marks: Sequence[StreamEvent]) -> bool:
    """Wait until the device has reached all ``marks``; return False after ``seconds``."""
    deadline = Deadline.after(seconds)
    while not all(mark.query() for mark in marks):
        if deadline.expired:
            return False
        time.sleep(_POLL_SECONDS)
    return True


@contextmanager
def device_errors(call: str) -> Iterator[None]:
    """Translate torch's errors, possibly of an earlier kernel, to `DeviceError`."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(call, str(error).partition("\n")[0]) from error


@contextmanager
def _beside_captures() -> Iterator[None]:
    """Allow event queries during captures of other threads, which they would invalidate."""
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


PreparedLaunch: TypeAlias = Callable[[int], None]
"""Launches a kernel on a stream; a capture adds it to the graph. Reusable."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The name of device memory for other processes on the host.

    ``handle`` is that of the whole allocation, ``offset`` in bytes from its start, and
    ``allocation`` its `Driver.allocation`.
    """

    handle: bytes
    offset: int
    allocation: int


@dataclass(frozen=True, slots=True)
class HostBlock:
    """Host memory that kernels access as well, coherently: at ``pointer``."""

    view: memoryview
    pointer: int


class Driver(Protocol):
    """One device, for one process."""

    @property
    def device(self) -> torch.device:
        """Return the torch device of its memory."""

    @property
    def identity(self) -> str:
        """Return the name of the physical device, the same in all processes of the host."""

    # --- memory: not in a capture; synchronous --------------------------------------------

    def allocate(self, nbytes: int) -> int:
        """Return the address of new memory, zeroed, 256-byte aligned and exportable."""

    def free(self, pointer: int) -> None:
        """Free memory from `allocate`, which no peer has mapped."""

    def write(self, pointer: int, data: bytes) -> None:
        """Copy ``data`` from the host to the device."""

    def read(self, pointer: int, nbytes: int) -> bytes:
        """Copy ``nbytes`` from the device to the host."""

    def why_not_shareable(self, pointer: int) -> str:
        """Return why `export` of this address would fail, or ``""``. Allowed in a capture."""

    def why_pool_not_shareable(self) -> str:
        """Return why memory of torch's allocator cannot be shared, or ``""``."""

    def allocation(self, pointer: int) -> int:
        """Return the allocation's number, never reused in this process; 0 if there is none."""

    def export(self, pointer: int) -> Exported:
        """Return a name of the address for other processes, valid during its allocation.

        Raises:
            NotShareableError: this memory cannot be shared.
        """

    def map(self, handle: bytes) -> int:
        """Map another process's allocation, once per handle; return its address."""

    def unmap(self, base: int) -> None:
        """Undo the `map` that returned ``base``."""

    def reach(self, identity: str) -> None:
        """Enable kernels' access to this process's memory on another device (peer access)."""

    def host_allocate(self, nbytes: int) -> HostBlock:
        """Return new host memory, zeroed, that kernels can access."""

    def host_free(self, block: HostBlock) -> None:
        """Free host memory; its view becomes invalid."""

    # --- kernels -------------------------------------------------------------------------

    def load(self, kernels: Iterable[str]) -> None:
        """Compile kernels and load them onto the device.

        Call it before the first launch: loading waits for running kernels, and a kernel that waits
        for a peer might never end.
        """

    def prepare(self, kernel: str, grid: int, block: int, args: Sequence[bytes]) -> PreparedLaunch:
        """Return a repeatable launch of a loaded kernel.

        ``grid`` is the number of blocks, ``block`` the threads per block; ``args`` has the bytes of
        each parameter.
        """

    # --- streams -------------------------------------------------------------------------

    def current_stream(self) -> int:
        """Return torch's current stream in this thread."""

    def is_capturing(self, stream: int) -> bool:
        """Return True while the stream is captured into a graph."""

    def make_stream(self) -> int:
        """Return a new stream, independent of all others."""

    def free_stream(self, stream: int) -> None:
        """Destroy a stream from `make_stream`."""

    def order(self, before: int, after: int) -> None:
        """Make later work on stream ``after`` wait for current work on ``before``."""

    def mark(self, stream: int) -> StreamEvent:
        """Record an event on the stream now; not in a capture."""


_FOLDER = Path(__file__).parent / "kernels"
_INCLUDE = re.compile(r"^#include <(\w+\.cuh)>$", re.MULTILINE)


def kernel_source() -> str:
    """Return the source of all kernels as one text, with our includes expanded once."""
    # CuPy caches by source text: a change of an included file must change the text.
    seen: set[str] = set()

    def expand(name: str) -> str:
        seen.add(name)
        return _INCLUDE.sub(
            lambda match: "" if match[1] in seen else expand(match[1]),
            (_FOLDER / name).read_text(),
        )

    return expand("collectives.cu")
