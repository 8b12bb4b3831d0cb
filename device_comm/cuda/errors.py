"""What can go wrong between devices, besides `shm_broadcast.errors`.

CoordinatorError
├── DeviceError               the device's driver refused a call; says which, and why
├── NotShareableError         memory that no other process can open; says why
└── IpcUnavailableError       these ranks cannot use each other's memory; names the first
"""

from __future__ import annotations

from shm_broadcast.errors import CoordinatorError


class DeviceError(CoordinatorError):
    """The device's driver refused a call.

    Attributes:
        call: what was called.
        detail: what the driver says.
    """

    def __init__(self, call: str, detail: str) -> None:
        self.call = call
        self.detail = detail
        super().__init__(f"{call}: {detail}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.call, self.detail)


class NotShareableError(CoordinatorError):
    """Device memory that no other process can open.

    Attributes:
        pointer: an address in it.
        reason: why.
    """

    def __init__(self, pointer: int, reason: str) -> None:
        self.pointer = pointer
        self.reason = reason
        super().__init__(f"memory at {pointer:#x} cannot be shared: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.pointer, self.reason)


class IpcUnavailableError(CoordinatorError):
    """The ranks of a group cannot use each other's device memory; all of them raise this.

    Attributes:
        rank: the first rank that found it out.
        reason: why.
    """

    def __init__(self, rank: int, reason: str) -> None:
        self.rank = rank
        self.reason = reason
        super().__init__(f"rank {rank} cannot use its peers' device memory: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.rank, self.reason)


__all__ = ["DeviceError", "IpcUnavailableError", "NotShareableError"]
