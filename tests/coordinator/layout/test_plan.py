"""Plans: their steps by hand, of any layouts, their costs against DTensor's paths, the formulas."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coordinator.layout import Layout, MeshCosts, Partial, Plan, Replicate, Shard, plan
from coordinator.layout.placement import Arrangement
from device_comm import ReduceOp
from tests.coordinator.layout.by_hand import layouts
from tests.coordinator.layout.dtensor_paths import compare
from tests.ranks import run_ranks

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def verbs(found: Plan) -> list[tuple[str, int]]:
    return [(step.verb, step.axis) for step in found.steps]


def test_formulas() -> None:
    costs = MeshCosts((2, 4), alpha=(1, 2), beta=(0.1, 0.01))
    by_axis: list[Any] = [
        [costs.all_gather, costs.all_reduce, costs.reduce_scatter, costs.all_to_all],
        [52.3, 103.41, 52.201, 26.601],
        [9.78, 17.37, 9.681, 5.841],
    ]
    for axis in (0, 1):
        for formula, expected in zip(by_axis[0], by_axis[axis + 1], strict=True):
            assert formula(1024, axis) == pytest.approx(expected)
    # all 8 devices, the largest alpha, the smallest beta
    assert costs.mix_gather(1024) == pytest.approx(2 + 0.01 * 7 / 8 * 1024 + 0.1)
    assert costs.all_reduce(1024, [0, 1]) == pytest.approx(2 + 2 * 0.01 * 7 / 8 * 1024 + 0.01)


@pytest.mark.parametrize("parts", [((2,), (1.0, 1.0), (1.0,)), ((0,), (1.0,), (1.0,))])
def test_costs_of_no_mesh_are_refused(parts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="axis"):
        MeshCosts(*parts)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (S0, S0, []),
        (R, S0, ["slice"]),
        (S0, R, ["all_gather"]),
        (S0, S1, ["all_to_all"]),
        (P, R, ["all_reduce"]),
        (P, S1, ["reduce_scatter"]),
        (R, P, ["as_term"]),
        (S0, P, ["as_term"]),
        (S0, Partial(ReduceOp.MAX), ["all_gather", "as_term"]),
        (Partial(ReduceOp.MAX), P, ["reduce_scatter", "as_term"]),
        (Shard(-1), S1, []),
        (S0, Shard(0, sizes=(1, 7)), ["all_to_all"]),
    ],
)
def test_steps_along_one_axis(source: Shard, target: Shard, expected: list[str]) -> None:
    found = plan(source, target, (8, 8), MeshCosts.uniform((2,)))
    assert [step.verb for step in found.steps] == expected


def test_a_nested_cut_is_undone_from_the_inside() -> None:
    found = plan(Layout((S0, S0)), Layout((R, R)), (8, 8), MeshCosts.uniform((2, 2)))
    assert verbs(found) == [("all_gather", 1), ("all_gather", 0)]


def test_a_dimension_in_between_saves_a_gather() -> None:
    """(S0, S0) → (R, S0) on large tensors: the inner cut steps aside to dimension 1."""
    costs = MeshCosts((2, 2), (0.0, 0.0), (1.0, 1.0))
    found = plan(Layout((S0, S0)), Layout((R, S0)), (64, 64), costs)
    assert verbs(found) == [("all_to_all", 1), ("all_gather", 0), ("all_to_all", 1)]


def test_a_cheap_axis_is_used_first() -> None:
    """Gathering makes what follows larger, so the dear axis gathers first."""
    layouts = Layout((S0, S1)), Layout((R, R))
    dear_outer = MeshCosts((2, 2), (1.0, 1.0), (1.0, 0.001))
    dear_inner = MeshCosts((2, 2), (1.0, 1.0), (0.001, 1.0))
    assert verbs(plan(*layouts, (8, 8), dear_outer)) == [("all_gather", 0), ("all_gather", 1)]
    assert verbs(plan(*layouts, (8, 8), dear_inner)) == [("all_gather", 1), ("all_gather", 0)]


def test_axes_of_one_rank_do_nothing() -> None:
    assert (
        plan(Layout((S0, P, S0)), Layout((R, R, S0)), (8,), MeshCosts.uniform((1, 1, 4))).steps
        == ()
    )


def test_a_plan_prints() -> None:
    text = str(plan(S0, S1, (4, 4), MeshCosts((2,), (1.0,), (0.1,))))
    assert text.splitlines()[0] == "[4, 4] on a mesh of [2]: 1.801 µs"
    assert "all_to_all" in text and "axis 0" in text and "1.801 µs" in text


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        (Layout((S0, S0)), Layout((S0,)), "for 2 axes"),
        (Shard(2), R, "dimension"),
        (Shard(0, sizes=(1, 2)), R, "does not cut"),
    ],
)
def test_what_does_not_fit_is_refused(source: Layout, target: Layout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(source, target, (8, 8), MeshCosts.uniform((2,)))


def test_mixed_reductions_are_refused() -> None:
    mixed = Layout((P, Partial(ReduceOp.MAX)))
    with pytest.raises(ValueError, match="mixes"):
        plan(mixed, Layout((R, R)), (8,), MeshCosts.uniform((2, 2)))


@given(st.data())
def test_a_plan_starts_and_ends_right_and_costs_what_its_steps_cost(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from([(2,), (4,), (2, 3), (3, 2), (1, 4), (2, 1, 2), (2, 2, 2)]))
    shape = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple))
    source, target = data.draw(layouts(shape, mesh)), data.draw(layouts(shape, mesh))
    found = plan(source, target, shape, MeshCosts.uniform(mesh))
    for before, after in itertools.pairwise(found.steps):
        assert before.after == after.before
    assert found.cost == sum(step.cost for step in found.steps) >= 0
    if found.steps:
        assert found.steps[0].before == Arrangement.of(source, len(shape), mesh)
        assert found.steps[-1].after == Arrangement.of(target, len(shape), mesh)
    assert plan(target, target, shape, MeshCosts.uniform(mesh)).steps == ()


# --- against DTensor's planner, which needs no peers ---------------------------------------

MESHES = ((2,), (2, 4), (1, 1, 4))
SHAPES = ((64, 64), (7, 5))
COSTS = ((20.0, 0.0005), (0.01, 1.0))


def never_dearer(rank: int, n: int) -> tuple[int, int]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    compared = cheaper = 0
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    for mesh in MESHES:
        device_mesh = DeviceMesh("cpu", torch.arange(math.prod(mesh)).reshape(mesh))
        layouts = list(itertools.product((R, S0, S1, P), repeat=len(mesh)))
        if len(mesh) == 3:
            layouts = [(S0, P, last) for last in (R, S0, S1, P)]
        for alpha, beta in COSTS:
            costs = MeshCosts.uniform(mesh, alpha, beta)
            for pair in itertools.product(layouts, layouts):
                for ours, theirs in compare(device_mesh, SHAPES, *pair, costs):
                    assert ours <= theirs + 1e-9, (mesh, pair, costs)
                    compared += 1
                    cheaper += ours < theirs - 1e-9
    dist.destroy_process_group()
    return compared, cheaper


def test_a_plan_never_costs_more_than_dtensors() -> None:
    compared, cheaper = run_ranks(1, never_dearer, timeout=120)[0]
    assert compared > 1000
    assert cheaper > 0
