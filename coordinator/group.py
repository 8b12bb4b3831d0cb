"""`GroupCoordinator`: the processes of one group, as one of them sees the others."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

from coordinator import torch_groups
from coordinator.bootstrap import DEFAULT_TIMEOUT
from coordinator.exchange import Exchange
from coordinator.experts import ExpertVerbs
from coordinator.graph_capture import GraphCaptureContext, capture_on_side_stream
from coordinator.hierarchy import Hierarchy
from coordinator.link import Settings, alone, connect
from coordinator.queues import MailGroup, queue_on_board
from shm_broadcast import Deadline, MessageQueue

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from coordinator.link import Link
    from coordinator.verbs import Timeout
    from device_comm import Work
    from shm_broadcast import QueueHandle


def own_group(group_ranks: Sequence[Sequence[int]], rank: int) -> Sequence[int]:
    """The one of these groups that ``rank`` is in.

    Raises:
        ValueError: it is in none or in several, or twice in one.
    """
    mine = [ranks for ranks in group_ranks if rank in ranks]
    if len(mine) != 1 or len(set(mine[0])) != len(mine[0]):
        raise ValueError(f"rank {rank} has to be in one group, once; got {group_ranks}")
    return mine[0]


class GroupCoordinator(ExpertVerbs):
    """One member's end of a named group: collectives, messages, and who is in it.

    Ranks in arguments are ranks in the group; `rank`, `ranks`, `first_rank`, `last_rank`,
    `next_rank` and `prev_rank` are global. One thread at a time. Errors and waiting are those
    of `shm_broadcast.errors`: nothing waits longer than the group's timeout, or after a
    member has died or aborted. `coordinator.member.Member` lists the attributes.
    """

    def __init__(
        self,
        group_ranks: Sequence[Sequence[int]],
        local_rank: int,
        torch_distributed_backend: str | None,
        use_device_communicator: bool,
        use_message_queue_broadcaster: bool = False,
        group_name: str | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> None:
        """Build the group this process is in, over torch's default process group.

        Args:
            group_ranks: global ranks of all groups of this kind; this process is in one.
            local_rank: its number on its node.
            torch_distributed_backend: ``"gloo"``, ``"nccl"``; None: what fits this machine.
            use_device_communicator: False: move tensors by the torch process group only.
            use_message_queue_broadcaster: have a queue for the objects that rank 0 broadcasts.
            group_name: for errors and status; with ``group_ranks`` it names the group.
            timeout: seconds for set-up; None: for ever.

        Collective: yes, every member of this process's group; other groups are built by
        their own members, and cost nothing here.

        Raises:
            ValueError: this process is in none of the groups or in several.
            RuntimeError: torch has no default process group.
            GroupTimeoutError: some members did not come in time.
        """
        rank = dist.get_rank()
        ranks = own_group(group_ranks, rank)
        name = group_name or "anonymous"
        settings = Settings.of(
            torch_distributed_backend, local_rank, torch_only=not use_device_communicator
        )
        if len(ranks) == 1:
            self._adopt(alone(name, rank, settings))
            return
        exchange = Exchange.visit(
            torch_groups.default_store(),
            f"{name}:{'.'.join(map(str, ranks))}",
            ranks.index(rank),
            len(ranks),
            name,
            Deadline.after(timeout),
        )
        self._adopt(connect(exchange, ranks, settings))
        if use_message_queue_broadcaster and self.world_size > 1:
            self.mq_broadcaster = self.create_mq_broadcaster()

    @classmethod
    def from_process_group(
        cls,
        process_group: ProcessGroup,
        group_name: str = "group",
        *,
        stream: torch.cuda.Stream | None = None,
        local_rank: int | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> Self:
        """Wrap a torch process group, which stays yours to destroy, after this is closed.

        A CPU group is made beside it if it has none. Do not use it directly meanwhile.

        Args:
            process_group: its members are the group's, in its order.
            group_name: for errors and status.
            stream: where collectives on a CUDA device run: behind what the current stream has been
                given, and before what it is given next; None: on the current stream.
            local_rank: this process's number on its node; None: its global rank.
            timeout: seconds for set-up; None: for ever.

        Collective: yes, every member.

        Raises:
            ValueError: ``stream`` is not of the group's device, or that is the CPU.
            GroupTimeoutError: some members did not come in time.
        """
        ranks = torch_groups.ranks_of(process_group)
        rank = ranks[process_group.rank()]
        backend = torch_groups.backend_of(process_group)
        settings = Settings.of(backend, rank if local_rank is None else local_rank).on(stream)
        if len(ranks) == 1:
            return cls.from_link(alone(group_name, rank, settings))
        exchange = Exchange.visit(
            torch_groups.store_of(process_group),
            f"wrapped:{group_name}",
            process_group.rank(),
            len(ranks),
            group_name,
            Deadline.after(timeout),
        )
        return cls.from_link(connect(exchange, ranks, settings, given=process_group))

    @classmethod
    def from_device_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        stream: torch.cuda.Stream | None = None,
        local_rank: int | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> Self:
        """Wrap the process group of a mesh of one dimension: ``from_device_mesh(mesh["tp"])``.

        Collective: yes, every member of the mesh.

        Raises:
            ValueError: ``mesh`` has more than one dimension; and as `from_process_group`.
        """
        if mesh.ndim != 1:
            raise ValueError(f"choose one dimension of {mesh.mesh_dim_names}: mesh[name]")
        name = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "mesh"
        return cls.from_process_group(
            mesh.get_group(), name, stream=stream, local_rank=local_rank, timeout=timeout
        )

    def _adopt(self, link: Link) -> None:
        super()._adopt(link)
        self.hierarchy = self._divide()

    def _divide(self) -> Hierarchy:
        """Build the groups within and between nodes. Collective: yes, every member."""
        if self.world_size == 1:
            return Hierarchy(self, self, self)
        me, nodes = self.rank_in_group, self.nodes
        firsts = [node[0] for node in nodes]
        mine = next(node for node in nodes if me in node)
        intra = self if len(nodes) == 1 else self._part("intra", mine)
        if me not in firsts:
            return Hierarchy(self, intra, None)
        one_each = len(nodes) == self.world_size
        return Hierarchy(self, intra, self if one_each else self._part("inter", firsts))

    def _part(self, name: str, members: list[int]) -> GroupCoordinator:
        link = self._link.part(f"{self.name}.{name}", members)
        return self._link.closing.enter_context(GroupCoordinator.from_link(link))

    # --- together ------------------------------------------------------------------------

    def barrier(self, *, async_op: bool = False, timeout: Timeout = None) -> Work[None] | None:
        """Return once every member has come here, on the CPU. Collective: yes, every member."""
        return self._link.cpu.barrier(async_op=async_op, timeout=timeout)

    def cpu_all_reduce_(self, x: Tensor, *, async_op: bool = False, timeout: Timeout = None) -> Any:
        """Sum a CPU tensor into itself, over the CPU group. Collective: yes, every member."""
        return self._link.cpu.all_reduce_(x, async_op=async_op, timeout=timeout)

    def make_sibling_device_group(
        self, group_desc: str | None = None, *, timeout: float | None = DEFAULT_TIMEOUT
    ) -> ProcessGroup | None:
        """One more torch process group of the same members, for use beside `device_group`.

        Args:
            group_desc: its name for torch.
            timeout: seconds for its set-up; None: for ever.

        Returns:
            A group that is destroyed when this one is closed; None in a group of one.

        Collective: yes, every member.
        """
        return self._link.sibling(group_desc or "sibling", timeout)

    @contextmanager
    def graph_capture(
        self, graph_capture_context: GraphCaptureContext | None = None
    ) -> Iterator[GraphCaptureContext]:
        """Capture a CUDA graph inside this context, on its stream; nothing on the CPU.

        Give the context's stream to torch: ``torch.cuda.graph(graph, stream=context.stream)``.
        At the end, members tell each other what memory they have captured. The graphs can be
        replayed from then on: by all members in the same order, on a stream that other calls of
        this group are ordered with, and until the group is closed.

        Collective: yes, every member.

        Args:
            graph_capture_context: of a capture that another group has begun.

        Raises:
            DivergenceError: members have captured different collectives; do not replay them.
        """
        with ExitStack() as captures:
            context = captures.enter_context(
                capture_on_side_stream(self.device, graph_capture_context)
            )
            captures.enter_context(self.device_communicator.graph_capture())
            for part in (self.hierarchy.intra, self.hierarchy.inter):
                if isinstance(part, GroupCoordinator) and part is not self:
                    captures.enter_context(part.graph_capture(context))
            yield context

    def create_mq_broadcaster(
        self,
        writer_rank: int = 0,
        external_writer_handle: QueueHandle | None = None,
        blocking: bool = True,
        *,
        connect_ip: str | None = None,
        secret: bytes | None = None,
        timeout: float | None = 60.0,
    ) -> MessageQueue:
        """A new queue from one member, or from outside, to all (other) members.

        Args:
            writer_rank: the rank in the group of the member that writes, or has the handle.
            external_writer_handle: of a queue whose writer is not in the group.
            blocking: return once all have joined.
            connect_ip: the writer's address, for members on other hosts.
            secret: the launcher's, for members on other hosts.
            timeout: seconds for ``blocking``, between hosts; on one host all have joined at once.

        Returns:
            This member's end, which the caller shuts down.

        Collective: yes, every member.

        Raises:
            ValueError: ``writer_rank`` is not in the group, which has two members or more.
        """
        nodes = self._link.nodes
        if nodes is not None and len(nodes.all()) == 1:
            wanted = external_writer_handle is None
            queue = queue_on_board(self._mail, nodes.board, writer_rank, wanted=wanted)
            if queue is not None:
                return queue
        return MessageQueue.create_from_process_group(
            MailGroup(self._mail),
            writer_rank=writer_rank,
            external_writer_handle=external_writer_handle,
            blocking=blocking,
            connect_ip=connect_ip,
            secret=secret,
            timeout=timeout,
            watch=None if nodes is None else nodes.board.check,
        )

    def create_single_reader_mq_broadcasters(
        self,
        reader_rank_in_group: int = 0,
        blocking: bool = False,
        *,
        connect_ip: str | None = None,
        secret: bytes | None = None,
        timeout: float | None = 60.0,
    ) -> tuple[MessageQueue, list[QueueHandle]]:
        """A queue from each member to one of them.

        Args:
            reader_rank_in_group: the member that reads all of them.
            blocking: return once the reader has joined.
            connect_ip: this member's address, if the reader is on another host.
            secret: the launcher's, if some are on another host than the reader.
            timeout: seconds for ``blocking``.

        Returns:
            The queue that this member writes, and on the reader every member's handle, by
            rank in the group, each for ``MessageQueue.create_from_handle(handle, 0)``.

        Collective: yes, every member.
        """
        return MessageQueue.create_from_process_group_single_reader(
            MailGroup(self._mail),
            reader_rank=reader_rank_in_group,
            blocking=blocking,
            connect_ip=connect_ip,
            secret=secret,
            timeout=timeout,
            watch=None if self._link.nodes is None else self._link.nodes.board.check,
        )
