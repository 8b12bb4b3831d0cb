"""All groups of one topology, in one frozen object; several may live in one process.

    groups = coordinator.init(tp=2, pp=2)          # under torchrun, on every rank
    y = groups.tp.all_reduce(x)
    groups.close()

`coordinator.rank_grid` shows which ranks form which group: tensor-parallel ranks are
neighbours, then come pipeline stages, then data-parallel replicas.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from coordinator.bootstrap import DEFAULT_TIMEOUT, Launch
from coordinator.graph_capture import GraphCaptureContext, capture_on_side_stream
from coordinator.link import OPERATION_TIMEOUT
from coordinator.rank_grid import RankGrid
from coordinator.topology import Topology
from shm_broadcast import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

    import torch
    from torch.distributed.distributed_c10d import Store

    from coordinator.group import GroupCoordinator
    from shm_broadcast import Board

_OWN_AXES = ("dp", "pp", "pcp", "tp")


@dataclass(frozen=True)
class ParallelGroups:
    """The groups that this process is in.

    Attributes:
        world: all ranks.
        tp: tensor parallel: the ranks that share this one's layers, each with a part of each.
        pp: pipeline parallel: the ranks that hold the other layers, in their order.
        dp: data parallel: the ranks that do what this one does, in the other replicas.
        pcp: prefill context parallel: the ranks that share this one's prompts.
        dcp: decode context parallel: a run of neighbours within ``tp`` that share contexts.
        ep: expert parallel: all ranks of this one's pipeline stage, in all replicas. Where
            these are the ranks of another group, it is that group.
        axes: the groups along the axes that the caller named.
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
            topology: the ranks.
            grid: with the axes dp, pp, pcp, tp, and any others.
            closing: what it holds is closed with the groups, or with what was built of them.
            dcp: how many neighbours within ``tp`` share contexts.
            world: the group of all ranks if there is one already; it is not closed with these.
            timeout: seconds for set-up; None: for ever.

        Collective: yes, every rank.

        Raises:
            ValueError: the grid has another size than the world, or ``dcp`` does not divide tp.
            GroupTimeoutError: some ranks did not come in time; names them.
        """
        if grid.size != topology.world_size:
            raise ValueError(f"{_needs(grid)}, not {topology.world_size}")
        rank, deadline = topology.rank, Deadline.after(timeout)
        runs = grid.split("tp", "dcp", dcp)

        def group(name: str, ranks: list[int]) -> GroupCoordinator:
            return closing.enter_context(topology.group(name, ranks, deadline))

        everyone = world or group("world", list(range(grid.size)))
        found = {name: group(name, grid.group_of(rank, name)) for name in grid.names}
        context = group("dcp", runs.group_of(rank, "dcp"))
        experts = grid.group_of(rank, "dp", "pcp", "tp")
        known = next((each for each in found.values() if each.ranks == experts), None)
        ep = known or group("ep", experts)
        ep.token_group = found["dp"]
        return cls(
            world=everyone,
            dcp=context,
            ep=ep,
            axes={name: each for name, each in found.items() if name not in _OWN_AXES},
            grid=grid,
            _closing=closing.pop_all(),
            **{name: found[name] for name in _OWN_AXES},
        )

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self.world.rank

    @property
    def device(self) -> torch.device:
        """Where the tensors of the collectives are."""
        return self.world.device

    @property
    def board(self) -> Board | None:
        """This node's board; None in a world of one that was given none."""
        return self.world.board

    @contextmanager
    def graph_capture(self) -> Iterator[GraphCaptureContext]:
        """Capture CUDA graphs with collectives of any of the groups; nothing on the CPU.

        As `GroupCoordinator.graph_capture`. Collective: yes, every rank.
        """
        named = (self.world, self.tp, self.pp, self.dp, self.pcp, self.dcp, self.ep)
        with ExitStack() as captures:
            context = captures.enter_context(capture_on_side_stream(self.device))
            for group in dict.fromkeys((*named, *self.axes.values())):
                captures.enter_context(group.graph_capture(context))
            yield context

    def close(self) -> None:
        """Close all groups; the second time does nothing. Collective: no.

        A board that was given stays open.
        """
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.__exit__(kind, error, trace)


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
    master_addr: str = "127.0.0.1",
    master_port: int = 0,
    store: Store | None = None,
    board: Board | None = None,
    backend: str | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    operation_timeout: float | None = OPERATION_TIMEOUT,
    torch_only: bool = False,
    checked: bool = False,
) -> ParallelGroups:
    """Meet the other ranks and build the groups.

    Who this process is comes from the environment that torchrun makes, unless ``rank`` is
    given. Without either it is alone.

    Args:
        tp: how many ranks share a layer.
        pp: how many stages a model has.
        dp: how many replicas there are; None: as many as there are ranks for.
        pcp: how many ranks share a prompt.
        dcp: how many neighbours within ``tp`` share contexts; divides it.
        axes: axes of your own and their sizes, outside of the others.
        rank: this process's global rank.
        world_size: how many processes; None: the product of the sizes.
        local_rank: this process's number on its node; chooses its GPU. None: its rank.
        master_addr: name or address of the host of rank 0, which keeps the store.
        master_port: the store's port.
        store: meet in this one instead: any torch store that all ranks reach.
        board: this node's board, made by a launcher, whose member i is rank i; it is not
            closed here. None: each node makes one.
        backend: ``"gloo"`` (CPU), ``"nccl"``; None: NCCL where there is a GPU, gloo elsewhere.
        timeout: seconds for all ranks to meet and build the groups; None: for ever.
        operation_timeout: seconds that an operation may take unless it says otherwise.
        torch_only: move tensors by torch's process groups, though there may be better.
        checked: before each collective over torch's process groups, compare what the members
            issue: a debug mode. Through shared memory that is always done.

    Collective: yes, every rank.

    Raises:
        ValueError: the sizes do not make up the world, or the environment is incomplete.
        GroupTimeoutError: some ranks did not come in time; names them.
    """
    inner = RankGrid.of({"pp": pp, "pcp": pcp, "tp": tp})
    outer = RankGrid.of(axes or {})
    model = inner.size * outer.size
    if rank is None:
        launch = Launch.from_environment()
    else:
        size = model * (dp or 1) if world_size is None else world_size
        local = rank if local_rank is None else local_rank
        launch = Launch(rank, size, local, master_addr, master_port)
    if world_size not in (None, launch.world_size):
        raise ValueError(f"world_size={world_size}, but {launch.world_size} ranks run")
    replicas = max(launch.world_size // model, 1) if dp is None else dp
    grid = RankGrid((*outer.axes, *RankGrid.of({"dp": replicas}).axes, *inner.axes))
    if grid.size != launch.world_size:
        advice = "start them by torchrun, or give rank= and world_size="
        raise ValueError(
            f"{_needs(grid)}, not {launch.world_size}"
            + (f"; {advice}" if launch.world_size == 1 else "")
        )
    deadline = Deadline.after(timeout)
    with ExitStack() as undo:
        topology = Topology.meet(
            launch,
            undo,
            store=store,
            board=board,
            backend=backend,
            timeout=deadline,
            operation_timeout=operation_timeout,
            torch_only=torch_only,
            checked=checked,
        )
        return ParallelGroups.build(topology, grid, undo, dcp=dcp, timeout=deadline)


def _needs(grid: RankGrid) -> str:
    sizes = " x ".join(f"{axis}={size}" for axis, size in grid.axes)
    return f"{sizes} takes {grid.size} ranks"
