"""The torch process groups of a group, made when they are first needed.

A group on one host needs none, and torch's sockets accept connections from anybody, so the fewer
the better.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from coordinator.setup import torch_groups
from shm_broadcast import GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack

    from torch.distributed import ProcessGroup

    from coordinator.setup.exchange import Exchange
    from coordinator.setup.settings import Settings
    from shm_broadcast import Deadline


def new_process_group(
    exchange: Exchange,
    ranks: Sequence[int],
    backend: str,
    settings: Settings,
    closing: ExitStack,
    deadline: Deadline | None = None,
) -> ProcessGroup:
    """Make a torch process group of an exchange's members.

    Args:
        exchange: the members'; its name and the backend's make the group's name.
        ranks: the members' global ranks, by rank in the group.
        backend: ``"gloo"``, ``"nccl"``, or both by device.
        settings: say where gloo listens.
        closing: destroys the group.
        deadline: by when all members must be connected; None: two members connect when they first
            exchange something.

    Collective: with a deadline, yes, every member.

    Raises:
        GroupTimeoutError: not all were connected in time.
        PeerLostError, GroupAbortedError: likewise, and a member has ended, left, or given up.
    """
    name = f"{exchange.name}:{backend}"
    try:
        group = torch_groups.connect_process_group(
            exchange.store, name, ranks, exchange.rank, backend, settings.sockets, deadline
        )
    except GroupTimeoutError:
        if exchange.watch is not None:
            exchange.watch(name, lambda: False)
        raise
    closing.callback(torch_groups.destroy, group)
    if deadline is not None:  # one that has connected and closes would break the others' attempts
        exchange.all_gather(f"{backend} is connected")
    return group


class ProcessGroups:
    """The torch process groups of a link, each made at the first call.

    Args:
        exchange: the members' exchange.
        ranks: the members' global ranks, by rank in the group.
        settings: the topology's settings.
        given: a process group of the members, to use for the devices that it handles.
        closing: destroys the groups that are made here.
    """

    def __init__(
        self,
        exchange: Exchange,
        ranks: Sequence[int],
        settings: Settings,
        given: ProcessGroup | None,
        closing: ExitStack,
    ) -> None:
        self._exchange = exchange
        self._ranks = ranks
        self._settings = settings
        self._given = given
        self._closing = closing
        self._made: dict[str, ProcessGroup] = {}

    def cpu(self, deadline: Deadline | None = None) -> ProcessGroup:
        """The process group for the CPU.

        Args:
            deadline: as for `new_process_group`.

        Collective: with a deadline, yes, every member.
        """
        return self._of(torch.device("cpu"), "gloo", deadline)

    def device(self) -> ProcessGroup:
        """The process group for the device; `cpu` if the device is the CPU. Collective: no."""
        if self._settings.device.type == "cpu":
            return self.cpu()
        return self._of(self._settings.device, self._settings.backend, None)

    def _of(self, device: torch.device, backend: str, deadline: Deadline | None) -> ProcessGroup:
        if self._given is not None and torch_groups.handles(self._given, device):
            return self._given
        if backend not in self._made:
            self._made[backend] = new_process_group(
                self._exchange, self._ranks, backend, self._settings, self._closing, deadline
            )
        return self._made[backend]
