"""The two helpers over ``{dim: [axes]}``, and grids of processes: pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.layout import ProcessGrid, convert_dim_partition_dict, merge_same_dim_mesh_list


def test_a_negative_dimension_becomes_positive() -> None:
    assert convert_dim_partition_dict(4, {-1: [0]}) == {3: [0]}


def test_converting_loses_nothing_and_changes_nothing() -> None:
    """The original mutates its input, and of {1: [0], -1: [1]} it loses [0]."""
    table = {-1: [0]}
    convert_dim_partition_dict(2, table)[1].append(9)
    assert table == {-1: [0]}
    with pytest.raises(ValueError, match="twice"):
        convert_dim_partition_dict(2, {1: [0], -1: [1]})


def test_merging_leaves_the_callers_lists_alone() -> None:
    """The original aliases them."""
    table = {1: [0], -1: [1]}
    merged = merge_same_dim_mesh_list(2, table)
    assert merged == {1: [0, 1]}
    merged[1].append(9)
    assert table == {1: [0], -1: [1]}


@pytest.mark.parametrize("helper", [convert_dim_partition_dict, merge_same_dim_mesh_list])
@pytest.mark.parametrize("dim", [2, -3])
def test_dimensions_are_checked(helper: object, dim: int) -> None:
    with pytest.raises(ValueError, match=f"no dimension {dim}"):
        helper(2, {dim: [0]})  # type: ignore[operator]


def test_an_axis_cuts_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        merge_same_dim_mesh_list(2, {0: [0], 1: [0]})


@given(st.integers(1, 5), st.data())
def test_every_axis_is_kept(ndim: int, data: st.DataObject) -> None:
    dims = data.draw(st.lists(st.integers(-ndim, ndim - 1), unique=True))
    table = {dim: [axis] for axis, dim in enumerate(dims)}
    merged = merge_same_dim_mesh_list(ndim, table)
    assert sorted(axis for axes in merged.values() for axis in axes) == list(range(len(dims)))
    assert all(axis in merged[dim % ndim] for dim, (axis,) in table.items())


# --- grids of processes --------------------------------------------------------------------


def test_rank_two_of_two_by_two() -> None:
    grid = ProcessGrid.of(range(4), tp=2, dp=2)
    assert (grid.tp_ranks(2), grid.dp_ranks(2)) == ([2, 3], [0, 2])
    assert (grid.tp_local_rank(2), grid.dp_local_rank(2)) == (0, 1)


def test_what_counts_is_the_index_not_the_global_rank() -> None:
    """The original gives rank 1 of [1, 2] place 1."""
    grid = ProcessGrid.of([1, 2], tp=2)
    assert [grid.tp_local_rank(rank) for rank in (1, 2)] == [0, 1]


@pytest.mark.parametrize(
    ("tp", "dp", "expected"), [(None, None, (1, 6)), (2, None, (2, 3)), (None, 2, (3, 2))]
)
def test_what_is_not_said_is_derived(
    tp: int | None, dp: int | None, expected: tuple[int, int]
) -> None:
    grid = ProcessGrid.of(range(6), tp, dp)
    assert (grid.tp, grid.dp) == expected


@pytest.mark.parametrize(
    ("ranks", "tp", "dp"),
    [
        ([0, 1], 2, 2),
        ([0, 1, 2], 2, None),
        ([0, 0], None, None),
        ([], 1, 1),
        ([0, 1, 2, 3], 0, None),
        ([0, 1, 2, 3], None, 0),
        ([0, 1, 2, 3], -2, -2),
    ],
)
def test_no_grid(ranks: list[int], tp: int | None, dp: int | None) -> None:
    with pytest.raises(ValueError, match=r"rank|tp and dp"):
        ProcessGrid.of(ranks, tp, dp)
