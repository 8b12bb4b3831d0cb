"""Define what backends need of a CUDA device: errors, streams, memory, launches, kernel source.

CoordinatorError
├── DeviceError               a call of the device's driver failed
├── NotShareableError         other processes cannot map this device memory
└── IpcUnavailableError       the ranks of a group cannot use each other's device memory

`device_comm.cuda.cupy_driver.CupyDriver` implements it for CUDA; the tests have one that
emulates a device on the CPU. Addresses and streams are plain integers.

A driver is used by one thread, the communicator's; other threads only read the memory of a
`HostBlock`. Methods raise `DeviceError` unless noted otherwise.

CuPy caches compiled kernels by their source text. Included files must be part of that text: if only
an included file changed, the old kernels would run.
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
    """A call of the device's driver failed.

    Attributes:
        call: the function that was called.
        detail: the driver's error text.
    """

    def __init__(self, call: str, detail: str) -> None:
        self.call = call
        self.detail = detail
        super().__init__(f"{call}: {detail}")


class NotShareableError(CoordinatorError):
    """Other processes cannot map this device memory.

    Attributes:
        pointer: an address in the memory.
        reason: why it cannot be mapped.
    """

    def __init__(self, pointer: int, reason: str) -> None:
        self.pointer = pointer
        self.reason = reason
        super().__init__(f"memory at {pointer:#x} cannot be shared: {reason}")


class IpcUnavailableError(CoordinatorError):
    """The ranks of a group cannot use each other's device memory; all of them raise this.

    Attributes:
        rank: the lowest rank on which it failed.
        reason: why it failed there.
    """

    def __init__(self, rank: int, reason: str) -> None:
        self.rank = rank
        self.reason = reason
        super().__init__(f"rank {rank} cannot use its peers' device memory: {reason}")


_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED in cuda.h."""

_POLL_SECONDS = 0.001


class StreamEvent(Protocol):
    """A point in a stream: an event."""

    def query(self) -> bool:
        """Whether the device has reached it. Never blocks, and ends no capture of other threads."""

    def stream_wait(self) -> None:
        """Have the current stream wait for it."""


class Stream(Protocol):
    """One stream, identified by its address."""

    @property
    def address(self) -> int:
        """The stream's handle (cudaStream_t) as an integer."""

    def mark(self) -> StreamEvent:
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

    def mark(self) -> StreamEvent:
        return CudaEvent(self._stream)


class CudaEvent:
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

    def query(self) -> bool:
        """Whether the device has reached it. Allowed while other threads capture."""
        with device_errors("cudaEventQuery"), _beside_captures():
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def stream_wait(self) -> None:
        """Have the current stream wait for it, if the device has not reached it yet: a stream that
        is captured cannot wait for what is outside the graph.
        """
        if self.query():
            return
        with device_errors("cudaStreamWaitEvent"):
            torch.cuda.current_stream(self._device).wait_event(self._event)


class StreamEventPending:
    """Operations on a stream; a `device_comm.work.Pending`."""

    def __init__(self, mark: StreamEvent) -> None:
        """For those before ``mark``."""
        self._mark = mark

    def ready(self) -> bool:
        """Whether the device has done them."""
        return self._mark.query()

    def wait(self, deadline: Deadline) -> None:  # noqa: ARG002 - the host does not wait
        """Have the current stream wait for them, and for nothing that follows on theirs."""
        self._mark.stream_wait()


def pass_within(seconds: float, marks: Sequence[StreamEvent]) -> bool:
    """Wait until the device has reached all ``marks``; False after ``seconds``."""
    deadline = Deadline.after(seconds)
    while not all(mark.query() for mark in marks):
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


PreparedLaunch: TypeAlias = Callable[[int], None]
"""Launches a kernel on a stream; in a capture, adds it to the graph. Any number of times."""


@dataclass(frozen=True, slots=True)
class Exported:
    """Names device memory to other processes on the host.

    Attributes:
        handle: the handle of the whole allocation; the same for all addresses in it.
        offset: the address's offset from the allocation's start, in bytes.
        allocation: the allocation's number; see `Driver.allocation`.
    """

    handle: bytes
    offset: int
    allocation: int


@dataclass(frozen=True, slots=True)
class HostBlock:
    """Host memory that kernels can access too; host and kernels see each other's stores.

    Attributes:
        view: the bytes, writable.
        pointer: the address for kernels.
    """

    view: memoryview
    pointer: int


class Driver(Protocol):
    """One device, for one process."""

    @property
    def device(self) -> torch.device:
        """The torch device of its memory."""

    @property
    def identity(self) -> str:
        """A name of the physical device, the same in all processes of the host."""

    # --- memory: not to be called in a capture; complete on return ------------------------

    def allocate(self, nbytes: int) -> int:
        """The address of new memory, zeroed and 256-byte aligned, that can be exported."""

    def free(self, pointer: int) -> None:
        """Free memory from `allocate`. No peer may have it mapped."""

    def write(self, pointer: int, data: bytes) -> None:
        """Copy ``data`` from the host to the device."""

    def read(self, pointer: int, nbytes: int) -> bytes:
        """Copy ``nbytes`` from the device to the host."""

    def why_not_shareable(self, pointer: int) -> str:
        """Why `export` of this address would fail; ``""`` if it would not. Allowed in a capture."""

    def why_pool_not_shareable(self) -> str:
        """Why no memory of torch's own allocator can be shared; ``""`` if it can."""

    def allocation(self, pointer: int) -> int:
        """The number of the allocation around an address; 0 if there is none. No other allocation
        of this process ever has that number, even at the same address.
        """

    def export(self, pointer: int) -> Exported:
        """Name a device address to other processes; valid while its allocation lives.

        Raises:
            NotShareableError: this memory cannot be shared; says why.
        """

    def map(self, handle: bytes) -> int:
        """Map another process's allocation; returns its start address here. Once per handle."""

    def unmap(self, base: int) -> None:
        """Undo the `map` that returned ``base``."""

    def reach(self, identity: str) -> None:
        """Let kernels access this process's memory on another device (peer access)."""

    def host_allocate(self, nbytes: int) -> HostBlock:
        """New host memory, zeroed, that kernels can access."""

    def host_free(self, block: HostBlock) -> None:
        """Free host memory; its view must not be used any more."""

    # --- kernels -------------------------------------------------------------------------

    def load(self, kernels: Iterable[str]) -> None:
        """Compile these kernels and load them onto the device.

        Before the first launch: loading a kernel waits for running ones, and a kernel that spins
        for a peer might never end.
        """

    def prepare(self, kernel: str, grid: int, block: int, args: Sequence[bytes]) -> PreparedLaunch:
        """A launch that costs little to repeat, of a kernel that was loaded.

        Args:
            kernel: the kernel's name.
            grid: the number of blocks.
            block: the number of threads per block.
            args: the bytes of each parameter.
        """

    # --- streams -------------------------------------------------------------------------

    def current_stream(self) -> int:
        """torch's current stream in this thread."""

    def is_capturing(self, stream: int) -> bool:
        """Whether the stream is being captured into a graph."""

    def make_stream(self) -> int:
        """A new stream that does not wait for any other."""

    def free_stream(self, stream: int) -> None:
        """Destroy a stream from `make_stream`."""

    def order(self, before: int, after: int) -> None:
        """Have later work on stream ``after`` wait for all work that is on ``before`` now."""

    def mark(self, stream: int) -> StreamEvent:
        """The end of the work that is on the stream now. Must not be called in a capture."""


_FOLDER = Path(__file__).parent / "kernels"
_INCLUDE = re.compile(r"^#include <(\w+\.cuh)>$", re.MULTILINE)


def kernel_source() -> str:
    """The source of all kernels; each of our files stands where it is included first."""
    seen: set[str] = set()

    def expand(name: str) -> str:
        seen.add(name)
        return _INCLUDE.sub(
            lambda found: "" if found[1] in seen else expand(found[1]),
            (_FOLDER / name).read_text(),
        )

    return expand("collectives.cu")
