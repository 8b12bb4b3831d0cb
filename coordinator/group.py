"""Implement `GroupCoordinator`, one member's end of a group, with its queues and graph capture.

If all members are on one host, a queue between them uses the group's board: a lost member or an
abort of the group ends every wait in it. A queue to other hosts, or from outside the group, has its
own board, and needs the writer's address and a secret; see `shm_broadcast.MessageQueue`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from coordinator import torch_groups
from coordinator.context import GroupContext, rendezvous_in
from coordinator.member import Hierarchy
from coordinator.messages.messenger import Messenger
from coordinator.rendezvous import Settings
from coordinator.secret import launcher_secret
from coordinator.stores import DEFAULT_TIMEOUT
from coordinator.verbs import GroupVerbs
from device_comm import Work
from device_comm.verbs.checks import Later, Now, Timeout, check_rank
from shm_broadcast import Board, MessageQueue, QueueHandle

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class GraphCaptureContext:
    """The CUDA stream of a graph capture; None on the CPU."""

    stream: torch.cuda.Stream | None


@contextmanager
def capture_on_side_stream(
    device: torch.device, context: GraphCaptureContext | None = None
) -> Iterator[GraphCaptureContext]:
    """Make a side stream current; it first waits for all work on the current stream.

    ``context``: a capture in progress, whose stream is used. On the CPU this does nothing.
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
    """A group as an `ObjectGroup`, to set queues up with (`shm_broadcast.queue.rendezvous`)."""

    def __init__(self, messenger: Messenger) -> None:
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
    kind: type[MessageQueue],
    messenger: Messenger,
    board: Board,
    writer_rank: int,
    *,
    wanted: bool,
) -> MessageQueue | None:
    """Make a queue from one member to all others, on the group's board.
    Collective: yes, every member.

    Returns this member's end; None if ``wanted`` is False at the writer, the only one whose value
    counts.
    """
    members = messenger.cpu.members
    writer = members[writer_rank]
    if messenger.cpu.rank == writer_rank:
        readers = [each for each in members if each != writer]
        queue = kind.on_board(board, writer, readers) if wanted else None
        messenger.broadcast_object(queue and queue.export_handle(), writer_rank, None)
    else:
        handle: QueueHandle | None = messenger.broadcast_object(None, writer_rank, None)
        queue = None if handle is None else kind.attach(handle, board)
    if queue is not None:
        messenger.cpu.barrier()
    return queue


def own_group(
    group_ranks: Sequence[Sequence[int]], rank: int, world_size: int | None = None
) -> Sequence[int]:
    """Return the group of ``group_ranks`` that contains ``rank``.

    Raises:
        ValueError: no group contains ``rank``, or a rank is listed twice or is not in the world.
            All ranks get the same error, except one in no group.
        TypeError: ``group_ranks`` is not a sequence of sequences of ranks.
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


class GroupCoordinator(GroupVerbs):
    """One member's end of a named group: collectives, messages, and the members' ranks.

    Ranks in arguments are ranks in the group. The attributes `rank`, `ranks`, `first_rank`,
    `last_rank`, `next_rank` and `prev_rank` are global ranks. `coordinator.member.Member` lists all
    attributes.

    One thread at a time may use a group. Calls raise the errors of `shm_broadcast.errors`. No call
    waits longer than its timeout, or for a member that died or aborted the group.

    In a group of one each operation returns its input itself: a later change of the result in place
    changes the input. With ``out=`` the input is copied there.
    """

    _queue_type: ClassVar[type[MessageQueue]] = MessageQueue
    """The class of the group's queues."""

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
        """Build this process's group. Collective: yes, every member of it and no other rank.

        The members meet in the store of torch's default process group.

        Args:
            group_ranks: the global ranks of all groups of this kind; this process is in exactly
                one.
            local_rank: this process's number on its host; chooses its GPU.
            torch_distributed_backend: ``"gloo"`` or ``"nccl"``; None: NCCL if there is a GPU, else
                gloo.
            use_device_communicator: False: move tensors only by torch's process groups.
            use_message_queue_broadcaster: whether to `start_broadcaster`.
            group_name: for errors and status. Members meet by this name and ``group_ranks``.
            timeout: seconds for set-up; None: no limit.
            secret: as for `coordinator.init`.

        Raises:
            ValueError: this process is in no group or in several, its group has a rank outside the
                world, or torch has no default process group.
            GroupTimeoutError: some members did not arrive in time; names them.
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
        """Make a group of a torch process group's members, in its order.
        Collective: yes, every member.

        The caller keeps the process group: do not use it directly until this group is closed, then
        destroy it. If it has no CPU backend, a CPU group is made.

        Args:
            process_group: the members.
            group_name: for errors and status.
            stream: the CUDA stream of the collectives. They run after work already on the current
                stream, and before later work on it. None: the current stream.
            local_rank: this process's number on its host; None: its global rank.
            timeout, secret: as for the constructor.

        Raises:
            ValueError: ``stream`` is on another device than the group, or the group is on the CPU.
            GroupTimeoutError: some members did not arrive in time.
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
        """Make a group of a mesh's members: ``from_device_mesh(mesh["tp"])``.
        Collective: yes, every member of the mesh. Other arguments as for `from_process_group`.

        Raises:
            ValueError: ``mesh`` has more than one dimension; or as for `from_process_group`.
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
        firsts = [node[0] for node in nodes]
        self._first_on_node = self.rank_in_group in firsts
        if len(nodes) > 1:
            own_host = next(node for node in nodes if self.rank_in_group in node)
            self._parts["intra"] = self._part("intra", own_host)
        if self._first_on_node and len(nodes) < self.world_size:
            self._parts["inter"] = self._part("inter", firsts)

    def _part(self, name: str, members: Sequence[int]) -> GroupCoordinator:
        link = self._context.subgroup(f"{self.name}.{name}", list(members))
        return self._context.closing.enter_context(GroupCoordinator.from_context(link))

    @property
    def hierarchy(self) -> Hierarchy[GroupCoordinator]:
        """The group's members by host, as groups."""
        inter = self._parts.get("inter", self) if self._first_on_node else None
        return Hierarchy(self, self._parts.get("intra", self), inter)

    # --- all members ---------------------------------------------------------------------

    @overload
    def barrier(self, **how: Unpack[Now]) -> None: ...
    @overload
    def barrier(self, **how: Unpack[Later]) -> Work[None]: ...
    def barrier(self: Any, *, async_op: bool = False, timeout: Timeout = None) -> Any:
        """Wait, on the CPU, until every member has called it. Collective: yes, every member."""
        return self._context.cpu.barrier(async_op=async_op, timeout=timeout)

    @overload
    def cpu_all_reduce_(self, x: Tensor, **how: Unpack[Now]) -> Tensor: ...
    @overload
    def cpu_all_reduce_(self, x: Tensor, **how: Unpack[Later]) -> Work[Tensor]: ...
    def cpu_all_reduce_(
        self: Any, x: Tensor, *, async_op: bool = False, timeout: Timeout = None
    ) -> Any:
        """Sum ``x``, a CPU tensor, in place, over the CPU group. Collective: yes, every member.

        Returns ``x``; with ``async_op`` a `Work` of it. ``timeout`` is in seconds.
        """
        return self._context.cpu.all_reduce_(x, async_op=async_op, timeout=timeout)

    def make_sibling_device_group(
        self, group_desc: str | None = None, *, timeout: float | None = DEFAULT_TIMEOUT
    ) -> ProcessGroup:
        """Make another torch process group of the members, beside `device_group`.
        Collective: yes, every member. `close` destroys it.

        Args:
            group_desc: its name for torch.
            timeout: seconds for set-up; None: no limit.

        Raises:
            GroupClosedError: this group is closed.
            GroupTimeoutError: some members did not arrive in time.
        """
        return self._open_context().sibling(group_desc or "sibling", timeout)

    @contextmanager
    def graph_capture(
        self, graph_capture_context: GraphCaptureContext | None = None
    ) -> Iterator[GraphCaptureContext]:
        """Enter a context in which CUDA graphs may be captured. Collective: yes, every member.

        Capture on the context's stream: ``torch.cuda.graph(graph, stream=context.stream)``. On
        exit, the members exchange the addresses of the captured memory. Then the graphs can be
        replayed until the group is closed. All members replay them in the same order, on a stream
        that is ordered with the group's other calls. Replays raise no errors; `check` does. On the
        CPU the context does nothing.

        Args:
            graph_capture_context: another group's context, to capture on the same stream.

        Raises:
            DivergenceError: members captured different collectives, or a message whose other end is
                not captured. The graphs must not be replayed.
        """
        with ExitStack() as captures:
            context = captures.enter_context(
                capture_on_side_stream(self.device, graph_capture_context)
            )
            captures.enter_context(self._context.device.graph_capture())
            for part in (self.hierarchy.intra, self.hierarchy.inter):
                if isinstance(part, GroupCoordinator) and part is not self:
                    captures.enter_context(part.graph_capture(context))
            yield context

    def start_broadcaster(self) -> None:
        """Make `mq_broadcaster`, the queue for objects of rank 0. Collective: yes, every member.

        None is made in a group of one, or between hosts without the launcher's secret; objects are
        then broadcast as other messages are.
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
        """Make a queue from one member, or an outside writer, to all others.
        Collective: yes, every member.

        Args:
            writer_rank: the writer's rank in the group; with ``external_writer_handle``, the rank
                that has the handle.
            external_writer_handle: the handle of a queue whose writer is not in the group.
            blocking: whether to wait until all members have joined; on one host they join at once.
            connect_ip: the writer's address for members on other hosts; None: its address on the
                route to the group's store, if known.
            secret: the launcher's secret, for members on other hosts; None: the group's.
            timeout: seconds for ``blocking`` between hosts.

        Returns:
            This member's end; the caller shuts it down. In a group of one the queue has no readers
            and drops messages.

        Raises:
            ValueError: ``writer_rank`` is not in the group.
        """
        check_rank("writer_rank", writer_rank, self.world_size)
        nodes = self._context.nodes
        if nodes is not None and len(nodes.all()) == 1 < self.world_size:
            wanted = external_writer_handle is None
            queue = queue_on_board(
                self._queue_type, self._messenger, nodes.board, writer_rank, wanted=wanted
            )
            if queue is not None:
                return queue
        return self._queue_type.create_from_process_group(
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
        """Make a queue from each member to one reader. Collective: yes, every member.

        Args:
            reader_rank_in_group: the reader's rank in the group.
            blocking: whether to wait until the reader has joined this member's queue.
            connect_ip: this member's address, if the reader is on another host; None: as for
                `create_mq_broadcaster`.
            secret, timeout: as for `create_mq_broadcaster`.

        Returns:
            The queue that this member writes; and a list: at the reader all members' handles, by
            rank in the group, each for ``MessageQueue.create_from_handle(handle, 0)``; elsewhere
            empty.
        """
        return self._queue_type.create_from_process_group_single_reader(
            MessengerGroup(self._messenger),
            reader_rank=reader_rank_in_group,
            blocking=blocking,
            connect_ip=connect_ip or self._context.settings.sockets.address or None,
            secret=self._context.settings.secret if secret is None else secret,
            timeout=timeout,
            watch=None if self._context.nodes is None else self._context.nodes.board.check,
        )
