"""Layouts, plans, routes and costs: arithmetic, without any process."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coordinator.layout import (
    CommPattern,
    CommSpec,
    Extent,
    Layout,
    Mesh,
    MeshCosts,
    Partial,
    Place,
    Replicate,
    Shard,
    ShardingSpec,
    SubMesh,
    convert_dim_partition_dict,
    merge_same_dim_mesh_list,
    plan,
)
from coordinator.layout.measure import AlphaBeta, _fit
from coordinator.layout.placement import Arrangement
from coordinator.layout.plan import by_box, route
from device_comm import ReduceOp
from tests.coordinator.layout.by_hand import layouts

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.quick

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
PADDED, MAX = Shard(0, padded=True), Partial(ReduceOp.MAX)
COSTS = MeshCosts((2, 4), alpha=(1, 2), beta=(0.1, 0.01))

# --- which part of a tensor a rank holds ---------------------------------------------------


def parts(layout: Layout, shape: tuple[int, ...], mesh: tuple[int, ...]) -> list[Any]:
    """The extents of each rank, the last axis's ranks one after the other."""
    ranks = itertools.product(*map(range, mesh))
    return [layout.extents(shape, list(map(Place, each, mesh))) for each in ranks]


def elements(extents: list[tuple[Extent]]) -> list[list[int]]:
    return [list(range(part.start, part.stop)) for (part,) in extents]


@given(size=st.integers(0, 40), ranks=st.integers(1, 9))
def test_an_even_cut_is_that_of_torch_chunk(size: int, ranks: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(ranks)]
    held = elements(parts(Layout((S0,)), (size,), (ranks,)))
    assert held == (chunks + [[]] * ranks)[:ranks]


@given(size=st.integers(0, 40), outer=st.integers(1, 5), inner=st.integers(1, 4))
def test_padded_shards_all_have_the_size_of_the_largest(size: int, outer: int, inner: int) -> None:
    """The inner axis cuts the padding of the outer one, too."""
    for mesh in ((outer,), (outer, inner)):
        found = parts(Layout((PADDED,) * len(mesh)), (size,), mesh)
        length = size
        for ranks in mesh:
            length = math.ceil(length / ranks)
        assert {part.length for (part,) in found} == {length}
        assert list(itertools.chain(*elements(found))) == list(range(size))
        assert sum(part.padding for (part,) in found) == length * math.prod(mesh) - size


@pytest.mark.parametrize(
    ("placements", "shape", "mesh", "expected"),
    [
        ((R,), (4, 6), (3,), [[(0, 4, 4), (0, 6, 6)]] * 3),
        ((S0,), (5,), (4,), [[(0, 2, 2)], [(2, 4, 2)], [(4, 5, 1)], [(5, 5, 0)]]),
        ((PADDED,), (5,), (4,), [[(0, 2, 2)], [(2, 4, 2)], [(4, 5, 2)], [(5, 5, 2)]]),
        ((Shard(-1, sizes=(3, 0, 1)),), (4,), (3,), [[(0, 3, 3)], [(3, 3, 0)], [(3, 4, 1)]]),
        ((Shard(0, True, (3, 0, 1)),), (4,), (3,), [[(0, 3, 3)], [(3, 3, 3)], [(3, 4, 3)]]),
        ((Shard(-1),), (4, 6), (2,), [[(0, 4, 4), (0, 3, 3)], [(0, 4, 4), (3, 6, 3)]]),
        # the outermost axis cuts first
        ((S0, S0), (8,), (2, 2), [[(0, 2, 2)], [(2, 4, 2)], [(4, 6, 2)], [(6, 8, 2)]]),
        ((S1, S0), (2, 4), (2, 1), [[(0, 2, 2), (0, 2, 2)], [(0, 2, 2), (2, 4, 2)]]),
    ],
)
def test_extents_by_hand(
    placements: Any, shape: tuple[int, ...], mesh: tuple[int, ...], expected: list[Any]
) -> None:
    layout = Layout(placements)
    assert parts(layout, shape, mesh) == [tuple(Extent(*e) for e in rank) for rank in expected]
    last = [Place(size - 1, size) for size in mesh]
    assert layout.local_shape(shape, last) == tuple(length for *_, length in expected[-1])


def test_a_negative_dimension_is_the_same_and_replicate_the_default() -> None:
    assert Shard(-1).normalized(2) == S1
    assert Layout((Shard(-1), R)).normalized(2) == Layout((S1, R))
    assert Layout() == Layout((R,))


@pytest.mark.parametrize(
    ("placements", "match"),
    [
        ((Shard(2),), "needs dimension 2; the tensor has 2"),
        ((Shard(-3),), "needs dimension -3; the tensor has 2"),
        ((Shard(0, sizes=(1, 2)),), "does not cut 4 elements into 2 parts"),
        ((Shard(0, sizes=(1, 2, 1)),), "does not cut 4 elements into 2 parts"),
        ((Shard(0, sizes=(5, -1)),), "does not cut 4 elements into 2 parts"),
        ((S0, S0), "is for 2 axes, not 1"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(placements: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Layout(placements).extents((4, 6), [Place(0, 2)])


# --- the two helpers over ``{dim: [axes]}`` ------------------------------------------------


def test_dimensions_are_converted_and_merged_in_new_lists() -> None:
    """The originals change or alias what they are given, and of {1: [0], -1: [1]} lose [0]."""
    assert convert_dim_partition_dict(4, {-1: [0]}) == {3: [0]}
    for helper, table, expected in (
        (convert_dim_partition_dict, {-1: [0]}, {1: [0]}),
        (merge_same_dim_mesh_list, {1: [0], -1: [1]}, {1: [0, 1]}),
    ):
        before = {dim: list(axes) for dim, axes in table.items()}
        found = helper(2, table)
        assert found == expected
        found[1].append(9)
        assert table == before


@pytest.mark.parametrize(
    ("helper", "table", "match"),
    [
        (convert_dim_partition_dict, {2: [0]}, "needs dimension 2; the tensor has 2"),
        (merge_same_dim_mesh_list, {-3: [0]}, "needs dimension -3; the tensor has 2"),
        (convert_dim_partition_dict, {1: [0], -1: [1]}, "twice"),
        (merge_same_dim_mesh_list, {0: [0], 1: [0]}, "twice"),
    ],
)
def test_tables_of_dimensions_are_checked(
    helper: Callable[..., object], table: dict[int, list[int]], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        helper(2, table)


# --- costs, and measured times fitted to them ----------------------------------------------


def test_costs_by_the_formulas() -> None:
    formulas = COSTS.all_gather, COSTS.all_reduce, COSTS.reduce_scatter, COSTS.all_to_all
    for axis, expected in enumerate([[52.3, 103.41, 52.201, 26.601], [9.78, 17.37, 9.681, 5.841]]):
        assert [formula(1024, axis) for formula in formulas] == pytest.approx(expected)
    # all 8 devices, the largest alpha, the smallest beta
    assert COSTS.mix_gather(1024) == pytest.approx(2 + 0.01 * 7 / 8 * 1024 + 0.1)
    assert COSTS.all_reduce(1024, [0, 1]) == pytest.approx(2 + 2 * 0.01 * 7 / 8 * 1024 + 0.01)


@pytest.mark.parametrize("given", [((2,), (1.0, 1.0), (1.0,)), ((0,), (1.0,), (1.0,))])
def test_costs_of_no_mesh_are_refused(given: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="axis"):
        MeshCosts(*given)


@given(st.floats(1, 1000), st.floats(1e-5, 1))
def test_exact_times_give_exact_costs(alpha: float, beta: float) -> None:
    moved = [512.0, 1024.0, 65536.0, 1e6, 4e6]
    found = _fit(moved, [alpha + beta * volume for volume in moved])
    assert found.alpha == pytest.approx(alpha, rel=1e-3, abs=1e-3)
    assert found.beta == pytest.approx(beta, rel=1e-3)


def test_no_measured_cost_is_negative() -> None:
    falling, steep = _fit([100.0, 1000.0], [20.0, 10.0]), _fit([100.0, 1000.0], [1.0, 100.0])
    assert falling.beta == 0 and 10 < falling.alpha < 20
    assert steep.alpha == 0 and steep.beta > 0
    assert _fit([1.0, 2.0], [5.0, 5.0]) == AlphaBeta(pytest.approx(5.0), pytest.approx(0, abs=1e-9))


# --- plans ---------------------------------------------------------------------------------


PAIR = MeshCosts.uniform((2,))
EQUAL, LARGE, DEAR_OUTER, DEAR_INNER = (
    MeshCosts((2, 2), (alpha,) * 2, beta)
    for alpha, beta in ((1.0, (1, 1)), (0.0, (1, 1)), (1.0, (1, 0.001)), (1.0, (0.001, 1)))
)


@pytest.mark.parametrize(
    ("source", "target", "size", "costs", "expected"),
    [
        ((S0,), (S0,), 8, PAIR, ""),
        ((R,), (S0,), 8, PAIR, "slice 0"),
        ((S0,), (R,), 8, PAIR, "all_gather 0"),
        ((S0,), (S1,), 8, PAIR, "all_to_all 0"),
        ((P,), (R,), 8, PAIR, "all_reduce 0"),
        ((P,), (S1,), 8, PAIR, "reduce_scatter 0"),
        ((R,), (P,), 8, PAIR, "as_term 0"),
        ((S0,), (P,), 8, PAIR, "as_term 0"),
        ((S0,), (MAX,), 8, PAIR, "all_gather 0, as_term 0"),
        ((MAX,), (P,), 8, PAIR, "reduce_scatter 0, as_term 0"),
        ((Shard(-1),), (S1,), 8, PAIR, ""),
        ((S0,), (Shard(0, sizes=(1, 7)),), 8, PAIR, "all_to_all 0"),
        # a nested cut is undone from the inside
        ((S0, S0), (R, R), 8, EQUAL, "all_gather 1, all_gather 0"),
        # on large tensors the inner cut steps aside to dimension 1, which saves a gather
        ((S0, S0), (R, S0), 64, LARGE, "all_to_all 1, all_gather 0, all_to_all 1"),
        # gathering makes what follows larger, so the dear axis gathers first
        ((S0, S1), (R, R), 8, DEAR_OUTER, "all_gather 0, all_gather 1"),
        ((S0, S1), (R, R), 8, DEAR_INNER, "all_gather 1, all_gather 0"),
        # axes of one rank do nothing
        ((S0, P, S0), (R, R, S0), 8, MeshCosts.uniform((1, 1, 4)), ""),
    ],
)
def test_a_plan_has_the_cheapest_steps(
    source: Any, target: Any, size: int, costs: MeshCosts, expected: str
) -> None:
    found = plan(Layout(source), Layout(target), (size, size), costs)
    assert ", ".join(f"{step.verb} {step.axis}" for step in found.steps) == expected


def test_a_plan_prints() -> None:
    text = str(plan(S0, S1, (4, 4), MeshCosts((2,), (1.0,), (0.1,))))
    assert text.splitlines()[0] == "[4, 4] on a mesh of [2]: 1.801 µs"
    assert "all_to_all" in text and "axis 0" in text and "1.801 µs" in text


@pytest.mark.parametrize(
    ("source", "target", "n_axes", "message"),
    [
        (Layout((S0, S0)), Layout((S0,)), 1, "for 2 axes"),
        (Shard(2), R, 1, "dimension"),
        (Shard(0, sizes=(1, 2)), R, 1, "does not cut"),
        (Layout((P, MAX)), Layout((R, R)), 2, "mixes"),
    ],
)
def test_a_plan_of_what_does_not_fit_is_refused(
    source: Layout, target: Layout, n_axes: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan(source, target, (8, 8), MeshCosts.uniform((2,) * n_axes))


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


# --- routes between meshes; `tests.fuzz` tries any layouts on any meshes -------------------


@pytest.mark.parametrize(
    ("size", "layouts", "source", "target", "expected"),
    [
        # rank 0 keeps its own half of the new shard and takes the other from rank 1
        (
            *(8, (S0, S0), (0, 1, 2, 3), (0, 1)),
            [(0, 0, 0, 2), (1, 0, 2, 4), (2, 1, 4, 6), (3, 1, 6, 8)],
        ),
        (
            *(5, (S0, S0), (0, 1), (2, 3, 4, 5)),
            [(0, 2, 0, 2), (0, 3, 2, 3), (1, 3, 3, 4), (1, 4, 4, 5)],
        ),
        # replicas take turns, and nothing travels to a rank that has it
        (4, (R, R), (0, 1), (1, 2, 3), [(1, 1, 0, 4), (1, 2, 0, 4), (0, 3, 0, 4)]),
        # every term travels
        (
            *(4, (P, S0), (0, 1), (2, 3)),
            [(0, 2, 0, 2), (1, 2, 0, 2), (0, 3, 2, 4), (1, 3, 2, 4)],
        ),
    ],
)
def test_routes_by_hand(
    size: int, layouts: Any, source: tuple[int, ...], target: tuple[int, ...], expected: list[Any]
) -> None:
    one, two = (Layout((each,)) for each in layouts)
    pieces = route((size,), one, SubMesh(source), two, SubMesh(target))
    assert [(p.source, p.target, *box) for p in pieces for box in p.box] == expected
    if one.has_terms:
        assert [numbers for _, numbers in by_box(pieces)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("ranks", "shape"), [((0, 0), ()), ((0, 1), (3,)), ((-1,), ()), ((0, 1, 2), (2, 2))]
)
def test_ranks_that_make_no_mesh_are_refused(ranks: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rank"):
        SubMesh(ranks, shape)


def test_places_on_a_mesh() -> None:
    places = SubMesh((5, 6, 7, 8), (2, 2)).places(7)
    assert [(place.rank_in_group, place.world_size) for place in places] == [(1, 2), (0, 2)]


# --- the costs of the six patterns ---------------------------------------------------------

GATHER = CommPattern.GATHER_FWD_SPLIT_BWD
SPLIT = CommPattern.SPLIT_FWD_GATHER_BWD
ALL2ALL = CommPattern.ALL2ALL_FWD_ALL2ALL_BWD
REDUCE = CommPattern.ALLREDUCE_FWD_IDENTITY_BWD
IDENTITY = CommPattern.IDENTITY_FWD_ALLREDUCE_BWD
MIX = CommPattern.MIXGATHER_FWD_SPLIT_BWD


class Numbers(Place):
    """A group that is only numbers: enough for costs."""

    name = "numbers"


def spec_of(*layout: Any) -> ShardingSpec:
    axes: Any = (Numbers(0, 2), Numbers(0, 4))
    return ShardingSpec(Mesh(axes, Numbers(0, 8), COSTS), (16, 16), Layout(layout))


SWAP = 1 + 0.1 / 4 * 512 + 0.001
MIXED = 2 + 0.01 * 7 / 8 * 1024 + 0.1


@pytest.mark.parametrize(
    ("pattern", "layout", "gather", "shard", "axis", "forward", "backward"),
    [
        # 16 * 16 * 4 bytes = 1024 when gathered; the local shard has half or a quarter
        (GATHER, (S0, R), 0, None, 0, 52.3, 0),
        (GATHER, (R, S0), 0, None, 1, 9.78, 0),
        (SPLIT, (R, R), None, 0, 1, 0, 9.78),
        (REDUCE, (R, R), None, None, 0, 103.41, 0),
        (IDENTITY, (R, R), None, None, 1, 0, 17.37),
        (ALL2ALL, (S0, R), 0, 1, 0, SWAP, SWAP),
        (MIX, (S0, S1), (0, 1), None, (0, 1), MIXED, 0),
        (GATHER, (S0, S0), -2, None, (0, 1), MIXED, 0),
    ],
)
def test_costs_of_patterns(
    pattern: CommPattern,
    layout: Any,
    gather: Any,
    shard: int | None,
    axis: Any,
    forward: float,
    backward: float,
) -> None:
    given: Any = {"gather_dim": gather, "shard_dim": shard, "logical_process_axis": axis}
    options = {name: value for name, value in given.items() if value is not None}
    spec = spec_of(*layout)
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
def test_a_pattern_that_does_not_fit_is_refused(
    pattern: Any, layout: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"pattern|PATTERN|dimension|ax[ei]s|FWD|go with"):
        CommSpec(pattern, spec_of(*layout), **options)
