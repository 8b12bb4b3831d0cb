"""All groups of one topology, in one frozen object; several may live in one process.

    groups = coordinator.init(tp=2, pp=2)          # under torchrun, on every rank
    y = groups.tp.all_reduce(x)
    groups.close()

`coordinator.rank_grid` shows which ranks form which group: tensor-parallel ranks are
neighbours, then come pipeline stages, then data-parallel replicas.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from coordinator.bootstrap import DEFAULT_TIMEOUT, Launch, meet
from coordinator.group import GroupCoordinator
from coordinator.link import OPERATION_TIMEOUT, Settings, alone, connect
from coordinator.nodes import Nodes, find_nodes
from coordinator.rank_grid import RankGrid
from coordinator.torch_groups import SocketChoice

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

    from coordinator.exchange import Exchange
    from shm_broadcast import Board


_GROUPS = {"world": ("dp", "pp", "tp"), "tp": ("tp",), "pp": ("pp",), "dp": ("dp",)}
"""Each group's name, and the axes along which its ranks differ."""


@dataclass(frozen=True)
class ParallelGroups:
    """The groups that this process is in.

    Attributes:
        world: all ranks.
        tp: the ranks that share this one's layers, each with a part of every layer.
        pp: the ranks that hold the other layers of this one's model, in their order.
        dp: the ranks that do what this one does, in the other replicas.
        grid: which ranks form which group.
    """

    world: GroupCoordinator
    tp: GroupCoordinator
    pp: GroupCoordinator
    dp: GroupCoordinator
    grid: RankGrid
    _closing: ExitStack = field(repr=False)

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

    def close(self) -> None:
        """Close all groups; the second time does nothing. Collective: no.

        A board that was given stays open.
        """
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def init(
    tp: int = 1,
    pp: int = 1,
    dp: int | None = None,
    *,
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
) -> ParallelGroups:
    """Meet the other ranks and build the groups.

    Who this process is comes from the environment that torchrun makes, unless ``rank`` is
    given. Without either it is alone.

    Args:
        tp: how many ranks share a layer.
        pp: how many stages a model has.
        dp: how many replicas there are; None: as many as there are ranks for.
        rank: this process's global rank.
        world_size: how many processes; None: ``tp * pp * dp``.
        local_rank: this process's number on its node; chooses its GPU. None: its rank.
        master_addr: the host whose rank 0 hosts the store.
        master_port: the store's port.
        store: meet in this one instead: any torch store that all ranks reach.
        board: this node's board, made by a launcher, whose member i is rank i; it is not
            closed here. None: each node makes one.
        backend: ``"gloo"`` (CPU), ``"nccl"``; None: NCCL where there is a GPU, gloo elsewhere.
        timeout: seconds for all ranks to meet and build the groups; None: for ever.
        operation_timeout: seconds that an operation may take unless it says otherwise.

    Collective: yes, every rank.

    Raises:
        ValueError: the sizes do not make up the world, or the environment is incomplete.
        GroupTimeoutError: some ranks did not come in time; names them.
    """
    if rank is None:
        launch = Launch.from_environment()
    else:
        size = tp * pp * (dp or 1) if world_size is None else world_size
        local = rank if local_rank is None else local_rank
        launch = Launch(rank, size, local, master_addr, master_port)
    if world_size not in (None, launch.world_size):
        raise ValueError(f"world_size={world_size}, but {launch.world_size} ranks run")
    grid = _grid(launch.world_size, tp, pp, dp)
    with ExitStack() as undo:
        if launch.world_size == 1:
            settings = Settings.of(backend, launch.local_rank, timeout=operation_timeout)
            base = _Base(undo, launch.rank, settings, nodes=_own_node(board))
        else:
            meeting = meet(launch, store, timeout)
            sockets = SocketChoice(launch.interface, meeting.address)
            settings = Settings.of(backend, launch.local_rank, sockets, operation_timeout)
            nodes = find_nodes(meeting.exchange, board)
            if board is None:
                undo.callback(nodes.board.close)
            base = _Base(undo, launch.rank, settings, nodes, meeting.exchange)
        groups = {name: base.group(name, grid, axes) for name, axes in _GROUPS.items()}
        return ParallelGroups(grid=grid, _closing=undo.pop_all(), **groups)


@dataclass(frozen=True)
class _Base:
    """What the groups of a topology are built from."""

    undo: ExitStack
    rank: int
    settings: Settings
    nodes: Nodes | None
    exchange: Exchange | None = None

    def group(self, name: str, grid: RankGrid, axes: tuple[str, ...]) -> GroupCoordinator:
        """This rank's group along ``axes``, to be closed with the topology."""
        ranks = grid.group_of(self.rank, *axes)
        nodes = self.nodes and self.nodes.sub(ranks)
        if self.exchange is None or len(ranks) == 1:
            link = alone(name, self.rank, self.settings, nodes)
        else:
            link = connect(self.exchange.sub(name, ranks), ranks, self.settings, nodes)
        return self.undo.enter_context(GroupCoordinator.from_link(link))


def _own_node(board: Board | None) -> Nodes | None:
    return None if board is None else Nodes(board, (board.member or 0,), (0,))


def _grid(world_size: int, tp: int, pp: int, dp: int | None) -> RankGrid:
    replica = RankGrid.of({"pp": pp, "tp": tp})
    grid = RankGrid.of({"dp": world_size // replica.size if dp is None else dp, "pp": pp, "tp": tp})
    if grid.size != world_size:
        raise ValueError(f"{world_size} ranks cannot make up {dict(grid.axes)}")
    return grid
