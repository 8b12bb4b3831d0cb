"""What DTensor's own ways from layout to layout cost by our model, beside our plans."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import TYPE_CHECKING

import torch
import torch.distributed.tensor as dt
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from coordinator.layout import Layout, MeshCosts, Partial, Placement, Replicate, Shard, plan
from coordinator.layout.placement import Arrangement

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh

THEIRS: dict[Placement, dt.Placement] = {
    Replicate(): dt.Replicate(),
    Shard(0): dt.Shard(0),
    Shard(1): dt.Shard(1),
    Partial(): dt.Partial(),
}
OURS = {theirs: ours for ours, theirs in THEIRS.items()}


def compare(
    mesh: DeviceMesh,
    shapes: Sequence[tuple[int, int]],
    source: Sequence[Placement],
    target: Sequence[Placement],
    costs: MeshCosts,
) -> Iterator[tuple[float, float]]:
    """Our cost and DTensor's, of each of its two planners; none where it cannot do it."""
    if any(b == Partial() and a != Partial() for a, b in zip(source, target, strict=True)):
        return  # DTensor does not redistribute to partial
    for shape, use_graph in itertools.product(shapes, (False, True)):
        mine = plan(Layout(tuple(source)), Layout(tuple(target)), shape, costs).cost
        meta = TensorMeta(torch.Size(shape), (shape[1], 1), torch.float32)
        specs = [
            DTensorSpec(mesh, tuple(THEIRS[each] for each in layout), tensor_meta=meta)
            for layout in (source, target)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            infos = _redistribute._gen_transform_infos_non_cached(specs[0], specs[1], use_graph)
        theirs = 0.0
        here = Arrangement.of(Layout(tuple(source)), 2, (9,) * len(source))
        for info in infos:
            axis, (_, wanted) = info.mesh_dim, info.src_dst_placements
            after = here.without(axis).then(axis, OURS[wanted])
            theirs += _cost(costs, axis, here, after, shape)
            here = after
        yield mine, theirs


def _cost(
    costs: MeshCosts, axis: int, before: Arrangement, after: Arrangement, shape: tuple[int, int]
) -> float:
    """A step of DTensor's, by the model; it skips axes of one rank."""
    if costs.shape[axis] == 1:
        return 0.0
    was, becomes = before.at(axis), after.at(axis)
    size, gathered = (math.prod(each.largest(shape, costs.shape)) * 4 for each in (before, after))
    if isinstance(becomes, Partial) or isinstance(was, Replicate):
        return 0.0
    if isinstance(was, Partial):
        reduce = costs.reduce_scatter if isinstance(becomes, Shard) else costs.all_reduce
        return reduce(size, axis)
    if isinstance(becomes, Shard):
        return costs.all_to_all(size, axis)
    return costs.all_gather(gathered, axis)
