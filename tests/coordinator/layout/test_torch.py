"""Beside torch's own: DTensor, DeviceMesh, tensor.parallel; parallel layers against dense ones."""

from __future__ import annotations

import itertools
from contextlib import ExitStack

import pytest
import torch
import torch.distributed.tensor as dt
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

from coordinator import ReduceOp
from coordinator.layout import (
    Layout,
    Mesh,
    MeshCosts,
    Partial,
    Replicate,
    Shard,
    calibrate,
    calibrate_mesh,
    measure,
    moves,
    named_parameters,
    plan,
    redistribute,
)
from coordinator.layout.dtensor import from_dtensor, set_process_group, to_dtensor
from tests.coordinator.layout.dtensor_paths import THEIRS, compare
from tests.coordinator.layout.meshes import open_mesh
from tests.ranks import init_gloo, run_ranks


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(5, 6, dtype=torch.float64)


def parallel_layers_match_dense(mesh: Mesh) -> None:
    """Column, then row, with the differentiable collectives: values and all gradients."""
    tp = mesh.axes[-1]
    dense, x = mlp(), batch().requires_grad_()
    expected = dense(x)
    expected.square().sum().backward()

    parts = {}
    for name, layout in (("0.weight", Shard(0)), ("0.bias", Shard(0)), ("2.weight", Shard(1))):
        whole = dict(dense.named_parameters())[name].detach()
        parts[name] = redistribute(whole, Replicate(), layout, tp).requires_grad_()
    bias = dense[2].bias.detach().clone().requires_grad_()  # type: ignore[index]
    mine = batch().requires_grad_()
    hidden = functional.linear(moves.copy(mine, tp), parts["0.weight"], parts["0.bias"])
    partial = functional.linear(hidden.tanh(), parts["2.weight"])
    found = moves.reduce(partial, tp) + bias
    found.square().sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(mine.grad, x.grad)
    torch.testing.assert_close(bias.grad, dense[2].bias.grad)  # type: ignore[index]
    for name, part in parts.items():
        assert part.grad is not None
        layout = Shard(1) if name == "2.weight" else Shard(0)
        wanted = dict(dense.named_parameters())[name].grad
        assert wanted is not None
        torch.testing.assert_close(part.grad, redistribute(wanted, Replicate(), layout, tp))


def wrong_sizes_are_refused(mesh: Mesh) -> None:
    tp, x = mesh.axes[-1], torch.ones(4, 4)
    n = tp.world_size
    for call in (
        lambda: moves.gather(x, 2, tp),
        lambda: moves.gather(x, 0, tp, [3] * n),
        lambda: moves.split(x, 0, tp, [9] * n),
        lambda: moves.all_to_all(x, 0, -2, tp),
        lambda: moves.recut(x, 0, tp, [4] * n, [1] * n),
    ):
        with pytest.raises(ValueError, match=r"sizes|dim"):
            call()


def calibration(mesh: Mesh) -> None:
    """The same positive numbers everywhere, good for a plan."""
    found = calibrate(mesh.axes[0], sizes=(1024, 1 << 18), repeats=1)
    assert found.alpha >= 0
    assert found.beta >= 0
    assert found.alpha + found.beta > 0
    everyone = mesh.axes[0].all_gather_object(found)
    assert everyone == [found] * len(everyone)
    costs = calibrate_mesh(mesh.axes, sizes=(1024, 1 << 18), repeats=1)
    assert mesh.flat is not None
    assert mesh.flat.all_gather_object(costs) == [costs] * mesh.flat.world_size
    x = torch.ones(4, 4)
    axes = len(mesh.axes)
    whole, cut = Layout((Replicate(),) * axes), Layout((Shard(0),) * axes)
    assert plan(whole, cut, (4, 4), costs).cost == 0
    redistribute(x, whole, cut, mesh.axes, costs=costs)
    with pytest.raises(ValueError, match="fit"):
        calibrate(mesh.axes[0], sizes=(1024,))
    never_dearer_than_dtensor(mesh, costs)
    measured_plans(mesh, costs)


def never_dearer_than_dtensor(mesh: Mesh, costs: MeshCosts) -> None:
    """By what was measured here, as by numbers that were made up (`test_plan`)."""
    device_mesh = init_device_mesh("cpu", mesh.shape)
    layouts = list(itertools.product(THEIRS, repeat=len(mesh.shape)))
    compared = [
        each
        for pair in itertools.product(layouts, layouts)
        for each in compare(device_mesh, [(64, 64), (1024, 512)], *pair, costs)
    ]
    assert len(compared) >= 4 * len(layouts)
    assert all(ours <= theirs * (1 + 1e-12) for ours, theirs in compared)


def measured_plans(mesh: Mesh, costs: MeshCosts) -> None:
    """Every step is timed, the same is said everywhere, and printed beside the model."""
    axes = len(mesh.axes)
    cut, whole = Layout((Shard(0),) * axes), Layout((Replicate(),) * axes)
    terms = Layout((Partial(),) * axes)
    for source, target in ((cut, whole), (terms, cut), (whole, cut), (cut, cut)):
        steps = plan(source, target, (50, 8), costs)
        found = measure(steps, mesh.axes, repeats=2)
        assert found.plan is steps
        assert len(found.times) == len(steps.steps)
        assert all(time > 0 for time in found.times)
        assert found.time == sum(found.times)
        assert mesh.flat is not None
        assert mesh.flat.all_gather_object(found.times) == [found.times] * mesh.flat.world_size
        lines = str(found).splitlines()
        assert lines[0] == f"{str(steps).splitlines()[0]}, {found.time:.3f} µs measured"
        for line, step, time in zip(lines[1:], steps.steps, found.times, strict=True):
            assert line == f"  {step}  {time:.3f} µs measured"
    with pytest.raises(ValueError, match="a plan for a mesh of"):
        measure(plan(Shard(0), Shard(1), (9, 9), MeshCosts.uniform((9,))), mesh.axes)


def tensor_parallel_matches_dense(rank: int, n: int) -> None:
    """torch's Colwise and Rowwise on a mesh whose group is wrapped, named_parameters on top."""
    device_mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
    model = parallelize_module(mlp(), device_mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.testing.assert_close(model(batch()), mlp()(batch()))
    column = ColwiseParallel(output_layouts=dt.Replicate())  # ColossalAI's output_replicate
    gathered = parallelize_module(mlp(), device_mesh, {"0": column})
    torch.testing.assert_close(gathered(batch()), mlp()(batch()))
    params = dict(named_parameters(model, "mlp"))
    assert list(params) == ["mlp.0.weight", "mlp.0.bias", "mlp.2.weight", "mlp.2.bias"]
    local, layout, shape = from_dtensor(params["mlp.2.weight"])
    assert (layout, shape) == (Layout((Shard(1),)), (3, 8))
    ours = Mesh.from_device_mesh(device_mesh)
    whole = redistribute(local, layout, Replicate(), ours.axes, shape=shape)
    torch.testing.assert_close(whole, mlp()[2].weight)  # type: ignore[index]
    ours.axes[0].close()


def between_layouts_and_dtensor(rank: int, n: int) -> None:
    device_mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("tp",))
    other = init_device_mesh("cpu", (1, n), mesh_dim_names=("dp", "tp"))
    layouts = (Replicate(), Shard(1), Partial(), Partial(ReduceOp.AVG), Partial(ReduceOp.MAX))
    for layout in layouts:
        x = torch.arange(4.0 * n).reshape(2, -1)
        local = x.chunk(n, 1)[rank].contiguous() if isinstance(layout, Shard) else x
        there = to_dtensor(local, layout, device_mesh, (2, 2 * n))
        back, found, shape = from_dtensor(there)
        assert torch.equal(back, local)
        assert (found, shape) == (Layout((layout,)), (2, 2 * n))
    for layout in (Shard(0, padded=True), Shard(0, sizes=(1,) * n), Partial(ReduceOp.BXOR)):
        with pytest.raises(ValueError, match="DTensor has no"):
            to_dtensor(torch.ones(1), layout, device_mesh)
    with pytest.raises(ValueError, match="this rank has"):
        to_dtensor(torch.ones(1), Shard(0), device_mesh, (99,))
    replicated = to_dtensor(torch.ones(2), Replicate(), device_mesh)
    moved = set_process_group(replicated, other)
    assert (moved.device_mesh, tuple(moved.placements)) == (other, (dt.Replicate(),) * 2)
    assert moved.to_local().data_ptr() == replicated.to_local().data_ptr()
    with pytest.raises(ValueError, match="only a replicated"):
        set_process_group(to_dtensor(torch.ones(2), Shard(0), device_mesh), other)


def cross_mesh_is_what_torch_lacks(rank: int, n: int) -> None:
    one = init_device_mesh("cpu", (n,))
    two = init_device_mesh("cpu", (1, n))
    with pytest.raises((NotImplementedError, ValueError, RuntimeError)):
        to_dtensor(torch.ones(2), Replicate(), one).redistribute(two, [dt.Shard(0), dt.Shard(0)])


def a_device_mesh_of_two_axes(rank: int, n: int) -> None:
    device_mesh = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "tp"))
    mesh = Mesh.from_device_mesh(device_mesh, MeshCosts.uniform((2, n // 2)))
    try:
        assert mesh.shape == (2, n // 2)
        assert mesh.coordinates == (rank // (n // 2), rank % (n // 2))
        assert mesh.flat is not None
        assert mesh.flat.all_reduce(torch.ones(1)).item() == n
        assert mesh.group((0, 1)) is mesh.flat
    finally:
        for group in (*mesh.axes, mesh.flat):
            if group is not None:
                group.close()
    whole = torch.arange(5.0)
    nested = dt.distribute_tensor(whole, device_mesh, [dt.Shard(0), dt.Shard(0)])
    assert torch.equal(nested.full_tensor(), whole)
    with pytest.raises(ValueError, match="names"):
        Mesh.from_device_mesh(init_device_mesh("cpu", (n,)))


def on_ranks(rank: int, n: int, path: str) -> None:
    init_gloo(rank, n, path)
    with ExitStack() as stack:
        mesh = open_mesh(stack, rank, (n,) if n == 2 else (2, 2), path + "mesh")
        for case in (parallel_layers_match_dense, wrong_sizes_are_refused, calibration):
            case(mesh)
        mesh.axes[-1].barrier(timeout=60)
    tensor_parallel_matches_dense(rank, n)
    between_layouts_and_dtensor(rank, n)
    cross_mesh_is_what_torch_lacks(rank, n)
    if n > 2:
        a_device_mesh_of_two_axes(rank, n)


@pytest.mark.parametrize("n", [2, 4])
def test_beside_torch(n: int, store_path: str) -> None:
    run_ranks(n, on_ranks, store_path, timeout=180)
