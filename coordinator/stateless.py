"""Groups that need only a store: no default process group, and members may come and go.

A `StatelessGroupCoordinator` is a group like any other. To grow or shrink it, the members that stay
call `resized` and the new ones construct one, with the same ranks and name; the old group works
until it is closed. Only the members of the new group take part.

`StatelessProcessGroup` has vLLM's interface for exchanging objects and small tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from coordinator.group import GroupCoordinator, own_group
from coordinator.setup.addresses import own_address
from coordinator.setup.bootstrap import DEFAULT_TIMEOUT
from coordinator.setup.launcher import Launch
from coordinator.setup.link import meet_in
from coordinator.setup.settings import Settings
from coordinator.setup.topology import Topology
from coordinator.setup.torch_groups import SocketChoice
from coordinator.stores.secret import launcher_secret
from device_comm import ReduceOp
from shm_broadcast import Deadline
from shm_broadcast.board.forked_child import Closing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import ExitStack

    from torch import Tensor
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
        self._adopt(link)
        if use_message_queue_broadcaster:
            self.start_broadcaster()

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


class StatelessProcessGroup:
    """Exchanges objects and CPU tensors between processes that meet at a host and port.

    Ranks are ranks in this group. One thread at a time.

    Attributes:
        rank: this process's rank.
        world_size: the number of processes.
        group: the underlying group, with all operations.
    """

    def __init__(self, group: GroupCoordinator, closing: ExitStack) -> None:
        """Use `create`."""
        self.group = group
        self.rank = group.rank_in_group
        self.world_size = group.world_size
        self._closing = closing

    @classmethod
    def create(
        cls,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        store: Store | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
        secret: bytes | None = None,
    ) -> Self:
        """Meet the others at the store that rank 0 hosts, or in a given one.

        Args:
            host: the address of rank 0's host.
            port: the port that rank 0 binds.
            rank: this process's rank among those that meet there.
            world_size: the number of processes.
            store: a store to meet in instead.
            timeout: seconds to wait for all of them; None: for ever.
            secret: as for `GroupCoordinator`.

        Collective: yes, all of them.

        Raises:
            GroupTimeoutError: some did not come in time; names them.
        """
        deadline = Deadline.after(timeout)
        with Closing() as undo:
            launch = Launch(rank, world_size, 0, host, port, secret=launcher_secret(secret))
            topology = Topology.meet(launch, undo, store=store, backend="gloo", timeout=deadline)
            with topology.telling_why():
                group = topology.group("stateless", list(range(world_size)), deadline)
            undo.enter_context(group)
            undo.enter_context(topology.telling_why())
            return cls(group, undo.pop_all())

    def send_obj(self, obj: Any, dst: int) -> None:
        """Send an object. Collective: no, the two processes."""
        self.group.send_object(obj, dst)

    def recv_obj(self, src: int) -> Any:
        """Receive an object. Collective: no, the two processes."""
        return self.group.recv_object(src)

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        """Return the object of rank ``src``. Collective: yes, every process."""
        return self.group.broadcast_object(obj, src)

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Every process's object, by rank. Collective: yes, every process."""
        return self.group.all_gather_object(obj)

    def broadcast(self, tensor: Tensor | None, src: int) -> Tensor:
        """Return the tensor of rank ``src``, of any shape and dtype; others may pass None.

        Collective: yes, every process. ``src`` gets its own tensor back, not a copy.
        """
        found = self.group.broadcast_tensor_dict({"tensor": tensor}, src)
        return found["tensor"]  # type: ignore[no-any-return]

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send a tensor. Collective: no, the two processes."""
        self.group.send(tensor, dst)

    def recv(self, tensor: Tensor, src: int) -> Tensor:
        """Fill ``tensor`` with what ``src`` sends, of the same shape and dtype; returns it.

        Collective: no, the two processes.
        """
        return self.group.recv(src=src, out=tensor)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM) -> Tensor:
        """The elementwise reduction of all processes' tensors, as a new tensor.

        ``tensor`` has the same shape and dtype on all. Collective: yes, every process.
        """
        return self.group.all_reduce(tensor, op=op)

    def barrier(self, timeout: float = 30.0) -> None:
        """Wait until every process has called this; ``timeout`` in seconds.

        Collective: yes, every process.
        """
        self.group.barrier(timeout=timeout)

    def close(self) -> None:
        """Close the group and the connections; idempotent. Collective: no."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._closing.__exit__(*error)
