"""Groups that need only a store: no default process group, and members may come and go.

A `StatelessGroupCoordinator` is a group like any other. To grow or shrink it, the members that stay
call `resized` and the new ones construct one, with the same ranks and name; the old group works
until it is closed. Only the members of the new group take part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from coordinator.group import GroupCoordinator, own_group
from coordinator.setup.addresses import own_address
from coordinator.setup.bootstrap import DEFAULT_TIMEOUT
from coordinator.setup.link import meet_in
from coordinator.setup.settings import Settings
from coordinator.setup.torch_groups import SocketChoice
from coordinator.stores.secret import launcher_secret

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.distributed_c10d import Store


class StatelessGroupCoordinator(GroupCoordinator):
    """A group whose members meet in a store of their choice."""

    def __init__(
        self,
        group_ranks: Sequence[Sequence[int]],
        local_rank: int,
        torch_distributed_backend: str | None,
        use_device_communicator: bool,
        coord_store: Store,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        host: str = "127.0.0.1",
        global_rank: int = 0,
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
        secret: bytes | None = None,
    ) -> None:
        """Build the group that ``global_rank`` is in.

        Args:
            group_ranks: global ranks of all groups of this kind; this process is in one.
            local_rank: this process's number on its node; chooses its GPU.
            torch_distributed_backend: ``"gloo"`` or ``"nccl"``; None: NCCL if there is a GPU.
            use_device_communicator: as for `GroupCoordinator`.
            coord_store: the store in which the members meet; it must outlive the group.
            use_message_queue_broadcaster: as for `GroupCoordinator`.
            group_name: for errors and status. Members meet by this name and ``group_ranks``.
            host: a host that all members reach: gloo listens at the address on the route to it.
            global_rank: this process's global rank.
            timeout: seconds for set-up; None: for ever.
            secret: as for `GroupCoordinator`.

        Collective: yes, every member of this process's group.

        Raises:
            ValueError: this process is in none of the groups or in several.
            GroupTimeoutError: some members did not come in time; names them.
        """
        self._store = coord_store
        self._host = host
        self._uses = (use_device_communicator, use_message_queue_broadcaster)
        name = group_name or "anonymous"
        ranks = own_group(group_ranks, global_rank)
        sockets = SocketChoice(address=own_address(host, 1))
        settings = Settings.of(
            torch_distributed_backend,
            local_rank,
            sockets,
            torch_only=not use_device_communicator,
            secret=launcher_secret(secret),
        )
        place = f"stateless/{name}"
        link = meet_in(lambda: coord_store, place, global_rank, ranks, name, settings, timeout)
        self._begin(link, use_message_queue_broadcaster)

    def resized(
        self, group_ranks: Sequence[Sequence[int]], *, timeout: float | None = DEFAULT_TIMEOUT
    ) -> Self:
        """A new group with other members, of which this process is one; this group stays usable.

        Args:
            group_ranks: as for the constructor, which the new members call.
            timeout: seconds for set-up; None: for ever.

        Collective: yes, every member of the new group.

        Raises:
            What the constructor raises.
        """
        device_communicator, queue = self._uses
        return type(self)(
            group_ranks,
            self.local_rank,
            self._link.settings.backend,
            device_communicator,
            self._store,
            queue,
            self.name,
            self._host,
            self.rank,
            timeout=timeout,
            secret=self._link.settings.secret,
        )
