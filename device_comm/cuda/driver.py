"""What communicators need of a device: memory that peers can open, launches, and streams.

`device_comm.cuda.cupy_driver.CupyDriver` is the one for CUDA; the tests have one that emulates
a device on the host. Addresses and streams are plain integers.

A driver is used by one thread, the communicator's; only the memory of a `HostBlock` is looked
at by others. Its errors are `DeviceError` unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch


@dataclass(frozen=True, slots=True)
class Exported:
    """Device memory, as other processes on the host name it.

    Attributes:
        handle: of the whole allocation; equal for addresses in the same one.
        offset: bytes from its start.
    """

    handle: bytes
    offset: int


@dataclass(frozen=True, slots=True)
class HostBlock:
    """Memory of the host that kernels see as well. Stores of one are seen by the other.

    Attributes:
        view: its bytes, writable.
        pointer: its address for kernels.
    """

    view: memoryview
    pointer: int


class Mark(Protocol):
    """A point in what a stream has been given."""

    def passed(self) -> bool:
        """Whether the device has got there. Never blocks; not to be called in a capture."""


class Driver(Protocol):
    """One device, for one process."""

    @property
    def device(self) -> torch.device:
        """The torch device on which its memory is."""

    @property
    def identity(self) -> str:
        """Names the physical device, alike in all processes of the host."""

    # --- memory: not in a capture, and done on return ------------------------------------

    def allocate(self, nbytes: int) -> int:
        """New memory, zeroed, 256-byte aligned, of which `export` is possible."""

    def free(self, pointer: int) -> None:
        """Give back what `allocate` returned. No peer may have it open."""

    def write(self, pointer: int, data: bytes) -> None:
        """Copy ``data`` from the host."""

    def read(self, pointer: int, nbytes: int) -> bytes:
        """Copy to the host."""

    def why_not_shareable(self, pointer: int) -> str:
        """Why `export` of this address would fail; ``""`` if it would not. Also in a capture."""

    def why_pool_not_shareable(self) -> str:
        """Why no memory of torch's own allocator can be shared; ``""`` if it can."""

    def export(self, pointer: int) -> Exported:
        """Name any device address to other processes, while its allocation lives.

        Raises:
            NotShareableError: this memory cannot be shared; says why.
        """

    def map(self, handle: bytes) -> int:
        """Map another process's allocation; where it begins here. Once per handle."""

    def unmap(self, base: int) -> None:
        """Undo `map`, which returned ``base``."""

    def reach(self, identity: str) -> None:
        """Let kernels use what this process has allocated on another device of its own."""

    def host_allocate(self, nbytes: int) -> HostBlock:
        """New memory of the host, zeroed, that kernels can use."""

    def host_free(self, block: HostBlock) -> None:
        """Give it back; its view must not be used any more."""

    # --- kernels -------------------------------------------------------------------------

    def load(self, kernels: Iterable[str]) -> None:
        """Compile these kernels and put them on the device, so that no launch has to.

        To load a kernel while another one spins would wait for that one.
        """

    def launch(
        self, kernel: str, grid: int, block: int, args: Sequence[bytes], stream: int
    ) -> None:
        """Put a kernel on a stream; in a capture, into the graph.

        Args:
            kernel: its name.
            grid: blocks.
            block: threads of each.
            args: each parameter, as it lies in memory.
            stream: where to.
        """

    # --- streams -------------------------------------------------------------------------

    def current_stream(self) -> int:
        """The stream that torch uses in this thread."""

    def is_capturing(self, stream: int) -> bool:
        """Whether what the stream is given goes into a graph."""

    def make_stream(self) -> int:
        """A new stream, which runs beside all others."""

    def free_stream(self, stream: int) -> None:
        """Give back what `make_stream` returned."""

    def order(self, before: int, after: int) -> None:
        """Let what ``after`` is given from now wait for what ``before`` has been given."""

    def mark(self, stream: int) -> Mark:
        """The point that the stream's work reaches with what it has been given. No capture."""


__all__ = ["Driver", "Exported", "HostBlock", "Mark"]
