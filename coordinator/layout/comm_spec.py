"""Describe one communication of a tensor as an object with a cost and a function.

pattern                       forward                 backward       as placements
GATHER_FWD_SPLIT_BWD          all-gather gather_dim   own slice      Shard → Replicate
SPLIT_FWD_GATHER_BWD          own slice of shard_dim  all-gather     Replicate → Shard
ALL2ALL_FWD_ALL2ALL_BWD       gather_dim → shard_dim  dims swapped   Shard → Shard
ALLREDUCE_FWD_IDENTITY_BWD    all-reduce              identity       Partial → Replicate
IDENTITY_FWD_ALLREDUCE_BWD    identity                all-reduce     Replicate → Replicate
MIXGATHER_FWD_SPLIT_BWD       all-gather of several   own part       Shards → Replicates
                              dimensions at once
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from torch import Tensor

from coordinator.layout import moves
from coordinator.layout.mesh import Mesh
from coordinator.layout.placement import Arrangement, Extent, Layout, Shard
from coordinator.layout.plan import Axes


class CommPattern(Enum):
    """The forward and backward of a communication; see the table above."""

    GATHER_FWD_SPLIT_BWD = "GATHER_FWD_SPLIT_BWD"
    SPLIT_FWD_GATHER_BWD = "SPLIT_FWD_GATHER_BWD"
    ALL2ALL_FWD_ALL2ALL_BWD = "ALL2ALL_FWD_ALL2ALL_BWD"
    ALLREDUCE_FWD_IDENTITY_BWD = "ALLREDUCE_FWD_IDENTITY_BWD"
    IDENTITY_FWD_ALLREDUCE_BWD = "IDENTITY_FWD_ALLREDUCE_BWD"
    MIXGATHER_FWD_SPLIT_BWD = "MIXGATHER_FWD_SPLIT_BWD"


class CommCost(NamedTuple):
    """Costs in microseconds, by the mesh's cost model."""

    forward: float
    backward: float
    total: float


@dataclass(frozen=True, slots=True)
class ShardingSpec:
    """A tensor of ``shape`` (the whole tensor's) with a layout on a mesh."""

    mesh: Mesh
    shape: tuple[int, ...]
    layout: Layout
    itemsize: int = 4


@dataclass(frozen=True, slots=True)
class CommSpec:
    """A communication of a tensor along one axis of its mesh, or along several together.

    Attributes:
        comm_pattern: the pattern or its name.
        sharding_spec: the tensor before the communication.
        gather_dim: the dimension to gather; for MIXGATHER one per axis.
        shard_dim: the dimension to shard.
        logical_process_axis: the mesh axis; several, in ascending order, form one.
        forward_only: run no backward, which then costs nothing.

    Raises:
        ValueError: the pattern is unknown, lacks a dimension, has one that does not exist, or
            cannot start from the tensor's layout.
    """

    comm_pattern: CommPattern
    sharding_spec: ShardingSpec
    gather_dim: int | tuple[int, ...] | None = None
    shard_dim: int | None = None
    logical_process_axis: Axes = 0
    forward_only: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "comm_pattern", CommPattern(self.comm_pattern))
        pattern, ndim = self.comm_pattern, len(self.sharding_spec.shape)
        mix = pattern is CommPattern.MIXGATHER_FWD_SPLIT_BWD
        for name, needed in (
            ("gather_dim", mix or pattern.name.startswith(("GATHER", "ALL2ALL"))),
            ("shard_dim", pattern.name.startswith(("SPLIT", "ALL2ALL"))),
        ):
            value = getattr(self, name)
            if (value is None) is needed or isinstance(value, Sequence) is not (mix and needed):
                raise ValueError(f"{pattern.name} does not accept {name}={value}")
            if isinstance(value, Sequence):
                object.__setattr__(self, name, tuple(_dim(dim, ndim) for dim in value))
            elif value is not None:
                object.__setattr__(self, name, _dim(value, ndim))
        self._check_layout()

    def cost(self) -> CommCost:
        """Return the cost by the mesh's cost model."""
        costs, axes = self.sharding_spec.mesh.cost_model, self.logical_process_axis
        held, gathered = self._bytes(self._before), self._bytes(self._after)
        forward, backward = {
            CommPattern.GATHER_FWD_SPLIT_BWD: (costs.all_gather(gathered, axes), 0.0),
            CommPattern.SPLIT_FWD_GATHER_BWD: (0.0, costs.all_gather(held, axes)),
            CommPattern.ALL2ALL_FWD_ALL2ALL_BWD: (
                costs.all_to_all(held, axes),
                costs.all_to_all(gathered, axes),
            ),
            CommPattern.ALLREDUCE_FWD_IDENTITY_BWD: (costs.all_reduce(held, axes), 0.0),
            CommPattern.IDENTITY_FWD_ALLREDUCE_BWD: (0.0, costs.all_reduce(held, axes)),
            CommPattern.MIXGATHER_FWD_SPLIT_BWD: (costs.mix_gather(gathered), 0.0),
        }[self.comm_pattern]
        if self.forward_only:
            backward = 0.0
        return CommCost(forward, backward, forward + backward)

    def apply(self, x: Tensor) -> Tensor:
        """Run the communication, differentiably unless ``forward_only``.

        ``x`` is this rank's part of the tensor, without padding; it does not change. Returns this
        rank's part afterwards; ``x`` itself if the axes have only one rank.

        Collective: yes, every member of the group along the axes; backward too.
        """
        group = self.sharding_spec.mesh.group(self.logical_process_axis)
        if self.forward_only:
            x = x.detach()
        match self.comm_pattern, self.gather_dim, self.shard_dim:
            case CommPattern.GATHER_FWD_SPLIT_BWD, int(dim), _:
                return moves.gather(x, dim, group, self._sizes(self._before, dim))
            case CommPattern.SPLIT_FWD_GATHER_BWD, _, int(dim):
                return moves.split(x, dim, group, self._sizes(self._after, dim))
            case CommPattern.ALL2ALL_FWD_ALL2ALL_BWD, int(gather_dim), int(shard_dim):
                before = self._sizes(self._before, gather_dim)
                after = self._sizes(self._after, shard_dim)
                return moves.all_to_all(x, gather_dim, shard_dim, group, before, after)
            case CommPattern.ALLREDUCE_FWD_IDENTITY_BWD, _, _:
                return moves.reduce(x, group)
            case CommPattern.IDENTITY_FWD_ALLREDUCE_BWD, _, _:
                return moves.copy(x, group)
            case _:
                return x if group.world_size == 1 else self._assemble(x)

    @property
    def _axes(self) -> tuple[int, ...]:
        axes = self.logical_process_axis
        return (axes,) if isinstance(axes, int) else tuple(axes)

    @property
    def _before(self) -> Arrangement:
        spec = self.sharding_spec
        return Arrangement.of(spec.layout, len(spec.shape), spec.mesh.shape)

    @property
    def _after(self) -> Arrangement:
        mesh, arrangement = self.sharding_spec.mesh.shape, self._before
        for axis in self._axes:
            if mesh[axis] == 1:
                continue
            if self.gather_dim is not None:
                arrangement = arrangement.without(axis)
            if self.shard_dim is not None:
                arrangement = arrangement.then(axis, Shard(self.shard_dim))
        return arrangement

    def _check_layout(self) -> None:
        spec = self.sharding_spec
        spec.mesh.group(self.logical_process_axis)
        dims = self.gather_dim if isinstance(self.gather_dim, tuple) else None
        if dims is not None and len(dims) != len(self._axes):
            raise ValueError(f"gather_dim has {len(dims)} dimensions for {len(self._axes)} axes")
        before = self._before
        for number, axis in reversed(list(enumerate(self._axes))):
            if spec.mesh.shape[axis] == 1:
                continue
            placement = before.at(axis)
            dim = self.gather_dim if dims is None else dims[number]
            if isinstance(placement, Shard) is (dim is None) or (
                isinstance(placement, Shard)
                and (placement.dim != dim or not before.is_innermost(axis, placement.dim))
            ):
                raise ValueError(
                    f"{self.comm_pattern.name} cannot run along axis {axis} of {spec.layout}"
                )
            before = before.without(axis)

    def _bytes(self, arrangement: Arrangement) -> int:
        spec = self.sharding_spec
        return math.prod(arrangement.largest(spec.shape, spec.mesh.shape)) * spec.itemsize

    def _extents(self, arrangement: Arrangement) -> list[tuple[Extent, ...]]:
        """Return the part of each rank along the axes, by its rank in their group."""
        mesh = self.sharding_spec.mesh
        extents = []
        for places in itertools.product(*(range(mesh.shape[axis]) for axis in self._axes)):
            coordinates = list(mesh.coordinates)
            for axis, place in zip(self._axes, places, strict=True):
                coordinates[axis] = place
            extents.append(arrangement.extents(self.sharding_spec.shape, mesh.shape, coordinates))
        return extents

    def _sizes(self, arrangement: Arrangement, dim: int) -> list[int]:
        return [extents[dim].size for extents in self._extents(arrangement)]

    def _assemble(self, x: Tensor) -> Tensor:
        mesh = self.sharding_spec.mesh
        whole = self._after.extents(self.sharding_spec.shape, mesh.shape, mesh.coordinates)
        boxes = tuple(
            tuple(
                slice(part.start - all_.start, part.stop - all_.start)
                for part, all_ in zip(extents, whole, strict=True)
            )
            for extents in self._extents(self._before)
        )
        group = mesh.group(self.logical_process_axis)
        return moves.assemble(x, tuple(extent.size for extent in whole), boxes, group)


def _dim(dim: int, ndim: int) -> int:
    return Shard(dim).normalized(ndim).dim
