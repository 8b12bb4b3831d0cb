"""Changing layouts on real processes, against DTensor and against cutting the whole by hand."""

from __future__ import annotations

import itertools
import math
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from torch.distributed.device_mesh import init_device_mesh

import coordinator
from coordinator import ReduceOp
from coordinator.layout import Layout, MeshCosts, Partial, Replicate, Shard, redistribute
from tests.ranks import init_gloo, run_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from coordinator import GroupCoordinator
    from coordinator.layout import Placement

PLACEMENTS: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1), Partial())
SHAPES = ((8, 4), (7, 5), (3, 1), (5, 4, 2))
MESHES = {2: [(2,)], 4: [(4,), (2, 2), (1, 1, 4)]}


def open_axes(
    stack: ExitStack, rank: int, mesh: Sequence[int], store: dist.Store
) -> list[GroupCoordinator]:
    """The group along each axis of a mesh of one to three axes."""
    dp, pp, tp = (1,) * (3 - len(mesh)) + tuple(mesh)
    groups = stack.enter_context(
        coordinator.init(tp=tp, pp=pp, dp=dp, rank=rank, world_size=math.prod(mesh), store=store)
    )
    return [groups.dp, groups.pp, groups.tp][3 - len(mesh) :]


def whole(shape: Sequence[int]) -> Tensor:
    return torch.arange(1.0, math.prod(shape) + 1).reshape(tuple(shape))


def hold(x: Tensor, layout: Layout, axes: Sequence[GroupCoordinator]) -> Tensor:
    """What this rank holds of ``x``: its shard by hand, its term of terms that differ."""
    for placement, axis in zip(layout.placements, axes, strict=True):
        r, n = axis.rank_in_group, axis.world_size
        if isinstance(placement, Shard):
            size = -(-x.shape[placement.dim] // n)
            low = min(r * size, x.shape[placement.dim])
            high = min(low + size, x.shape[placement.dim])
            x = x.narrow(placement.dim, low, high - low)
        elif isinstance(placement, Partial):
            terms = [x * (each + 2) for each in range(n - 1)]
            x = terms[r] if r < n - 1 else x - sum(terms)
    return x.contiguous().clone()


def as_dtensor(
    local: Tensor, layout: Layout, mesh: dt.DeviceMesh, shape: Sequence[int]
) -> dt.DTensor:
    placements = [
        dt.Shard(placement.dim)
        if isinstance(placement, Shard)
        else dt.Partial()
        if isinstance(placement, Partial)
        else dt.Replicate()
        for placement in layout.placements
    ]
    stride = torch.empty(tuple(shape), device="meta").stride()
    return dt.DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def pairs(mesh: Sequence[int]) -> list[tuple[Layout, Layout]]:
    """All pairs of layouts; where an axis has one rank, the placement there follows the last."""
    real = [axis for axis, size in enumerate(mesh) if size > 1]
    layouts = []
    for chosen in itertools.product(PLACEMENTS, repeat=len(real)):
        placements = [chosen[-1]] * len(mesh)
        for axis, placement in zip(real, chosen, strict=True):
            placements[axis] = placement
        layouts.append(Layout(tuple(placements)))
    return list(itertools.product(layouts, layouts))


def all_pairs(rank: int, n: int, path: str) -> int:
    init_gloo(rank, n, path)
    done = 0
    with ExitStack() as stack:
        for mesh in MESHES[n]:
            store = dist.FileStore(path + "".join(map(str, mesh)), n)
            axes = open_axes(stack, rank, mesh, store)
            device_mesh = init_device_mesh("cpu", tuple(mesh))
            for shape, (source, target) in itertools.product(SHAPES, pairs(mesh)):
                x = hold(whole(shape), source, axes)
                before = x.clone()
                y = redistribute(x, source, target, axes, shape=shape)
                assert torch.equal(x, before)
                if target.has_terms:
                    found = as_dtensor(y, target, device_mesh, shape).full_tensor()
                    assert torch.equal(found, whole(shape)), (mesh, shape, source, target)
                    continue
                theirs = as_dtensor(x, source, device_mesh, shape)
                expected = theirs.redistribute(
                    placements=as_dtensor(y, target, device_mesh, shape).placements
                ).to_local()
                assert torch.equal(expected, hold(whole(shape), target, axes))
                assert torch.equal(y, expected), (mesh, shape, source, target, y, expected)
                done += 1
    return done


@pytest.mark.parametrize("n", [2, 4])
def test_every_pair_of_placements_equals_dtensor(n: int, store_path: str) -> None:
    assert run_ranks(n, all_pairs, store_path, timeout=240)[0] > 0
