"""Implement `GroupCoordinator`, one member's end of a group, with its queues and graph capture.

If all members are on one host, the queue uses the group's board, so a lost member or an abort of
the group ends every wait in it. A queue to other hosts, or from outside the group, has a board of
its own, and needs the writer's address and a secret; see `shm_broadcast.MessageQueue`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from coordinator import torch_groups
from coordinator.context import GroupContext, rendezvous_in
from coordinator.member import Hierarchy
from coordinator.messages.messenger import ObjectMessenger
from coordinator.rendezvous import DEFAULT_TIMEOUT, Settings
from coordinator.secret import launcher_secret
from coordinator.verbs import ExpertVerbs, MessageVerbs, TensorVerbs
from device_comm import Work
from device_comm.verbs.checks import Later, Maybe, Now, Timeout, check_rank
from shm_broadcast import Board, MessageQueue, QueueHandle

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class GraphCaptureContext:
    """The stream of a capture.

    Attributes:
        stream: the CUDA stream to capture on; None on the CPU.
    """

    stream: torch.cuda.Stream | None


@contextmanager
def capture_on_side_stream(
    device: torch.device, context: GraphCaptureContext | None = None
) -> Iterator[GraphCaptureContext]:
    """Make a side stream current, which first waits for all work on the current stream.

    Args:
        device: the device on which the graph will run; on the CPU nothing is done.
        context: the context of a capture that has begun, to use its stream; None: a new stream.
    """
    if device.type != "cuda":
        yield context or GraphCaptureContext(None)
        return
    stream = context.stream if context is not None else None
    if stream is None:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    current = torch.cuda.current_stream(device)
    if current != stream:
        stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield GraphCaptureContext(stream)


class MessengerGroup:
    """A group as an `ObjectGroup`, to set queues up with (`shm_broadcast.queue.rendezvous`).

    Attributes:
        rank: this member's rank in the group.
        world_size: the number of members.
    """

    def __init__(self, messenger: ObjectMessenger) -> None:
        self.rank = messenger.cpu.rank
        self.world_size = messenger.cpu.world_size
        self._messenger = messenger

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        """Return the object of rank ``src``. Collective: yes, every member."""
        return self._messenger.broadcast_object(obj, src, None)

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """Return all members' objects, by rank. Collective: yes, every member."""
        return self._messenger.all_gather_object(obj, None)


def queue_on_board(
    messenger: ObjectMessenger, board: Board, writer_rank: int, *, wanted: bool
) -> MessageQueue | None:
    """Make a queue from one member to all others, on the group's own board.

    Args:
        messenger: the group's messenger; it carries the handle.
        board: the board that all members are on.
        writer_rank: the writer's rank in the group.
        wanted: at the writer: whether to make the queue. The others' value is not used.

    Returns:
        This member's end; None if the writer did not want a queue.

    Collective: yes, every member.
    """
    members = messenger.cpu.members
    writer = members[writer_rank]
    if messenger.cpu.rank == writer_rank:
        readers = [each for each in members if each != writer]
        queue = MessageQueue.on_board(board, writer, readers) if wanted else None
        messenger.broadcast_object(queue and queue.export_handle(), writer_rank, None)
    else:
        handle: QueueHandle | None = messenger.broadcast_object(None, writer_rank, None)
        queue = None if handle is None else MessageQueue.attach(handle, board)
    if queue is not None:
        messenger.cpu.barrier()
    return queue


def own_group(
    group_ranks: Sequence[Sequence[int]], rank: int, world_size: int | None = None
) -> Sequence[int]:
    """The group of ``group_ranks`` that contains ``rank``.

    Args:
        group_ranks: global ranks of all groups of a kind.
        rank: a global rank.
        world_size: how many ranks there are; None: it is not known.

    Raises:
        ValueError: none contains it, or a rank is in two groups, in one twice, or not in the world;
            the same on all ranks, except on one that is in no group.
        TypeError: these are not groups of ranks.
    """
    if isinstance(group_ranks, int) or any(isinstance(each, int) for each in group_ranks):
        raise TypeError(f"group_ranks must be groups, each a list of ranks; got {group_ranks}")
    counts = Counter(each for ranks in group_ranks for each in ranks)
    for each, count in sorted({rank: 0, **counts}.items()):
        if count != 1:
            raise ValueError(f"rank {each} has to be in one group, once; got {group_ranks}")
    if world_size is not None and not all(0 <= each < world_size for each in counts):
        raise ValueError(f"{group_ranks} are not all ranks of a world of {world_size}")
    return next(ranks for ranks in group_ranks if rank in ranks)


class GroupCoordinator(TensorVerbs, MessageVerbs, ExpertVerbs):
    """One member's end of a named group: collectives, messages, and the members' ranks.

    Ranks in arguments are ranks in the group; the attributes `rank`, `ranks`, `first_rank`,
    `last_rank`, `next_rank` and `prev_rank` are global. One thread at a time may use it. Errors are
    those of `shm_broadcast.errors`: no call waits longer than its timeout, or keeps waiting after
    a member has died or aborted. `coordinator.member.Member` lists the attributes.

    In a group of one every operation returns its input itself, not a copy, so changing the result
    in place changes the input. With ``out=`` the input is copied there.
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
        secret: bytes | None = None,
    ) -> None:
        """Build the group that this process is in; its members meet in torch's default store.

        Args:
            group_ranks: global ranks of all groups of this kind; this process is in one.
            local_rank: this process's number on its node; chooses its GPU.
            torch_distributed_backend: ``"gloo"`` or ``"nccl"``; None: NCCL if there is a GPU.
            use_device_communicator: False: move tensors only by torch's process groups.
            use_message_queue_broadcaster: whether to make a queue for the objects that rank 0
                broadcasts. Between hosts that takes a secret; without one there is no queue.
            group_name: for errors and status. Members meet by this name and ``group_ranks``.
            timeout: seconds for set-up; None: for ever.
            secret: the launcher's secret, 16 bytes or more, which all ranks have and nobody else.
                None: the contents of the file that ``GROUP_COORDINATOR_SECRET_FILE`` names, if it
                is set.

        Collective: yes, every member of this process's group, and nobody else.

        Raises:
            ValueError: this process is in none of the groups or in several, its group has a rank
                that is not in the world, or torch has no default process group.
            GroupTimeoutError: some members did not come in time; names them.
            SecretError: the secret is too short, or other users may read its file.
        """
        rank = dist.get_rank()
        ranks = own_group(group_ranks, rank, dist.get_world_size())
        name = group_name or "anonymous"
        settings = Settings.of(
            torch_distributed_backend,
            local_rank,
            torch_only=not use_device_communicator,
            secret=launcher_secret(secret),
        )
        store = torch_groups.default_store
        link = rendezvous_in(store, name, rank, ranks, name, settings, timeout)
        self._begin(link, use_message_queue_broadcaster)

    @classmethod
    def from_process_group(
        cls,
        process_group: ProcessGroup,
        group_name: str = "group",
        *,
        stream: torch.cuda.Stream | None = None,
        local_rank: int | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        secret: bytes | None = None,
    ) -> Self:
        """Make a group of the members of a torch process group.

        The process group stays the caller's: destroy it after this group is closed, and do not use
        it directly before. If it has no backend for the CPU, a CPU group is made as well.

        Args:
            process_group: its members become this group's, in the same order.
            group_name: for errors and status.
            stream: the CUDA stream on which collectives run, after the work that is on the current
                stream already, and before later work on it. None: the current stream.
            local_rank: this process's number on its node; None: its global rank.
            timeout: seconds for set-up; None: for ever.
            secret: as for the constructor.

        Collective: yes, every member.

        Raises:
            ValueError: ``stream`` is not of the group's device, or that is the CPU.
            GroupTimeoutError: some members did not come in time.
        """
        ranks = torch_groups.ranks_of(process_group)
        rank = ranks[process_group.rank()]
        backend = torch_groups.backend_of(process_group)
        local_rank = rank if local_rank is None else local_rank
        secret = launcher_secret(secret)
        settings = Settings.of(backend, local_rank, stream=stream, secret=secret)
        store = partial(torch_groups.store_of, process_group)
        place = f"wrapped:{group_name}"
        group = cls.__new__(cls)
        group._begin(
            rendezvous_in(store, place, rank, ranks, group_name, settings, timeout, process_group)
        )
        return group

    @classmethod
    def from_device_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        stream: torch.cuda.Stream | None = None,
        local_rank: int | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        secret: bytes | None = None,
    ) -> Self:
        """Make a group of a one-dimensional mesh's members: ``from_device_mesh(mesh["tp"])``.

        The arguments are those of `from_process_group`. Collective: yes, every member of the mesh.

        Raises:
            ValueError: ``mesh`` has more than one dimension; and as `from_process_group`.
        """
        if mesh.ndim != 1:
            raise ValueError(f"choose one dimension of {mesh.mesh_dim_names}: mesh[name]")
        name = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "mesh"
        return cls.from_process_group(
            mesh.get_group(),
            name,
            stream=stream,
            local_rank=local_rank,
            timeout=timeout,
            secret=secret,
        )

    def _begin(self, link: GroupContext, with_broadcaster: bool = False) -> None:
        """Become the member whose end of a new group ``link`` is; if that fails, all are told why.

        Collective: yes, every member.
        """
        try:
            self._init_from(link)
            if with_broadcaster:
                self.start_broadcaster()
        except BaseException as error:
            link.abort_on_error(error)
            link.closing.close()
            raise

    def _init_from(self, link: GroupContext) -> None:
        super()._init_from(link)
        self._parts: dict[str, GroupCoordinator] = {}
        self._first_on_node = True
        if self.world_size > 1:
            self._divide(self.nodes)

    def _divide(self, nodes: Sequence[Sequence[int]]) -> None:
        """Build the groups within this node and between nodes, where they are not this one.
        Collective: yes, every member.
        """
        firsts = [node[0] for node in nodes]
        self._first_on_node = self.rank_in_group in firsts
        if len(nodes) > 1:
            mine = next(node for node in nodes if self.rank_in_group in node)
            self._parts["intra"] = self._part("intra", mine)
        if self._first_on_node and len(nodes) < self.world_size:
            self._parts["inter"] = self._part("inter", firsts)

    def _part(self, name: str, members: Sequence[int]) -> GroupCoordinator:
        link = self._context.subgroup(f"{self.name}.{name}", list(members))
        return self._context.closing.enter_context(GroupCoordinator.from_context(link))

    @property
    def hierarchy(self) -> Hierarchy[GroupCoordinator]:
        """The group seen as its nodes. Collective: no."""
        inter = self._parts.get("inter", self) if self._first_on_node else None
        return Hierarchy(self, self._parts.get("intra", self), inter)

    # --- together ------------------------------------------------------------------------

    @overload
    def barrier(self, **how: Unpack[Now]) -> None: ...
    @overload
    def barrier(self, **how: Unpack[Later]) -> Work[None]: ...
    @overload
    def barrier(self, **how: Unpack[Maybe]) -> Work[None] | None: ...
    def barrier(self, *, async_op: bool = False, timeout: Timeout = None) -> Work[None] | None:
        """Return once every member has called it, on the CPU. Collective: yes, every member."""
        return self._context.cpu.barrier(async_op=async_op, timeout=timeout)

    @overload
    def cpu_all_reduce_(self, x: Tensor, **how: Unpack[Now]) -> Tensor: ...
    @overload
    def cpu_all_reduce_(self, x: Tensor, **how: Unpack[Later]) -> Work[Tensor]: ...
    @overload
    def cpu_all_reduce_(self, x: Tensor, **how: Unpack[Maybe]) -> Tensor | Work[Tensor]: ...
    def cpu_all_reduce_(self, x: Tensor, *, async_op: bool = False, timeout: Timeout = None) -> Any:
        """Sum a CPU tensor into itself, over the CPU group. Collective: yes, every member."""
        return self._context.cpu.all_reduce_(x, async_op=async_op, timeout=timeout)

    def make_sibling_device_group(
        self, group_desc: str | None = None, *, timeout: float | None = DEFAULT_TIMEOUT
    ) -> ProcessGroup:
        """Make one more torch process group of the same members, to use beside `device_group`.

        Args:
            group_desc: its name for torch.
            timeout: seconds for its set-up; None: for ever.

        Returns:
            The process group; it is destroyed when this group is closed.

        Collective: yes, every member.

        Raises:
            GroupClosedError: this group is closed.
            GroupTimeoutError: some members did not come in time.
        """
        return self._open_context().sibling(group_desc or "sibling", timeout)

    @contextmanager
    def graph_capture(
        self, graph_capture_context: GraphCaptureContext | None = None
    ) -> Iterator[GraphCaptureContext]:
        """A context in which CUDA graphs may be captured; on the CPU it does nothing.

        Capture on the context's stream: ``torch.cuda.graph(graph, stream=context.stream)``. At the
        end of the context, the members exchange the addresses of the memory that they have
        captured. After that the graphs can be replayed, until the group is closed: by all members
        in the same order, and on a stream that is ordered with the group's other calls. Replays
        raise nothing: `check` does.

        Collective: yes, every member.

        Args:
            graph_capture_context: the context of another group, to capture on the same stream.

        Raises:
            DivergenceError: members have captured different collectives, or a message whose other
                end is not captured; do not replay them.
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

    def start_broadcaster(self) -> None:
        """Make a queue for the objects that rank 0 broadcasts, if there can be one.

        There is none in a group of one, nor between hosts without the launcher's secret; objects
        are then broadcast as other messages.

        Collective: yes, every member.
        """
        nodes = self.nodes
        if self.world_size > 1 and (len(nodes) == 1 or self._context.settings.secret is not None):
            self.mq_broadcaster = self.create_mq_broadcaster()
            self._context.closing.callback(self.mq_broadcaster.shutdown)

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
        """Make a queue from one member to all others, or from an outside writer to all members.

        Args:
            writer_rank: the writer's rank in the group; with ``external_writer_handle`` the rank
                that passes the handle.
            external_writer_handle: the handle of a queue whose writer is not in the group.
            blocking: whether to return only when all members have joined.
            connect_ip: the writer's address for members on other hosts; None: its address on the
                route to the store where the members met, if that is known.
            secret: the launcher's secret, for members on other hosts; None: the group's.
            timeout: seconds for ``blocking`` between hosts; on one host all members join at once.

        Returns:
            This member's end; the caller shuts it down. In a group of one the queue has no readers:
            messages are dropped.

        Collective: yes, every member.

        Raises:
            ValueError: ``writer_rank`` is not in the group.
        """
        check_rank("writer_rank", writer_rank, self.world_size)
        nodes = self._context.nodes
        if nodes is not None and len(nodes.all()) == 1 < self.world_size:
            wanted = external_writer_handle is None
            queue = queue_on_board(self._messenger, nodes.board, writer_rank, wanted=wanted)
            if queue is not None:
                return queue
        return MessageQueue.create_from_process_group(
            MessengerGroup(self._messenger),
            writer_rank=writer_rank,
            external_writer_handle=external_writer_handle,
            blocking=blocking,
            connect_ip=connect_ip or self._context.settings.sockets.address or None,
            secret=self._context.settings.secret if secret is None else secret,
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
        """Make a queue from each member to one of them.

        Args:
            reader_rank_in_group: the rank in the group of the member that reads all queues.
            blocking: whether to return only when the reader has joined this member's queue.
            connect_ip: this member's address, if the reader is on another host; None: as for
                `create_mq_broadcaster`.
            secret: the launcher's secret, if members are on another host than the reader; None: the
                group's.
            timeout: seconds for ``blocking``.

        Returns:
            The queue that this member writes; and at the reader all members' handles by rank in the
            group, each for ``MessageQueue.create_from_handle(handle, 0)``; elsewhere an empty list.

        Collective: yes, every member.
        """
        return MessageQueue.create_from_process_group_single_reader(
            MessengerGroup(self._messenger),
            reader_rank=reader_rank_in_group,
            blocking=blocking,
            connect_ip=connect_ip or self._context.settings.sockets.address or None,
            secret=self._context.settings.secret if secret is None else secret,
            timeout=timeout,
            watch=None if self._context.nodes is None else self._context.nodes.board.check,
        )
