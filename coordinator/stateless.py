"""Groups over a store alone: no default process group, made and remade while processes live.

A `StatelessGroupCoordinator` is a group like any other. To grow or shrink, those who stay
call `resized` and those who come construct one, with the same ranks and name; the old group
goes on until it is closed. Nobody else takes part.

`StatelessProcessGroup` speaks vLLM's dialect for swapping objects and small tensors.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from coordinator.bootstrap import DEFAULT_TIMEOUT, Launch, own_address
from coordinator.exchange import Exchange
from coordinator.group import GroupCoordinator, own_group
from coordinator.link import Settings, alone, connect
from coordinator.topology import Topology
from coordinator.torch_groups import SocketChoice
from device_comm import ReduceOp
from shm_broadcast import Deadline

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    ) -> None:
        """Build the group that ``global_rank`` is in.

        Args:
            group_ranks: global ranks of all groups of this kind.
            local_rank: this process's number on its node; chooses its GPU.
            torch_distributed_backend: ``"gloo"``, ``"nccl"``; None: what fits this machine.
            use_device_communicator: as for `GroupCoordinator`.
            coord_store: where the members meet; it outlives the group's set-up.
            use_message_queue_broadcaster: as for `GroupCoordinator`.
            group_name: for errors and status; with ``group_ranks`` it names the group.
            host: a host that all members reach: gloo listens on the way to it.
            global_rank: this process's.
            timeout: seconds for set-up; None: for ever.

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
        )
        if len(ranks) == 1:
            self._adopt(alone(name, global_rank, settings))
            return
        exchange = Exchange.visit(
            coord_store,
            f"stateless/{name}:{'.'.join(map(str, ranks))}",
            ranks.index(global_rank),
            len(ranks),
            name,
            Deadline.after(timeout),
        )
        self._adopt(connect(exchange, ranks, settings))
        if use_message_queue_broadcaster:
            self.mq_broadcaster = self.create_mq_broadcaster()

    def resized(
        self, group_ranks: Sequence[Sequence[int]], *, timeout: float | None = DEFAULT_TIMEOUT
    ) -> Self:
        """A new group of other members, this one among them; this one stays as it is.

        Args:
            group_ranks: as for the constructor, which the members that join call.
            timeout: seconds for set-up; None: for ever.

        Collective: yes, every member of the new group.
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
        )


class StatelessProcessGroup:
    """Objects and small CPU tensors between processes that meet at a host and port.

    Attributes:
        rank: this process's rank.
        world_size: how many processes.
        group: all of them, with every verb.
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
    ) -> StatelessProcessGroup:
        """Meet the others at the store that rank 0 hosts, or in a given one.

        Args:
            host: the address of rank 0's host.
            port: the port that rank 0 binds.
            rank: this process's rank among those that meet there.
            world_size: how many processes.
            store: meet in this one instead.
            timeout: seconds to wait for all of them; None: for ever.

        Collective: yes, all of them.

        Raises:
            GroupTimeoutError: some did not come in time; names them.
        """
        deadline = Deadline.after(timeout)
        with ExitStack() as undo:
            launch = Launch(rank, world_size, 0, host, port)
            topology = Topology.meet(launch, undo, store=store, backend="gloo", timeout=deadline)
            group = topology.group("stateless", list(range(world_size)), deadline)
            undo.enter_context(group)
            return cls(group, undo.pop_all())

    def send_obj(self, obj: Any, dst: int) -> None:
        """Send an object. Collective: no, the two processes."""
        self.group.send_object(obj, dst)

    def recv_obj(self, src: int) -> Any:
        """Receive an object. Collective: no, the two processes."""
        return self.group.recv_object(src)

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        """The object of ``src``. Collective: yes, every process."""
        return self.group.broadcast_object(obj, src)

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Every process's object, by rank. Collective: yes, every process."""
        return self.group.all_gather_object(obj)  # type: ignore[no-any-return]

    def broadcast(self, tensor: Tensor | None, src: int) -> Tensor:
        """The tensor of ``src``; the others need not know its shape.

        Collective: yes, every process. ``src`` gets its own back.
        """
        found = self.group.broadcast_tensor_dict({"tensor": tensor}, src)
        return found["tensor"]  # type: ignore[no-any-return]

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send a tensor. Collective: no, the two processes."""
        self.group.send(tensor, dst)

    def recv(self, tensor: Tensor, src: int) -> Tensor:
        """Fill ``tensor`` with what ``src`` sends, of its shape and dtype; returns it.

        Collective: no, the two processes.
        """
        return self.group.recv(src=src, out=tensor)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM) -> Tensor:
        """The reduction of every process's tensor. Collective: yes, every process."""
        return self.group.all_reduce(tensor, op=op)  # type: ignore[no-any-return]

    def barrier(self, timeout: float = 30.0) -> None:
        """Return once every process has come here. Collective: yes, every process."""
        self.group.barrier(timeout=timeout)

    def close(self) -> None:
        """Give everything back; the second time does nothing. Collective: no."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
