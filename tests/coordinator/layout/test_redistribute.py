"""Changing layouts on real processes, against DTensor's answers."""

from __future__ import annotations

import itertools
import math
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.tensor as dt
from torch.distributed.device_mesh import init_device_mesh

from coordinator import ReduceOp
from coordinator.layout import Layout, MeshCosts, Partial, Replicate, Shard, redistribute
from coordinator.layout.dtensor import from_dtensor, to_dtensor
from tests.coordinator.layout.by_hand import hold
from tests.coordinator.layout.meshes import open_mesh
from tests.ranks import init_gloo, run_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from coordinator.layout import Mesh, Placement

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
MESHES: dict[int, list[tuple[int, ...]]] = {2: [(2,)], 4: [(4,), (2, 2), (1, 1, 4)]}


def whole(shape: Sequence[int]) -> Tensor:
    return torch.arange(1.0, math.prod(shape) + 1).reshape(tuple(shape))


def pairs(mesh: Sequence[int]) -> list[tuple[Layout, Layout]]:
    """All pairs of layouts; where an axis has one rank, the placement there follows the last."""
    real = [axis for axis, size in enumerate(mesh) if size > 1]
    layouts = []
    for chosen in itertools.product((R, S0, S1, P), repeat=len(real)):
        placements: list[Placement] = [chosen[-1]] * len(mesh)
        for axis, placement in zip(real, chosen, strict=True):
            placements[axis] = placement
        layouts.append(Layout(tuple(placements)))
    return list(itertools.product(layouts, layouts))


def every_pair(mesh: Mesh, device_mesh: dt.DeviceMesh) -> None:
    """Uneven shards, ranks with none, and even ones."""
    for shape, (source, target) in itertools.product([(7, 5), (8, 4)], pairs(mesh.shape)):
        x = hold(whole(shape), source, mesh.axes)
        before = x.clone()
        y = redistribute(x, source, target, mesh.axes, shape=shape)
        assert torch.equal(x, before)
        ours = to_dtensor(y, target, device_mesh, shape)
        if target.has_terms:  # DTensor does not redistribute to partial, but from it
            expected = ours.full_tensor()
            assert torch.equal(expected, whole(shape)), (shape, source, target)
        else:
            theirs = to_dtensor(x, source, device_mesh, shape)
            expected = theirs.redistribute(placements=ours.placements).to_local()
            assert torch.equal(y, expected), (shape, source, target)


def gradients(mesh: Mesh, device_mesh: dt.DeviceMesh) -> None:
    """Backward through DTensor's redistribute and through ours, for pairs of each kind."""
    shape = (7, 5)
    for number, (source, target) in enumerate(pairs(mesh.shape)):
        if target.has_terms or (len(mesh.shape) > 1 and number % 3):
            continue
        mine = hold(whole(shape), source, mesh.axes).requires_grad_()
        theirs = mine.detach().clone().requires_grad_()
        y = redistribute(mine, source, target, mesh.axes, shape=shape)
        weights = to_dtensor(
            hold(whole(shape), target, mesh.axes), target, device_mesh, shape
        ).to_local()
        (y * weights).sum().backward()
        z = to_dtensor(theirs, source, device_mesh, shape)
        placements = to_dtensor(y.detach(), target, device_mesh, shape).placements
        (z.redistribute(placements=placements).to_local() * weights).sum().backward()
        assert torch.equal(mine.grad, theirs.grad), (source, target)


def dtypes(mesh: Mesh, device_mesh: dt.DeviceMesh) -> None:
    """What cannot be reduced moves all the same; layouts in memory do not matter."""
    axis = mesh.axes[-1]
    for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        x = (whole((6, 5)) % 2).to(dtype)
        turned = hold(x, S0_LAYOUT, [axis]).t().contiguous().t()
        y = redistribute(turned, S0, S1, axis, shape=(6, 5))
        assert y.dtype == dtype
        small = dtype.itemsize == 1  # torch compares no float8
        expected = hold(x.float() if small else x, S1_LAYOUT, [axis])
        assert torch.equal(y.float() if small else y, expected)


def twice(mesh: Mesh, device_mesh: dt.DeviceMesh) -> None:
    """A gradient of a gradient."""
    axis = mesh.axes[-1]
    x = hold(whole((5, 4)), S0_LAYOUT, [axis]).double().requires_grad_()
    y = redistribute(x, S0, S1, axis, shape=(5, 4))
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, 6 * x)


def refused(mesh: Mesh, device_mesh: dt.DeviceMesh) -> None:
    """Before anything moves: the other ranks are not there."""
    if mesh.coordinates != (0,) * len(mesh.axes):
        return
    axis = mesh.axes[-1]
    x = torch.ones(2, 2)
    for arguments, options, message in (
        ((x, S0, R, axis), {}, "shape= is required"),
        ((x, S0, R, axis), {"shape": (99, 2)}, "this rank has"),
        ((x, Shard(5), R, axis), {"shape": (4, 2)}, "dimension"),
        ((x, Layout((R, R, R, R)), R, axis), {}, "axes"),
        ((x, R, S0, axis), {"costs": MeshCosts.uniform((9,))}, "costs"),
    ):
        with pytest.raises(ValueError, match=message):
            redistribute(*arguments, **options)
    greatest = x.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="MAX"):
        redistribute(greatest, Partial(ReduceOp.MAX), R, axis)


S0_LAYOUT, S1_LAYOUT = Layout((S0,)), Layout((S1,))


def on_all_meshes(rank: int, n: int, path: str) -> None:
    init_gloo(rank, n, path)
    with ExitStack() as stack:
        for shape in MESHES[n]:
            mesh = open_mesh(stack, rank, shape, path + "".join(map(str, shape)))
            device_mesh = init_device_mesh("cpu", shape)
            every_pair(mesh, device_mesh)
            gradients(mesh, device_mesh)
            dtypes(mesh, device_mesh)
            twice(mesh, device_mesh)
            refused(mesh, device_mesh)


@pytest.mark.parametrize("n", [2, 4])
def test_every_pair_of_placements_equals_dtensor(n: int, store_path: str) -> None:
    run_ranks(n, on_all_meshes, store_path, timeout=240)


# --- numeric cases -------------------------------------------------------------------------


def numbers(rank: int, n: int, path: str) -> None:
    init_gloo(rank, n, path)
    with ExitStack() as stack:
        axis = open_mesh(stack, rank, (2,), path + "mesh").axes[0]
        x = torch.arange(16.0).reshape(4, 4)
        mine = redistribute(x[2 * rank : 2 * rank + 2], S0, S1, axis, shape=(4, 4))
        assert mine.tolist() == [[[0, 1], [4, 5], [8, 9], [12, 13]],
                                 [[2, 3], [6, 7], [10, 11], [14, 15]]][rank]  # fmt: skip
        # cut elsewhere along the same dimension, and the gradient goes back to where it was cut
        uneven = x[[slice(0, 1), slice(1, 4)][rank]].clone().requires_grad_()
        even = redistribute(uneven, Shard(0, sizes=(1, 3)), S0, axis, shape=(4, 4))
        assert even.tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]],
                                 [[8, 9, 10, 11], [12, 13, 14, 15]]][rank]  # fmt: skip
        even.backward(torch.full((2, 4), rank + 1.0))
        assert uneven.grad.tolist() == [[[1] * 4], [[1] * 4, [2] * 4, [2] * 4]][rank]
        # from_torch_tensor: the payload is the local shard
        device_mesh = init_device_mesh("cpu", (2,))
        whole_of_shards = to_dtensor(torch.full((2, 4), float(rank)), S0, device_mesh)
        assert whole_of_shards.shape == (4, 4)
        local, layout, shape = from_dtensor(whole_of_shards)
        assert (layout, shape) == (Layout((S0,)), (4, 4))
        assert local.tolist() == [[rank] * 4] * 2


def test_numeric_cases(store_path: str) -> None:
    run_ranks(2, numbers, store_path)


def test_a_negative_dimension_is_the_same() -> None:
    assert Shard(-1).normalized(2) == Shard(1)
    assert Layout((Shard(-1), R)).normalized(2) == Layout((S1, R))
    assert Layout() == Layout((R,))
