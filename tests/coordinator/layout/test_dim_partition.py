"""The two helpers over ``{dim: [axes]}``: pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.layout import convert_dim_partition_dict, merge_same_dim_mesh_list


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
    with pytest.raises(ValueError, match=f"needs dimension {dim}; the tensor has 2"):
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
