"""All groups of one topology in one frozen object; a process may have several.

    groups = coordinator.init(tp=2, pp=2)          # under torchrun, on every rank
    y = groups.tp.all_reduce(x)
    groups.close()

`coordinator.rank_grid` shows which ranks form which group: tensor-parallel ranks are
neighbours, then come pipeline stages, then data-parallel replicas.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist

from coordinator.graph_capture import GraphCaptureContext, capture_on_side_stream
from coordinator.rank_grid import MODEL_AXES, RankGrid
from coordinator.setup.bootstrap import DEFAULT_TIMEOUT
from coordinator.setup.launcher import Launch
from coordinator.setup.settings import OPERATION_TIMEOUT, Settings
from coordinator.setup.topology import Topology
from coordinator.stores.secret import launcher_secret
from shm_broadcast import Deadline
from shm_broadcast.machine.forked_child import Closing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from torch.distributed.distributed_c10d import Store

    from coordinator.group import GroupCoordinator
    from shm_broadcast import Board


@dataclass(frozen=True)
class ParallelGroups:
    """The groups that this process is in.

    Attributes:
        world: all ranks.
        tp: tensor parallel: the ranks that hold parts of the same layers as this rank.
        pp: pipeline parallel: one rank of each pipeline stage, in the order of the stages.
        dp: data parallel: the ranks in the same position in all replicas of the model.
        pcp: prefill context parallel: the ranks that work on parts of the same prompts.
        dcp: decode context parallel: the ranks that hold parts of the same contexts. They are
            consecutive ranks of ``pcp`` and ``tp`` together, counted with ``pcp`` fastest.
        ep: expert parallel: all ranks of this rank's pipeline stage, in all replicas. Its
            ``token_group`` has those of ``dp`` and ``pcp`` together: the ranks that hold different
            rows. If another group has the same ranks, it is a second name of that group, and closed
            with it.
        axes: the groups along the caller's own axes, by name.
        grid: which ranks form which group.
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
        """Build all groups of a grid.

        Args:
            topology: all ranks of the job.
            grid: the ranks' grid, with the axes dp, pp, pcp and tp, and any others.
            closing: what it holds already is closed with the groups, or at once if this raises.
            dcp: the number of ranks that share contexts; divides tp x pcp.
            world: the group of all ranks, if there is one already; it is not closed with the rest.
            timeout: seconds for set-up; None: for ever.

        Collective: yes, every rank.

        Raises:
            ValueError: the grid has another size than the world, or ``dcp`` does not divide
                tp x pcp.
            GroupTimeoutError: some ranks did not come in time; names them.
        """
        if grid.size != topology.world_size:
            raise ValueError(f"{_needs(grid)}, not {topology.world_size}")
        rank, deadline = topology.rank, Deadline.after(timeout)
        sharers = grid.dcp_group_of(rank, dcp)

        def group(name: str, ranks: list[int]) -> GroupCoordinator:
            return closing.enter_context(topology.group(name, ranks, deadline))

        def along(name: str, *axes: str) -> GroupCoordinator:
            """The group along several axes; if that along one has the same ranks, that one."""
            ranks = grid.group_of(rank, *axes)
            known = next((found[axis] for axis in axes if found[axis].ranks == ranks), None)
            return known or group(name, ranks)

        everyone = world or group("world", list(range(grid.size)))
        found = {name: group(name, grid.group_of(rank, name)) for name in grid.names}
        context = group("dcp", sharers)
        ep = along("ep", "dp", "pcp", "tp")
        rows = ep if found["tp"].world_size == 1 else along("ep.rows", "dp", "pcp")
        return cls(
            world=everyone,
            dcp=context,
            ep=ep.exchanging_rows_in(rows),
            axes={name: found[name] for name in grid.own_axes},
            grid=grid,
            _rows=rows,
            _closing=closing.pop_all(),
            **{name: found[name] for name in MODEL_AXES},
        )

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self.world.rank

    @property
    def device(self) -> torch.device:
        """The device of the tensors in collectives."""
        return self.world.device

    @property
    def board(self) -> Board | None:
        """This node's board; None in a world of one that was given none."""
        return self.world.board

    @contextmanager
    def graph_capture(self) -> Iterator[GraphCaptureContext]:
        """Capture CUDA graphs that contain collectives of any of the groups; on the CPU, nothing.

        Like `GroupCoordinator.graph_capture`, for all groups at once. Collective: yes, every rank.
        """
        named = (self.world, self.tp, self.pp, self.dp, self.pcp, self.dcp, self.ep, self._rows)
        with ExitStack() as captures:
            context = captures.enter_context(capture_on_side_stream(self.device))
            different = {each.unique_name: each for each in (*named, *self.axes.values())}
            for group in different.values():
                captures.enter_context(group.graph_capture(context))
            yield context

    def close(self) -> None:
        """Close all groups; idempotent. Collective: no.

        A board that was given to `init` stays open.
        """
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._closing.__exit__(*error)


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
    """Meet the other ranks and build the groups.

    This process's rank and the place to meet come from torchrun's environment variables, unless
    ``rank`` is given. Without either the process is a world of one.

    Args:
        tp: the number of ranks that share each layer.
        pp: the number of pipeline stages.
        dp: the number of replicas; None: as many as there are ranks for.
        pcp: the number of ranks that share a prompt.
        dcp: the number of ranks that share contexts; divides tp x pcp. If ``pcp`` is 1, these are
            neighbours within ``tp``.
        axes: your own axes with their sizes; they are the outermost axes of the grid. Their names
            must differ from those of the built-in groups.
        rank: this process's global rank.
        world_size: the number of processes; None: the product of the sizes.
        local_rank: this process's number on its node; chooses its GPU. None: that of torchrun's
            environment; with ``rank``, that.
        master_addr: name or address of rank 0's host, which hosts the store; only with ``rank``.
            None: this host.
        master_port: the store's port; only with ``rank``.
        store: a torch store to meet in instead; all ranks must reach it. Worlds that meet
            at the same time need a store each.
        board: this node's board, if a launcher made it: member i is rank i. It is not closed with
            the groups. None: each node makes one.
        node_of: for each rank the first rank on its node, if the launcher that made the boards
            knows; None: the ranks find out.
        backend: ``"gloo"`` (CPU) or ``"nccl"``; None: NCCL if there is a GPU, else gloo.
        timeout: seconds for all ranks to meet and build the groups; None: for ever.
        operation_timeout: default seconds that an operation may take; None: for ever.
        torch_only: whether to move tensors only by torch's process groups.
        checked: debug mode: whether to compare the members' operations before each collective over
            torch's process groups and on devices, not just within about a second. Over shared
            memory this is always done. It is also on if ``TORCH_DISTRIBUTED_DEBUG`` is ``DETAIL``,
            like torch's own checks.
        secret: the launcher's secret, 16 bytes or more, which all ranks have and nobody else. None:
            the contents of the file that ``GROUP_COORDINATOR_SECRET_FILE`` names, if it is set.

    Returns:
        The groups; close them, or use them as a context manager: a rank that leaves it with an
        error tells the others why, unless a launcher does.

    Collective: yes, every rank.

    Raises:
        ValueError: the product of the sizes is not the number of ranks, the environment is
            incomplete, an address is given without ``rank``, torch.distributed has several ranks
            of which the environment says nothing, or ranks were given different sizes or
            settings: every rank's error says which.
        SecretError: the secret is too short, other users may read its file, or only some ranks
            have one.
        GroupTimeoutError: some ranks did not come in time; names them.
        PeerLostError: a rank has ended after the ranks of its host had met.
        GroupAbortedError: a rank has given up; says why. Or it was killed before that, and started
            again.
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
    with Closing() as undo:
        topology = Topology.meet(
            launch,
            settings,
            undo,
            store=store,
            board=board,
            node_of=node_of,
            timeout=deadline,
            sizes={
                **dict(reversed(grid.axes)),  # what was given before what follows from it
                "dcp": dcp,
                "axes": ", ".join(grid.own_axes) or "none",
            },
        )
        # A launcher whose board it is hears of failures itself, and tells the others.
        telling_why = topology.telling_why() if board is None else nullcontext()
        with telling_why:
            groups = ParallelGroups.build(topology, grid, undo, dcp=dcp, timeout=deadline)
        groups._closing.enter_context(telling_why)
        return groups


def _launch(
    rank: int | None,
    world_size: int,
    local_rank: int | None,
    address: str | None,
    port: int | None,
    secret: bytes | None,
) -> Launch:
    """This process among the ranks, and where they meet; without ``rank``, as the launcher's
    environment says.
    """
    if rank is not None:
        local = rank if local_rank is None else local_rank
        address, port = address or "127.0.0.1", port or 0
        return Launch(rank, world_size, local, address, port, secret=launcher_secret(secret))
    if address is not None or port is not None:
        raise ValueError(
            "master_addr and master_port need rank=: without it the environment says where the "
            "ranks meet"
        )
    found = Launch.from_environment()
    if found.world_size == 1 and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"torch.distributed has {dist.get_world_size()} ranks here, and no environment says "
            "where they meet for groups: give rank= with store= or master_port=, or use "
            "GroupCoordinator.from_process_group"
        )
    return replace(
        found,
        local_rank=found.local_rank if local_rank is None else local_rank,
        secret=found.secret if secret is None else secret,
    )


def _needs(grid: RankGrid) -> str:
    return f"{grid} takes {grid.size} ranks"
