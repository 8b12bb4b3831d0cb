"""Build the groups of a job: all ranks, parallel groups, and groups over a store alone.

    groups = coordinator.init(tp=2, pp=2)          # under torchrun, on every rank
    y = groups.tp.all_reduce(x)
    groups.close()

`coordinator.rank_grid` defines which ranks form which group: tensor-parallel ranks are neighbours,
then pipeline stages, then data-parallel replicas.

A `StatelessGroupCoordinator` needs only a store. To add or remove members, the remaining members
call `resized` and the new ones construct a group, with the same ranks and name. Only the members of
the new group take part; the old group works until it is closed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist

from coordinator.context import connect, rendezvous_in, single
from coordinator.group import (
    GraphCaptureContext,
    GroupCoordinator,
    capture_on_side_stream,
    own_group,
)
from coordinator.hosts import AbortOnError, HostTopology, find_nodes, known_nodes
from coordinator.launcher import Launch, own_address
from coordinator.rank_grid import MODEL_AXES, RankGrid
from coordinator.rendezvous import (
    OPERATION_TIMEOUT,
    Rendezvous,
    Settings,
    authenticated,
    meet,
)
from coordinator.secret import launcher_secret
from coordinator.stores import DEFAULT_TIMEOUT
from coordinator.torch_groups import SocketChoice
from shm_broadcast import Board, Deadline
from shm_broadcast.process import ForkSafeExitStack

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


@dataclass(frozen=True)
class Topology:
    """All ranks of a job, from which its groups are built.

    Attributes:
        rank: this process's global rank.
        world_size: the number of ranks.
        settings: the settings of all groups.
        nodes: which ranks share a host, and this host's board; None for a world of one without a
            board.
        exchange: the rendezvous of all ranks; None for a world of one.
        group_type: the class of the groups.
    """

    rank: int
    world_size: int
    settings: Settings
    nodes: HostTopology | None
    exchange: Rendezvous | None
    group_type: type[GroupCoordinator] = GroupCoordinator

    @classmethod
    def meet(
        cls,
        launch: Launch,
        settings: Settings,
        closing: ExitStack,
        *,
        store: Store | None = None,
        board: Board | None = None,
        node_of: Sequence[int] | None = None,
        timeout: float | Deadline | None = DEFAULT_TIMEOUT,
        sizes: Mapping[str, object] = {},
    ) -> Topology:
        """Wait for all ranks and determine which share a host. Collective: yes, every rank.

        Args:
            launch: this process's rank, and the address of the store.
            settings: for all groups; gloo's address is filled in.
            closing: closes everything made here.
            store, board, node_of, timeout: as for `init`.
            sizes: further values that must be equal on all ranks, by name.

        Raises:
            ValueError, SecretError: ranks have different values; names them.
            GroupTimeoutError: some ranks did not arrive in time; names them.
        """
        if launch.world_size == 1:
            nodes = None if board is None else known_nodes(board, (0,), (board.member or 0,))
            return cls(0, 1, settings, nodes, None)
        terms = {name: str(size) for name, size in sizes.items()} | settings.terms()
        exchange, address = meet(launch, store, timeout, terms, board)
        with exchange.setting_up():
            exchange = authenticated(exchange, launch.secret, closing)
            if board is None or node_of is None:
                nodes = find_nodes(exchange, board, address)
            else:
                nodes = known_nodes(board, node_of)
        closing.callback(nodes.close)
        address = address or ("127.0.0.1" if len(nodes.all()) == 1 else "")
        settings = replace(settings, sockets=SocketChoice(launch.interface, address))
        return cls(launch.rank, launch.world_size, settings, nodes, exchange)

    def abort_on_error(self) -> AbstractContextManager[None]:
        """Return a context that aborts this host's board with an error raised inside."""
        return nullcontext() if self.nodes is None else AbortOnError(self.nodes.board)

    def group(
        self, name: str, ranks: Sequence[int], timeout: float | Deadline | None = DEFAULT_TIMEOUT
    ) -> GroupCoordinator:
        """Build the group of these global ranks, this process's among them.
        Collective: yes, these ranks.

        ``timeout``: seconds for set-up; None: no limit.

        Raises:
            GroupTimeoutError: some members did not arrive in time; names them.
            ValueError: this process is not a member, or a rank is listed twice or is not in the
                world.
        """
        own_group([ranks], self.rank, self.world_size)
        nodes = self.nodes and self.nodes.sub(ranks)
        if self.exchange is None or len(ranks) == 1:
            link = single(name, self.rank, self.settings, nodes)
        else:
            exchange = self.exchange.sub(name, ranks, Deadline.after(timeout))
            link = connect(exchange, ranks, self.settings, nodes)
        return self.group_type.from_context(link)


@dataclass(frozen=True)
class ParallelGroups:
    """The groups that this process is in.

    Attributes:
        world: all ranks.
        tp: tensor parallel: the ranks that hold parts of the same layers as this rank.
        pp: pipeline parallel: one rank of each pipeline stage, in the order of the stages.
        dp: data parallel: the ranks at the same position in all replicas of the model.
        pcp: prefill context parallel: the ranks that work on parts of the same prompts.
        dcp: decode context parallel: the ranks that hold parts of the same contexts. They are
            consecutive ranks of ``pcp`` and ``tp`` together, counted with ``pcp`` fastest.
        ep: expert parallel: all ranks of this rank's pipeline stage, in all replicas. Its
            ``token_group`` is ``dp`` and ``pcp`` together: the ranks with different rows. If
            another group has the same ranks, ``ep`` is a second name of that group, and both close
            together.
        axes: the groups along the caller's own axes, by name.
        grid: the grid that defines the groups.
    """

    world: GroupCoordinator
    tp: GroupCoordinator
    pp: GroupCoordinator
    dp: GroupCoordinator
    pcp: GroupCoordinator
    dcp: GroupCoordinator
    ep: GroupCoordinator
    axes: Mapping[str, GroupCoordinator]
    grid: RankGrid
    _rows: GroupCoordinator = field(repr=False)
    _closing: ExitStack = field(repr=False)

    @classmethod
    def build(
        cls,
        topology: Topology,
        grid: RankGrid,
        closing: ExitStack,
        *,
        dcp: int = 1,
        world: GroupCoordinator | None = None,
        timeout: float | Deadline | None = DEFAULT_TIMEOUT,
    ) -> Self:
        """Build all groups of a grid. Collective: yes, every rank.

        Args:
            topology: all ranks of the job.
            grid: the ranks' grid, with the axes dp, pp, pcp and tp, and any others.
            closing: closed with the groups, or at once if this raises.
            dcp: the number of ranks that share contexts; divides tp x pcp.
            world: an existing group of all ranks, which stays open; None: build one.
            timeout: seconds for set-up; None: no limit.

        Raises:
            ValueError: the grid has another size than the world, or ``dcp`` does not divide tp x
                pcp.
            GroupTimeoutError: some ranks did not arrive in time; names them.
        """
        if grid.size != topology.world_size:
            raise ValueError(f"{_needs(grid)}, not {topology.world_size}")
        rank, deadline = topology.rank, Deadline.after(timeout)
        dcp_ranks = grid.dcp_group_of(rank, dcp)

        def group(name: str, ranks: list[int]) -> GroupCoordinator:
            return closing.enter_context(topology.group(name, ranks, deadline))

        def along(name: str, *axes: str) -> GroupCoordinator:
            ranks = grid.group_of(rank, *axes)
            existing = next((by_axis[axis] for axis in axes if by_axis[axis].ranks == ranks), None)
            return existing or group(name, ranks)

        everyone = world or group("world", list(range(grid.size)))
        by_axis = {name: group(name, grid.group_of(rank, name)) for name in grid.names}
        context = group("dcp", dcp_ranks)
        ep = along("ep", "dp", "pcp", "tp")
        rows = ep if by_axis["tp"].world_size == 1 else along("ep.rows", "dp", "pcp")
        return cls(
            world=everyone,
            dcp=context,
            ep=ep.exchanging_rows_in(rows),
            axes={name: by_axis[name] for name in grid.own_axes},
            grid=grid,
            _rows=rows,
            _closing=closing.pop_all(),
            **{name: by_axis[name] for name in MODEL_AXES},
        )

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self.world.rank

    @property
    def device(self) -> torch.device:
        """The device of the collectives' tensors."""
        return self.world.device

    @property
    def board(self) -> Board | None:
        """This host's board; None in a world of one without a given board."""
        return self.world.board

    @contextmanager
    def graph_capture(self) -> Iterator[GraphCaptureContext]:
        """Capture CUDA graphs with collectives of any of the groups; on the CPU it does nothing.

        As `GroupCoordinator.graph_capture`, for all groups at once. Collective: yes, every rank.
        """
        named = (self.world, self.tp, self.pp, self.dp, self.pcp, self.dcp, self.ep, self._rows)
        with ExitStack() as captures:
            context = captures.enter_context(capture_on_side_stream(self.device))
            different = {each.unique_name: each for each in (*named, *self.axes.values())}
            for group in different.values():
                captures.enter_context(group.graph_capture(context))
            yield context

    def close(self) -> None:
        """Close all groups; idempotent. A board given to `init` stays open."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._closing.__exit__(*error)


_open: list[ParallelGroups] = []


def current() -> ParallelGroups:
    """Return the groups of the latest `init` in this process that are still open.

    In a pool's worker these are the worker's groups. Raises RuntimeError if there are none.
    """
    for groups in reversed(_open):
        if not groups.world.closed:
            return groups
    raise RuntimeError("this process has no open groups: call coordinator.init")


def init(
    tp: int = 1,
    pp: int = 1,
    dp: int | None = None,
    *,
    pcp: int = 1,
    dcp: int = 1,
    axes: Mapping[str, int] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
    store: Store | None = None,
    board: Board | None = None,
    node_of: Sequence[int] | None = None,
    backend: str | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    operation_timeout: float | None = OPERATION_TIMEOUT,
    torch_only: bool = False,
    checked: bool = False,
    secret: bytes | None = None,
) -> ParallelGroups:
    """Meet the other ranks and build the groups. Collective: yes, every rank.

    This process's rank and the store's address are those of torchrun's environment, unless ``rank``
    is given. Without either the process is a world of one.

    Args:
        tp: the number of ranks that share each layer.
        pp: the number of pipeline stages.
        dp: the number of replicas; None: as many as the number of ranks allows.
        pcp: the number of ranks that share a prompt.
        dcp: the number of ranks that share contexts; divides tp x pcp. If ``pcp`` is 1, these are
            neighbours within ``tp``.
        axes: the caller's own axes with their sizes, outermost in the grid. Their names must differ
            from those of the built-in groups.
        rank: this process's global rank.
        world_size: the number of processes; None: the product of the sizes.
        local_rank: this process's number on its host; chooses its GPU. None: torchrun's, or
            ``rank`` if that is given.
        master_addr: name or address of rank 0's host, which hosts the store; only with ``rank``.
            None: this host.
        master_port: the store's port; only with ``rank``.
        store: a torch store to use instead; all ranks must reach it. Worlds that are set up at the
            same time need one store each.
        board: this host's board, if a launcher made it: member i is rank i. It stays open when the
            groups are closed. None: each host makes one.
        node_of: for each rank the first rank on its host, if the launcher that made the boards
            provides it; None: the ranks determine it.
        backend: ``"gloo"`` (CPU) or ``"nccl"``; None: NCCL if there is a GPU, else gloo.
        timeout: seconds for all ranks to meet and build the groups; None: no limit.
        operation_timeout: default seconds per operation; None: no limit.
        torch_only: whether to move tensors only by torch's process groups.
        checked: debug mode: whether members compare operations before each collective over torch's
            process groups and on devices; otherwise within about a second. Over shared memory they
            always do. ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` turns it on as well, as it does torch's
            own checks.
        secret: the launcher's secret, 16 bytes or more, known to all ranks and to no other process.
            None: the contents of the file that ``GROUP_COORDINATOR_SECRET_FILE`` names, if it is
            set.

    Returns:
        The groups. Close them, or use them as a context manager: an error raised inside aborts the
        groups on all ranks, unless a launcher made the board.

    Raises:
        ValueError: the product of the sizes is not the number of ranks, the environment is
            incomplete, an address is given without ``rank``, torch.distributed has several ranks
            and the environment has none, or ranks have different sizes or settings: every rank's
            error names them.
        SecretError: the secret is too short, other users may read its file, or only some ranks have
            one.
        GroupTimeoutError: some ranks did not arrive in time; names them.
        PeerLostError: a rank exited after the ranks of its host had met.
        GroupAbortedError: a rank aborted; carries the reason.
    """
    grid_of = partial(RankGrid.of_job, tp=tp, pp=pp, pcp=pcp, axes=axes)
    grid = grid_of(dp=1 if dp is None else dp)
    size = grid.size if world_size is None else world_size
    launch = _launch(rank, size, local_rank, master_addr, master_port, secret)
    if world_size not in (None, launch.world_size):
        raise ValueError(f"world_size={world_size}, but {launch.world_size} ranks run")
    if dp is None:
        grid = grid_of(dp=max(launch.world_size // grid.size, 1))
    if grid.size != launch.world_size:
        alone = launch.world_size == 1
        advice = "; start them by torchrun, or give rank= and world_size=" if alone else ""
        raise ValueError(f"{_needs(grid)}, not {launch.world_size}{advice}")
    deadline = Deadline.after(timeout)
    settings = Settings.of(
        backend,
        launch.local_rank,
        timeout=operation_timeout,
        torch_only=torch_only,
        checked=checked,
        secret=launch.secret,
    )
    with ForkSafeExitStack() as undo:
        topology = Topology.meet(
            launch,
            settings,
            undo,
            store=store,
            board=board,
            node_of=node_of,
            timeout=deadline,
            sizes={
                **dict(reversed(grid.axes)),  # an error names given sizes before the derived dp
                "dcp": dcp,
                "axes": ", ".join(grid.own_axes) or "none",
            },
        )
        # A launcher that made the board detects failures itself and aborts the board.
        aborting = topology.abort_on_error() if board is None else nullcontext()
        with aborting:
            groups = ParallelGroups.build(topology, grid, undo, dcp=dcp, timeout=deadline)
        groups._closing.enter_context(aborting)
        _open.append(groups)
        groups._closing.callback(_open.remove, groups)
        return groups


def _launch(
    rank: int | None,
    world_size: int,
    local_rank: int | None,
    address: str | None,
    port: int | None,
    secret: bytes | None,
) -> Launch:
    if rank is not None:
        local = rank if local_rank is None else local_rank
        address, port = address or "127.0.0.1", port or 0
        return Launch(rank, world_size, local, address, port, secret=launcher_secret(secret))
    if address is not None or port is not None:
        raise ValueError(
            "master_addr and master_port need rank=: without it the environment has the store's "
            "address"
        )
    launch = Launch.from_environment()
    if launch.world_size == 1 and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"torch.distributed has {dist.get_world_size()} ranks here, and the environment has no "
            "address of a store for groups: give rank= with store= or master_port=, or use "
            "GroupCoordinator.from_process_group"
        )
    return replace(
        launch,
        local_rank=launch.local_rank if local_rank is None else local_rank,
        secret=launch.secret if secret is None else secret,
    )


def _needs(grid: RankGrid) -> str:
    return f"{grid} takes {grid.size} ranks"


class StatelessGroupCoordinator(GroupCoordinator):
    """A group whose members meet in a given store, without torch's default group."""

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
        """Build the group that contains ``global_rank``. Collective: yes, every member.

        The other arguments and errors are those of `GroupCoordinator`.

        Args:
            coord_store: the store of the rendezvous; it must outlive the group.
            host: a host that all members can reach: gloo listens at the address on the route to it.
            global_rank: this process's global rank.
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
        link = rendezvous_in(
            lambda: coord_store, place, global_rank, ranks, name, settings, timeout
        )
        self._begin(link, use_message_queue_broadcaster)

    def resized(
        self, group_ranks: Sequence[Sequence[int]], *, timeout: float | None = DEFAULT_TIMEOUT
    ) -> Self:
        """Return a new group with other members. Collective: yes, every member of the new group.

        This process is a member; the new members call the constructor. This group stays usable.

        Args:
            group_ranks: as for the constructor.
            timeout: seconds for set-up; None: no limit.
        """
        device_communicator, queue = self._uses
        return type(self)(
            group_ranks,
            self.local_rank,
            self._context.settings.backend,
            device_communicator,
            self._store,
            queue,
            self.name,
            self._host,
            self.rank,
            timeout=timeout,
            secret=self._context.settings.secret,
        )
