"""The interface of a device: memory that peers can map, kernel launches, and streams.

`device_comm.cuda.device.cupy_driver.CupyDriver` implements it for CUDA; the tests have one that
emulates a device on the CPU. Addresses and streams are plain integers.

A driver is used by one thread, the communicator's; other threads only read the memory of a
`HostBlock`. Methods raise `DeviceError` unless noted otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from device_comm.cuda.device.streams import StreamMark

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

    def mark(self, stream: int) -> StreamMark:
        """The end of the work that is on the stream now. Must not be called in a capture."""
