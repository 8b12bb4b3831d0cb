"""The group of one: what any backend is with a single rank, without a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from device_comm.base import Capabilities, DeviceCommunicator

if TYPE_CHECKING:
    import torch

    from device_comm.watch import Watch


class LoopbackComm(DeviceCommunicator):
    """A communicator whose only rank is this process. Every verb is the identity."""

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
        super().__init__(
            rank=0,
            world_size=1,
            device=device,
            capabilities=Capabilities("loopback"),
            name=name,
            watch=watch,
            members=[member],
        )
