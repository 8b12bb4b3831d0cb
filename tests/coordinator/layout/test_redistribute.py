"""Tensors change layouts and meshes on real processes: by hand, and as DTensor does it.

`tests.fuzz` has any layout, dtype and mesh, gradients and checkpoints.
"""

from __future__ import annotations

import io
import itertools
import math
import runpy
import warnings
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import parallel
from torch.nn import functional

import coordinator
from coordinator import GroupCoordinator, ReduceOp
from coordinator.layout import (
    CommPattern,
    CommSpec,
    Layout,
    Mesh,
    MeshCosts,
    Partial,
    Placement,
    Replicate,
    Shard,
    ShardingSpec,
    SubMesh,
    calibrate,
    calibrate_mesh,
    measure,
    moves,
    named_parameters,
    plan,
    redistribute,
    redistribute_between,
    reshard,
)
from coordinator.layout.dtensor import from_dtensor, set_process_group, to_dtensor
from coordinator.layout.placement import Arrangement
from tests.coordinator.layout.by_hand import hold, open_mesh
from tests.ranks import init_gloo, run_ranks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
ROOT = Path(__file__).parents[3]


class Here(NamedTuple):
    """A mesh of groups of this rank, torch's mesh of the same shape, and the group of all."""

    mesh: Mesh
    device_mesh: DeviceMesh
    world: GroupCoordinator

    @property
    def axis(self) -> GroupCoordinator:
        return self.mesh.axes[-1]


def whole(shape: Sequence[int]) -> Tensor:
    return torch.arange(1.0, math.prod(shape) + 1).reshape(tuple(shape))


def grad_of(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


# --- from layout to layout, on every mesh --------------------------------------------------


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


def every_pair_equals_dtensor(here: Here) -> None:
    """Uneven shards, ranks with none, and even ones."""
    mesh = here.mesh
    shapes = [(7, 5)] if len(mesh.shape) == 2 else [(7, 5), (8, 4)]
    for shape, (source, target) in itertools.product(shapes, pairs(mesh.shape)):
        x = hold(whole(shape), source, mesh.axes)
        before = x.clone()
        y = redistribute(x, source, target, mesh.axes, shape=shape)
        assert torch.equal(x, before)
        ours = to_dtensor(y, target, here.device_mesh, shape)
        if target.has_terms:  # DTensor does not redistribute to partial, but from it
            assert torch.equal(ours.full_tensor(), whole(shape)), (shape, source, target)
        else:
            theirs = to_dtensor(x, source, here.device_mesh, shape)
            expected = theirs.redistribute(placements=ours.placements).to_local()
            assert torch.equal(y, expected), (shape, source, target)


def a_wrong_redistribution_is_refused(here: Here) -> None:
    """Before anything moves: the other ranks do not take part."""
    if here.world.rank_in_group:
        return
    axis, x = here.axis, torch.ones(2, 2)
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


def numbers_by_hand(here: Here) -> None:
    rank, axis = here.world.rank_in_group, here.axis
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
    assert grad_of(uneven).tolist() == [[[1] * 4], [[1] * 4, [2] * 4, [2] * 4]][rank]
    x = x[2 * rank : 2 * rank + 2].double().requires_grad_()
    y = redistribute(x, S0, S1, axis, shape=(4, 4))
    (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, 6 * x)
    # from_torch_tensor: the payload is the local shard
    whole_of_shards = to_dtensor(torch.full((2, 4), float(rank)), S0, here.device_mesh)
    assert whole_of_shards.shape == (4, 4)
    local, layout, shape = from_dtensor(whole_of_shards)
    assert (layout, shape) == (Layout((S0,)), (4, 4))
    assert local.tolist() == [[rank] * 4] * 2


REDISTRIBUTE = (every_pair_equals_dtensor, a_wrong_redistribution_is_refused)

# --- from mesh to mesh, over four ranks; some are in neither -------------------------------

FOUR, FRONT, BACK = SubMesh((0, 1, 2, 3)), SubMesh((0, 1)), SubMesh((3, 2))


def to_a_disjoint_mesh_with_gradients(here: Here) -> None:
    """Ranks 0 and 1 hold terms, ranks 3 and 2 shards; the gradient of a term is that of the sum."""
    rank = here.world.rank_in_group
    x = None
    if rank < 2:
        x = (torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)).requires_grad_()
    y = redistribute_between(
        x, P, S0, here.world, source_mesh=FRONT, target_mesh=BACK,
        shape=(3,), dtype=torch.float32, requires_grad=True,
    )  # fmt: skip
    assert y.tolist() == {3: [3.0, 6.0], 2: [9.0]}.get(rank, [])
    y.backward(y.detach() * 10)
    if x is not None:
        assert grad_of(x).tolist() == [30, 60, 90]


def terms_are_reduced_in_the_order_of_the_mesh(here: Here) -> None:
    """Half precision is accumulated in float32; every receiver gets the same bits."""
    rank, meshes = here.world.rank_in_group, {"source_mesh": FOUR, "target_mesh": FOUR}
    x = torch.tensor([1.0, 0.001, 0.001, 0.001])[rank].repeat(3).to(torch.bfloat16)
    y = redistribute_between(x, P, R, here.world, shape=(3,), **meshes)
    assert y.tolist() == [torch.tensor(1.003).to(torch.bfloat16).item()] * 3
    greatest = Partial(ReduceOp.MAX)
    x = torch.tensor([rank])
    assert redistribute_between(x, greatest, R, here.world, shape=(1,), **meshes).tolist() == [3]


def a_model_is_resharded(here: Here) -> None:
    rank = here.world.rank_in_group
    with torch.device("meta"):
        wholes = dict(nn.Linear(6, 5).named_parameters())
    full = {name: whole(p.shape) for name, p in wholes.items()}
    old, new = {"weight": S0, "bias": S0}, {"bias": R, "weight": S1}
    held = {}
    if rank < 2:
        held = {
            name: hold(full[name], Layout((layout,)), FRONT.places(rank))
            for name, layout in old.items()
        }
    moved = reshard(held, old, new, here.world, source_mesh=FRONT, target_mesh=FOUR, wholes=wholes)
    assert list(moved) == ["bias", "weight"]
    assert torch.equal(moved["bias"], full["bias"])
    assert torch.equal(moved["weight"], hold(full["weight"], Layout((S1,)), FOUR.places(rank)))
    there = reshard(moved, new, old, here.world, source_mesh=FOUR, target_mesh=FRONT, wholes=wholes)
    assert set(there) == (set(old) if rank < 2 else set())


def a_wrong_move_is_refused(here: Here) -> None:
    if here.world.rank_in_group:
        return
    x = torch.ones(2)
    meshes = {"source_mesh": FOUR, "target_mesh": FRONT}
    for given, options, message in (
        (x, {"shape": (4,), **meshes}, "this rank passes"),
        (None, {"shape": (8,), **meshes}, "this rank passes"),
        (x, {"shape": (8,), "dtype": torch.int8, **meshes}, "this rank passes"),
        (None, {"shape": (8,), "source_mesh": BACK, "target_mesh": FOUR}, "dtype="),
        (x, {"shape": (8,), "source_mesh": SubMesh((0, 9)), "target_mesh": FOUR}, "rank 9"),
    ):
        with pytest.raises(ValueError, match=message):
            redistribute_between(given, S0, S0, here.world, **options)
    least, x = Partial(ReduceOp.MIN), torch.ones(8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="MIN"):
        redistribute_between(x, least, R, here.world, shape=(8,), **meshes)


BETWEEN = (
    to_a_disjoint_mesh_with_gradients,
    terms_are_reduced_in_the_order_of_the_mesh,
    a_model_is_resharded,
    a_wrong_move_is_refused,
)

# --- the six patterns, on a mesh of (2, 2) -------------------------------------------------


def apply(
    here: Here, pattern: str, layout: tuple[Placement, ...], x: Tensor, shape: Any, **options: Any
) -> Tensor:
    spec = ShardingSpec(here.mesh, shape, Layout(layout))
    return CommSpec(CommPattern[pattern], spec, **options).apply(x)


def one_axis_is_gathered_reduced_and_split(here: Here) -> None:
    rank = here.world.rank_in_group
    # a gather's gradient is its own slice
    x = torch.full((2,), float(rank), requires_grad=True)
    y = apply(here, "GATHER_FWD_SPLIT_BWD", (S0, R), x, (4,), gather_dim=0)
    assert y.tolist() == ([0, 0, 2, 2] if rank in (0, 2) else [1, 1, 3, 3])
    y.backward(torch.full((4,), rank + 1.0))
    assert grad_of(x).tolist() == [rank + 1] * 2
    # an all-reduce does not change its input
    x = torch.tensor([rank + 1.0], requires_grad=True)
    y = apply(here, "ALLREDUCE_FWD_IDENTITY_BWD", (P, R), x, (1,))
    assert y.item() == [4, 6, 4, 6][rank]
    assert x.item() == rank + 1
    y.backward(torch.tensor([rank + 5.0]))
    assert grad_of(x).item() == rank + 5
    # a split drops no remainder
    x = torch.arange(5.0).requires_grad_()
    y = apply(here, "SPLIT_FWD_GATHER_BWD", (R, R), x, (5,), shard_dim=0)
    assert y.tolist() == [[0, 1, 2], [3, 4]][here.mesh.coordinates[0]]
    y.backward(y.detach() * 10)
    assert grad_of(x).tolist() == [0, 10, 20, 30, 40]
    x = torch.ones(2, requires_grad=True)
    only: dict[str, Any] = {"gather_dim": 0, "forward_only": True}
    assert not apply(here, "GATHER_FWD_SPLIT_BWD", (S0, R), x, (4,), **only).requires_grad


def shards_change_their_dimension(here: Here) -> None:
    """Over the flattened mesh (where the original's backward uses a wrong group) and one axis."""
    axes, swap = here.mesh.axes, "ALL2ALL_FWD_ALL2ALL_BWD"
    whole = torch.arange(35.0).reshape(7, 5)
    x = hold(whole, Layout((S0, S0)), axes).requires_grad_()
    given: dict[str, Any] = {"gather_dim": 0, "shard_dim": 1, "logical_process_axis": [0, 1]}
    y = apply(here, swap, (S0, S0), x, (7, 5), **given)
    assert torch.equal(y, hold(whole, Layout((S1, S1)), axes))
    y.backward(y.detach() * 2)
    assert torch.equal(grad_of(x), x.detach() * 2)
    whole = torch.arange(12.0).reshape(4, 3)
    x = hold(whole, Layout((R, S0)), axes)
    given = {"gather_dim": 0, "shard_dim": -1, "logical_process_axis": 1}
    y = apply(here, swap, (R, S0), x, (4, 3), **given)
    assert torch.equal(y, hold(whole, Layout((R, S1)), axes))


def both_axes_together(here: Here) -> None:
    x = torch.ones(2, requires_grad=True)
    both: dict[str, Any] = {"logical_process_axis": (0, 1)}
    y = apply(here, "IDENTITY_FWD_ALLREDUCE_BWD", (R, R), x, (2,), **both)
    assert torch.equal(x, y)
    (y * (here.world.rank_in_group + 1)).sum().backward()
    assert grad_of(x).tolist() == [10, 10]
    for shape in ((4, 6), (5, 3), (1, 2)):
        x = hold(whole(shape), Layout((S1, S0)), here.mesh.axes).requires_grad_()
        y = apply(here, "MIXGATHER_FWD_SPLIT_BWD", (S1, S0), x, shape, gather_dim=(1, 0), **both)
        assert torch.equal(y, whole(shape))
        y.backward(whole(shape) * 3)
        assert torch.equal(grad_of(x), x.detach() * 3)
    apart = here._replace(mesh=Mesh(here.mesh.axes))
    with pytest.raises(ValueError, match="together"):
        apply(apart, "GATHER_FWD_SPLIT_BWD", (S0, S0), x, (4,), gather_dim=0, **both)
    with pytest.raises(ValueError, match="on the axes"):
        Mesh(here.mesh.axes, here.mesh.axes[0])


def an_axis_of_one_rank_is_the_identity(here: Here) -> None:
    x = torch.ones(4)
    assert apply(here, "GATHER_FWD_SPLIT_BWD", (S0, R, R), x, (4,), gather_dim=0) is x


PATTERNS = (
    one_axis_is_gathered_reduced_and_split,
    shards_change_their_dimension,
    both_axes_together,
)

# --- beside torch's own --------------------------------------------------------------------


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(5, 6, dtype=torch.float64)


def parallel_layers_match_dense(here: Here) -> None:
    """Column, then row, with the differentiable collectives: values and all gradients."""
    tp, dense, x = here.axis, mlp(), batch().requires_grad_()
    expected = dense(x)
    expected.square().sum().backward()
    wholes = dict(dense.named_parameters())
    layouts = {"0.weight": S0, "0.bias": S0, "2.weight": S1}
    parts = {
        name: redistribute(wholes[name].detach(), R, layout, tp).requires_grad_()
        for name, layout in layouts.items()
    }
    bias = wholes["2.bias"].detach().clone().requires_grad_()
    mine = batch().requires_grad_()
    hidden = functional.linear(moves.copy(mine, tp), parts["0.weight"], parts["0.bias"])
    partial = functional.linear(hidden.tanh(), parts["2.weight"])
    found = moves.reduce(partial, tp) + bias
    found.square().sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(mine.grad, x.grad)
    torch.testing.assert_close(bias.grad, wholes["2.bias"].grad)
    for name, part in parts.items():
        wanted = redistribute(grad_of(wholes[name]), R, layouts[name], tp)
        torch.testing.assert_close(part.grad, wanted)


def wrong_sizes_are_refused(here: Here) -> None:
    tp, x, n = here.axis, torch.ones(4, 4), here.axis.world_size
    for call in (
        lambda: moves.gather(x, 2, tp),
        lambda: moves.gather(x, 0, tp, [3] * n),
        lambda: moves.split(x, 0, tp, [9] * n),
        lambda: moves.all_to_all(x, 0, -2, tp),
        lambda: moves.recut(x, 0, tp, [4] * n, [1] * n),
    ):
        with pytest.raises(ValueError, match=r"sizes|dim"):
            call()


def costs_are_measured(here: Here) -> None:
    """The same positive numbers everywhere, good for a plan, whose steps are timed."""
    mesh, world = here.mesh, here.world
    found = calibrate(mesh.axes[0], sizes=(1024, 1 << 18), repeats=1)
    assert found.alpha >= 0 and found.beta >= 0 and found.alpha + found.beta > 0
    everyone = mesh.axes[0].all_gather_object(found)
    assert everyone == [found] * len(everyone)
    costs = calibrate_mesh(mesh.axes, sizes=(1024, 1 << 18), repeats=1)
    assert world.all_gather_object(costs) == [costs] * world.world_size
    whole, cut, terms = (Layout((each,) * len(mesh.axes)) for each in (R, S0, P))
    assert plan(whole, cut, (4, 4), costs).cost == 0
    redistribute(torch.ones(4, 4), whole, cut, mesh.axes, costs=costs)
    with pytest.raises(ValueError, match="fit"):
        calibrate(mesh.axes[0], sizes=(1024,))
    for source, target in ((cut, whole), (terms, cut), (whole, cut), (cut, cut)):
        steps = plan(source, target, (50, 8), costs)
        timed = measure(steps, mesh.axes, repeats=2)
        assert timed.plan is steps
        assert len(timed.times) == len(steps.steps)
        assert all(time > 0 for time in timed.times)
        assert timed.time == sum(timed.times)
        assert world.all_gather_object(timed.times) == [timed.times] * world.world_size
        lines = str(timed).splitlines()
        assert lines[0] == f"{str(steps).splitlines()[0]}, {timed.time:.3f} µs measured"
        for line, step, time in zip(lines[1:], steps.steps, timed.times, strict=True):
            assert line == f"  {step}  {time:.3f} µs measured"
    with pytest.raises(ValueError, match="a plan for a mesh of"):
        measure(plan(S0, S1, (9, 9), MeshCosts.uniform((9,))), mesh.axes)


def tensor_parallel_matches_dense(here: Here) -> None:
    """torch's Colwise and Rowwise on a mesh whose group is wrapped, named_parameters on top."""
    device_mesh = init_device_mesh("cpu", (here.world.world_size,), mesh_dim_names=("tp",))
    model = parallel.parallelize_module(
        mlp(), device_mesh, {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    )
    torch.testing.assert_close(model(batch()), mlp()(batch()))
    column = parallel.ColwiseParallel(
        output_layouts=dt.Replicate()
    )  # ColossalAI's output_replicate
    gathered = parallel.parallelize_module(mlp(), device_mesh, {"0": column})
    torch.testing.assert_close(gathered(batch()), mlp()(batch()))
    params = dict(named_parameters(model, "mlp"))
    assert list(params) == ["mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"]
    local, layout, shape = from_dtensor(params["mlp.2.weight"])
    assert (layout, shape) == (Layout((S1,)), (3, 8))
    ours = Mesh.from_device_mesh(device_mesh)
    whole = redistribute(local, layout, R, ours.axes, shape=shape)
    torch.testing.assert_close(whole, mlp()[2].weight)  # type: ignore[index]
    ours.axes[0].close()


def layouts_become_dtensors_and_back(here: Here) -> None:
    rank, n = here.world.rank_in_group, here.world.world_size
    device_mesh, other = init_device_mesh("cpu", (n,)), init_device_mesh("cpu", (1, n))
    for layout in (R, S1, P, Partial(ReduceOp.AVG), Partial(ReduceOp.MAX)):
        x = torch.arange(4.0 * n).reshape(2, -1)
        local = x.chunk(n, 1)[rank].contiguous() if isinstance(layout, Shard) else x
        back, found, shape = from_dtensor(to_dtensor(local, layout, device_mesh, (2, 2 * n)))
        assert torch.equal(back, local)
        assert (found, shape) == (Layout((layout,)), (2, 2 * n))
    for layout in (Shard(0, padded=True), Shard(0, sizes=(1,) * n), Partial(ReduceOp.BXOR)):
        with pytest.raises(ValueError, match="DTensor has no"):
            to_dtensor(torch.ones(1), layout, device_mesh)
    with pytest.raises(ValueError, match="this rank has"):
        to_dtensor(torch.ones(1), S0, device_mesh, (99,))
    replicated = to_dtensor(torch.ones(2), R, device_mesh)
    moved = set_process_group(replicated, other)
    assert (moved.device_mesh, tuple(moved.placements)) == (other, (dt.Replicate(),) * 2)
    assert moved.to_local().data_ptr() == replicated.to_local().data_ptr()
    with pytest.raises(ValueError, match="only a replicated"):
        set_process_group(to_dtensor(torch.ones(2), S0, device_mesh), other)
    # what torch lacks, and `redistribute_between` is for
    with pytest.raises((NotImplementedError, ValueError, RuntimeError)):
        replicated.redistribute(other, [dt.Shard(0), dt.Shard(0)])


def a_device_mesh_becomes_a_mesh(here: Here) -> None:
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh = Mesh.from_device_mesh(device_mesh, MeshCosts.uniform((2, 2)))
    assert mesh.flat is not None
    try:
        assert mesh.shape == (2, 2)
        assert mesh.coordinates == divmod(here.world.rank_in_group, 2)
        assert mesh.flat.all_reduce(torch.ones(1)).item() == 4
        assert mesh.group((0, 1)) is mesh.flat
    finally:
        for group in (*mesh.axes, mesh.flat):
            group.close()
    nested = dt.distribute_tensor(torch.arange(5.0), device_mesh, [dt.Shard(0), dt.Shard(0)])
    assert torch.equal(nested.full_tensor(), torch.arange(5.0))
    with pytest.raises(ValueError, match="names"):
        Mesh.from_device_mesh(init_device_mesh("cpu", (4,)))


TORCH = (
    parallel_layers_match_dense,
    wrong_sizes_are_refused,
    costs_are_measured,
    tensor_parallel_matches_dense,
    layouts_become_dtensors_and_back,
)

CASES = {
    (2,): (*REDISTRIBUTE, numbers_by_hand, *TORCH),
    (2, 2): (*REDISTRIBUTE, *BETWEEN, *PATTERNS, *TORCH, a_device_mesh_becomes_a_mesh),
    (1, 1, 4): (*REDISTRIBUTE, an_axis_of_one_rank_is_the_identity),
}


def on_a_mesh(rank: int, n: int, path: str, shape: tuple[int, ...]) -> None:
    init_gloo(rank, n, path)
    with ExitStack() as stack:
        mesh = open_mesh(stack, rank, shape, path + "mesh")
        assert mesh.flat is not None
        here = Here(mesh, init_device_mesh("cpu", shape), mesh.flat)
        for case in CASES[shape]:
            case(here)
            here.world.barrier(timeout=60)


@pytest.mark.parametrize("shape", CASES, ids=lambda shape: "x".join(map(str, shape)))
def test_tensors_are_redistributed_on_a_mesh(shape: tuple[int, ...], store_path: str) -> None:
    run_ranks(math.prod(shape), on_a_mesh, store_path, shape, timeout=240)


# --- plans against those of DTensor's planner, which needs no peers ------------------------

THEIRS: dict[Placement, dt.Placement] = {
    R: dt.Replicate(), S0: dt.Shard(0), S1: dt.Shard(1), P: dt.Partial()
}  # fmt: skip
OURS = {theirs: ours for ours, theirs in THEIRS.items()}


def compare(
    mesh: DeviceMesh, source: Sequence[Placement], target: Sequence[Placement], costs: MeshCosts
) -> Iterator[tuple[float, float]]:
    """Our cost and DTensor's, of each of its two planners; none where it cannot do it."""
    if any(b == P and a != P for a, b in zip(source, target, strict=True)):
        return
    for shape, use_graph in itertools.product([(64, 64), (7, 5)], (False, True)):
        mine = plan(Layout(tuple(source)), Layout(tuple(target)), shape, costs).cost
        meta = dt._dtensor_spec.TensorMeta(torch.Size(shape), (shape[1], 1), torch.float32)
        specs = [
            dt._dtensor_spec.DTensorSpec(
                mesh, tuple(THEIRS[each] for each in layout), tensor_meta=meta
            )
            for layout in (source, target)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            infos = dt._redistribute._gen_transform_infos_non_cached(specs[0], specs[1], use_graph)
        theirs = 0.0
        at = Arrangement.of(Layout(tuple(source)), 2, (9,) * len(source))
        for info in infos:
            axis, (_, wanted) = info.mesh_dim, info.src_dst_placements
            after = at.without(axis).then(axis, OURS[wanted])
            theirs += cost_of_step(costs, axis, at, after, shape)
            at = after
        yield mine, theirs


def cost_of_step(
    costs: MeshCosts, axis: int, before: Arrangement, after: Arrangement, shape: tuple[int, int]
) -> float:
    """A step of DTensor's, by the model; it skips axes of one rank."""
    was, becomes = before.at(axis), after.at(axis)
    size, gathered = (math.prod(each.largest(shape, costs.shape)) * 4 for each in (before, after))
    if costs.shape[axis] == 1 or isinstance(becomes, Partial) or isinstance(was, Replicate):
        return 0.0
    if isinstance(was, Partial):
        reduce = costs.reduce_scatter if isinstance(becomes, Shard) else costs.all_reduce
        return reduce(size, axis)
    if isinstance(becomes, Shard):
        return costs.all_to_all(size, axis)
    return costs.all_gather(gathered, axis)


def never_dearer(rank: int, n: int) -> tuple[int, int]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    compared = cheaper = 0
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    for mesh in ((2,), (2, 4), (1, 1, 4)):
        device_mesh = DeviceMesh("cpu", torch.arange(math.prod(mesh)).reshape(mesh))
        layouts = list(itertools.product((R, S0, S1, P), repeat=len(mesh)))
        if len(mesh) == 3:
            layouts = [(S0, P, last) for last in (R, S0, S1, P)]
        axes = len(mesh)
        for costs in (
            MeshCosts.uniform(mesh, 20.0, 0.0005),
            MeshCosts(mesh, (0.01, 9.0, 0.3)[-axes:], (1.0, 0.002, 0.1)[-axes:]),
        ):
            for pair in itertools.product(layouts, layouts):
                for ours, theirs in compare(device_mesh, *pair, costs):
                    assert ours <= theirs + 1e-9, (mesh, pair, costs)
                    compared += 1
                    cheaper += ours < theirs - 1e-9
    dist.destroy_process_group()
    return compared, cheaper


def test_a_plan_never_costs_more_than_dtensors() -> None:
    compared, cheaper = run_ranks(1, never_dearer, timeout=120)[0]
    assert compared > 1000
    assert cheaper > 0


def example(rank: int, n: int, port: int) -> str:
    shown = io.StringIO()
    with redirect_stdout(shown):
        runpy.run_path(str(ROOT / "examples" / "reshard.py"))["main"](rank, port)
    return shown.getvalue()


def test_the_example_reshards_a_model_from_two_ranks_to_four() -> None:
    store = coordinator.host_store()
    shown = run_ranks(4, example, store.port)[0]
    assert "TP=2 held (125, 64)" in shown
    assert "[(63, 64), (63, 64), (63, 64), (61, 64)]" in shown
    assert "on a mesh of [2, 2]" in shown and "measured" in shown
