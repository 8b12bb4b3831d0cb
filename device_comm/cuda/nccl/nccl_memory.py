"""Device memory that NCCL can make a window of."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from device_comm.cuda.nccl.library import NcclLibrary


class NcclMemory:
    """Memory on the current device; freed by `free`, or when nobody has it any more.

    Attributes:
        address: where it is, on the device.
        size: bytes.
    """

    def __init__(self, library: NcclLibrary, size: int) -> None:
        """Allocate it.

        Raises:
            NcclUnavailableError: this NCCL has no windows.
            NcclError: there is not so much memory.
        """
        library.check_windows()
        self.address = library.mem_alloc(size)
        self.size = size
        self._freeing = weakref.finalize(self, library.mem_free, self.address)
        self._freeing.atexit = False  # the device has gone by then

    def free(self) -> None:
        """Free it; idempotent. No communicator has a window of it any more."""
        self._freeing()

    def keep(self) -> None:
        """Leave it to the process: the device may still use it, so it must never be freed."""
        self._freeing.detach()
