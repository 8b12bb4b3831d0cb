"""The six patterns: their costs by the formulas, and what they do on real processes."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from coordinator.layout import (
    CommPattern,
    CommSpec,
    Layout,
    Mesh,
    MeshCosts,
    Partial,
    Place,
    Replicate,
    Shard,
    ShardingSpec,
)
from tests.coordinator.layout.by_hand import hold
from tests.coordinator.layout.meshes import open_mesh
from tests.ranks import run_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
GATHER = CommPattern.GATHER_FWD_SPLIT_BWD
SPLIT = CommPattern.SPLIT_FWD_GATHER_BWD
ALL2ALL = CommPattern.ALL2ALL_FWD_ALL2ALL_BWD
REDUCE = CommPattern.ALLREDUCE_FWD_IDENTITY_BWD
IDENTITY = CommPattern.IDENTITY_FWD_ALLREDUCE_BWD
MIX = CommPattern.MIXGATHER_FWD_SPLIT_BWD

COSTS = MeshCosts((2, 4), alpha=(1, 2), beta=(0.1, 0.01))


class Numbers(Place):
    """A group that is only numbers: enough for costs."""

    name = "numbers"


def spec_of(layout: Layout) -> ShardingSpec:
    axes: Any = (Numbers(0, 2), Numbers(0, 4))
    return ShardingSpec(Mesh(axes, Numbers(0, 8), COSTS), (16, 16), layout)


@pytest.mark.parametrize(
    ("pattern", "layout", "options", "forward", "backward"),
    [
        # 16 * 16 * 4 bytes = 1024 when gathered; the local shard has half or a quarter
        (GATHER, (S0, R), {"gather_dim": 0, "logical_process_axis": 0}, 52.3, 0),
        (GATHER, (R, S0), {"gather_dim": 0, "logical_process_axis": 1}, 9.78, 0),
        (SPLIT, (R, R), {"shard_dim": 0, "logical_process_axis": 1}, 0, 9.78),
        (REDUCE, (R, R), {"logical_process_axis": 0}, 103.41, 0),
        (IDENTITY, (R, R), {"logical_process_axis": 1}, 0, 17.37),
        (
            ALL2ALL,
            (S0, R),
            {"gather_dim": 0, "shard_dim": 1, "logical_process_axis": 0},
            1 + 0.1 / 4 * 512 + 0.001,
            1 + 0.1 / 4 * 512 + 0.001,
        ),
        (
            MIX,
            (S0, S1),
            {"gather_dim": (0, 1), "logical_process_axis": (0, 1)},
            2 + 0.01 * 7 / 8 * 1024 + 0.1,
            0,
        ),
        (
            GATHER,
            (S0, S0),
            {"gather_dim": -2, "logical_process_axis": (0, 1)},
            2 + 0.01 * 7 / 8 * 1024 + 0.1,
            0,
        ),
    ],
)
def test_costs(
    pattern: CommPattern,
    layout: tuple[Any, ...],
    options: dict[str, Any],
    forward: float,
    backward: float,
) -> None:
    spec = spec_of(Layout(layout))
    cost = CommSpec(pattern, spec, **options).cost()
    assert cost == pytest.approx((forward, backward, forward + backward))
    only = CommSpec(pattern, spec, forward_only=True, **options).cost()
    assert only == pytest.approx((forward, 0, forward))


@pytest.mark.parametrize(
    ("pattern", "layout", "options"),
    [
        ("NO_SUCH_PATTERN", (R, R), {}),
        (GATHER, (S0, R), {}),
        (GATHER, (S0, R), {"gather_dim": 2}),
        (GATHER, (S0, R), {"gather_dim": 1}),
        (GATHER, (R, R), {"gather_dim": 0}),
        (GATHER, (S0, S0), {"gather_dim": 0}),
        (GATHER, (S0, R), {"gather_dim": 0, "shard_dim": 1}),
        (GATHER, (S0, R), {"gather_dim": 0, "logical_process_axis": 2}),
        (GATHER, (S0, S0), {"gather_dim": 0, "logical_process_axis": (1, 0)}),
        (SPLIT, (S0, R), {"shard_dim": 0}),
        (REDUCE, (S0, R), {}),
        (MIX, (S0, S1), {"gather_dim": 0, "logical_process_axis": (0, 1)}),
        (MIX, (S0, S1), {"gather_dim": (0,), "logical_process_axis": (0, 1)}),
    ],
)
def test_what_does_not_fit_is_refused(
    pattern: Any, layout: tuple[Any, ...], options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"pattern|PATTERN|dimension|ax[ei]s|FWD|go with"):
        CommSpec(pattern, spec_of(Layout(layout)), **options)


# --- on four ranks, a mesh of (2, 2) -------------------------------------------------------


def at(mesh: Mesh) -> int:
    assert mesh.flat is not None
    return mesh.flat.rank_in_group


def gather_takes_its_own_slice_of_the_gradient(mesh: Mesh) -> None:
    spec = CommSpec(GATHER, ShardingSpec(mesh, (4,), Layout((S0, R))), gather_dim=0)
    rank = at(mesh)
    x = torch.full((2,), float(rank), requires_grad=True)
    y = spec.apply(x)
    assert y.tolist() == ([0, 0, 2, 2] if rank in (0, 2) else [1, 1, 3, 3])
    y.backward(torch.full((4,), rank + 1.0))
    assert x.grad is not None
    assert x.grad.tolist() == [rank + 1] * 2


def all_reduce_leaves_its_input(mesh: Mesh) -> None:
    spec = CommSpec(REDUCE, ShardingSpec(mesh, (1,), Layout((Partial(), R))))
    rank = at(mesh)
    x = torch.tensor([rank + 1.0], requires_grad=True)
    y = spec.apply(x)
    assert y.item() == [4, 6, 4, 6][rank]
    assert x.item() == rank + 1
    y.backward(torch.tensor([rank + 5.0]))
    assert x.grad is not None
    assert x.grad.item() == rank + 5


def split_drops_no_remainder(mesh: Mesh) -> None:
    spec = CommSpec(SPLIT, ShardingSpec(mesh, (5,), Layout((R, R))), shard_dim=0)
    x = torch.arange(5.0).requires_grad_()
    y = spec.apply(x)
    assert y.tolist() == [[0, 1, 2], [3, 4]][mesh.coordinates[0]]
    y.backward(y.detach() * 10)
    assert x.grad is not None
    assert x.grad.tolist() == [0, 10, 20, 30, 40]


def all_to_all_over_the_flattened_mesh_comes_back(mesh: Mesh) -> None:
    """The original's flattened backward uses the wrong group."""
    whole = torch.arange(35.0).reshape(7, 5)
    layout = Layout((S0, S0))
    spec = CommSpec(
        ALL2ALL,
        ShardingSpec(mesh, (7, 5), layout),
        gather_dim=0,
        shard_dim=1,
        logical_process_axis=[0, 1],
    )
    x = hold(whole, layout, mesh.axes).requires_grad_()
    y = spec.apply(x)
    assert torch.equal(y, hold(whole, Layout((S1, S1)), mesh.axes))
    y.backward(y.detach() * 2)
    assert x.grad is not None
    assert torch.equal(x.grad, x.detach() * 2)


def all_to_all_along_one_axis(mesh: Mesh) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    spec = CommSpec(
        ALL2ALL,
        ShardingSpec(mesh, (4, 3), Layout((R, S0))),
        gather_dim=0,
        shard_dim=-1,
        logical_process_axis=1,
    )
    y = spec.apply(hold(whole, Layout((R, S0)), mesh.axes))
    assert torch.equal(y, hold(whole, Layout((R, S1)), mesh.axes))


def identity_sums_the_gradient(mesh: Mesh) -> None:
    spec = CommSpec(IDENTITY, ShardingSpec(mesh, (2,), Layout((R, R))), logical_process_axis=(0, 1))
    x = torch.ones(2, requires_grad=True)
    y = spec.apply(x)
    assert torch.equal(x, y)
    (y * (at(mesh) + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [10, 10]


def mix_gather_puts_every_part_in_its_place(mesh: Mesh) -> None:
    for shape in ((4, 6), (5, 3), (1, 2)):
        whole = torch.arange(float(math.prod(shape))).reshape(shape)
        spec = CommSpec(
            MIX,
            ShardingSpec(mesh, shape, Layout((S1, S0))),
            gather_dim=(1, 0),
            logical_process_axis=(0, 1),
        )
        x = hold(whole, Layout((S1, S0)), mesh.axes).requires_grad_()
        y = spec.apply(x)
        assert torch.equal(y, whole)
        y.backward(whole * 3)
        assert x.grad is not None
        assert torch.equal(x.grad, x.detach() * 3)


def forward_only_has_no_backward(mesh: Mesh) -> None:
    spec = CommSpec(
        GATHER, ShardingSpec(mesh, (4,), Layout((S0, R))), gather_dim=0, forward_only=True
    )
    assert not spec.apply(torch.ones(2, requires_grad=True)).requires_grad


CASES = (
    gather_takes_its_own_slice_of_the_gradient,
    all_reduce_leaves_its_input,
    split_drops_no_remainder,
    all_to_all_over_the_flattened_mesh_comes_back,
    all_to_all_along_one_axis,
    identity_sums_the_gradient,
    mix_gather_puts_every_part_in_its_place,
    forward_only_has_no_backward,
)


def patterns(rank: int, n: int, path: str) -> None:
    with ExitStack() as stack:
        mesh = open_mesh(stack, rank, (2, 2), path)
        for case in CASES:
            case(mesh)
        no_flat = ShardingSpec(Mesh(mesh.axes), (4,), Layout((S0, S0)))
        with pytest.raises(ValueError, match="together"):
            CommSpec(GATHER, no_flat, gather_dim=0, logical_process_axis=(0, 1))
        with pytest.raises(ValueError, match="on the axes"):
            Mesh(mesh.axes, mesh.axes[0])
    with ExitStack() as stack:
        long = open_mesh(stack, rank, (1, 1, 4), path + "long")
        spec = CommSpec(GATHER, ShardingSpec(long, (4,), Layout((S0, R, R))), gather_dim=0)
        x = torch.ones(4)
        assert spec.apply(x) is x


def test_patterns_on_a_mesh_of_two_by_two(store_path: str) -> None:
    run_ranks(4, patterns, store_path, timeout=90)
