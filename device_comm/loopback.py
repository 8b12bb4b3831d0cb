"""The group of one: what any backend is with a single rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from device_comm.backend import Backend, Capabilities, Identity
from device_comm.operation import NO_TENSOR

if TYPE_CHECKING:
    import torch

    from device_comm.operation import Operation
    from device_comm.watch import Watch


class LoopbackBackend(Backend):
    """A group whose only rank is this process: what it gives, it gets."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        *,
        name: str = "loopback",
        watch: Watch | None = None,
        member: int = 0,
    ) -> None:
        """Make one. Collective: no.

        Args:
            device: where the tensors are.
            name: the group's name, for errors and status.
            watch: the board that this process is on, if any.
            member: this process's member number there.
        """
        identity = Identity.of(0, 1, device, name=name, watch=watch, members=[member])
        super().__init__(identity, Capabilities("loopback"))

    def start(self, operation: Operation) -> None:
        """Copy. Communicators do not ask for it: in a group of one they return the input itself."""
        if operation.output is not NO_TENSOR:
            operation.output.view(-1).copy_(operation.source.view(-1))
