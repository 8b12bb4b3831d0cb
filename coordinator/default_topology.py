"""The one topology of `coordinator.parallel_state`: what vLLM keeps in module globals."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from coordinator.default_group import meet_with_default_group
from coordinator.groups import ParallelGroups
from coordinator.link import Settings
from coordinator.rank_grid import RankGrid

if TYPE_CHECKING:
    from collections.abc import Mapping

    from coordinator.group import GroupCoordinator
    from coordinator.topology import Topology
    from shm_broadcast import Deadline

T = TypeVar("T")


class DefaultTopology:
    """All ranks, and the groups of a model on them; either may not be there.

    Attributes:
        topology: all ranks, once they have met.
        world: the group of all of them.
        groups: those of the model.
        inner_dp_world: all ranks of this one's replica.
        eplb: the ranks of the expert-parallel group, in one of their own, if wanted.
        device_communicators: whether groups may use more than torch's process groups.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.topology: Topology | None = None
        self.world: GroupCoordinator | None = None
        self.groups: ParallelGroups | None = None
        self.inner_dp_world: GroupCoordinator | None = None
        self.eplb: GroupCoordinator | None = None
        self.device_communicators = True
        self._environment = ExitStack()
        self._model = ExitStack()

    def meet(
        self,
        world_size: int,
        rank: int,
        method: str,
        local_rank: int,
        backend: str,
        deadline: Deadline,
    ) -> None:
        """Meet all ranks and build the world group. Collective: yes, every rank."""
        with ExitStack() as undo:
            topology = meet_with_default_group(
                world_size, rank, method, local_rank, backend, deadline, undo
            )
            world = topology.group("world", list(range(topology.world_size)), deadline)
            undo.enter_context(world)
            self.topology, self.world = topology, world
            self._environment = undo.pop_all()

    def build(
        self, sizes: Mapping[str, int], dcp: int, backend: str | None, enable_eplb: bool
    ) -> None:
        """Build the groups of a model. Collective: yes, every rank.

        Args:
            sizes: of the axes dp, pp, pcp and tp; what they leave over are replicas that know
                nothing of each other.
            dcp: how many neighbours within ``tp`` share contexts.
            backend: None: the world's.
            enable_eplb: have a second expert-parallel group.

        Raises:
            RuntimeError: the ranks have not met, or the groups exist already.
            ValueError: the sizes do not divide the world.
        """
        topology = require(self.topology, "the distributed environment")
        world = require(self.world, "the distributed environment")
        if self.groups is not None:
            raise RuntimeError("the model-parallel groups are initialised already")
        topology = replace(topology, settings=self._settings(topology, backend))
        model = RankGrid.of(sizes)
        external = RankGrid.of({"external": max(topology.world_size // model.size, 1)})
        grid = RankGrid((*external.axes, *model.axes))
        with ExitStack() as undo:
            groups = undo.enter_context(
                ParallelGroups.build(topology, grid, ExitStack(), dcp=dcp, world=world)
            )
            if groups.tp.world_size > 1:
                groups.tp.mq_broadcaster = groups.tp.create_mq_broadcaster()
            inner = world
            replica = grid.group_of(topology.rank, "pp", "pcp", "tp")
            if len(replica) < topology.world_size:
                inner = undo.enter_context(topology.group("inner_dp_world", replica))
            if enable_eplb:
                self.eplb = undo.enter_context(topology.group("eplb", groups.ep.ranks))
            self.groups, self.inner_dp_world = groups, inner
            self._model = undo.pop_all()

    def close_model(self) -> None:
        """Close the groups of the model; again does nothing. Collective: no."""
        self.groups = self.inner_dp_world = self.eplb = None
        self._model.close()

    def close_environment(self) -> None:
        """Close the world group and torch's default group. Collective: no."""
        self.topology = self.world = None
        self._environment.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _settings(self, topology: Topology, backend: str | None) -> Settings:
        old = topology.settings
        return Settings.of(
            backend or old.backend,
            old.local_rank,
            old.sockets,
            torch_only=not self.device_communicators,
        )


def require(value: T | None, what: str) -> T:
    """``value``, if it is there.

    Raises:
        RuntimeError: it is None: ``what`` is not initialised.
    """
    if value is None:
        raise RuntimeError(f"{what} is not initialised")
    return value
