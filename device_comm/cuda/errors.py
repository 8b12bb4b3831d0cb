"""The errors of CUDA devices, besides `shm_broadcast.errors`.

CoordinatorError
├── DeviceError               a call of the device's driver failed
├── NotShareableError         other processes cannot map this device memory
└── IpcUnavailableError       the ranks of a group cannot use each other's device memory
"""

from __future__ import annotations

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
