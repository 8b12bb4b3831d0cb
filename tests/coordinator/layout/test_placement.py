"""Which part of a tensor a rank holds: arithmetic against torch and against hand-made values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coordinator.layout import Extent, Layout, Place, Placement, Replicate, Shard


def extents(placement: Placement, shape: tuple[int, ...], ranks: int) -> list[tuple[Extent, ...]]:
    return [Layout((placement,)).extents(shape, [Place(rank, ranks)]) for rank in range(ranks)]


@given(size=st.integers(0, 40), ranks=st.integers(1, 9))
def test_even_cut_is_that_of_torch_chunk(size: int, ranks: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(ranks)]
    chunks += [[]] * (ranks - len(chunks))
    held = [list(range(part.start, part.stop)) for (part,) in extents(Shard(0), (size,), ranks)]
    if size == 0:
        assert held == [[]] * ranks
    else:
        assert held == chunks


@given(size=st.integers(0, 40), ranks=st.integers(1, 9))
def test_padded_shards_all_have_the_size_of_the_largest(size: int, ranks: int) -> None:
    parts = [part for (part,) in extents(Shard(0, padded=True), (size,), ranks)]
    assert {part.length for part in parts} == {math.ceil(size / ranks)}
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(size))
    assert sum(part.padding for part in parts) == math.ceil(size / ranks) * ranks - size


def test_uneven_by_hand() -> None:
    assert extents(Shard(0), (5,), 4) == [
        (Extent(0, 2, 2),),
        (Extent(2, 4, 2),),
        (Extent(4, 5, 1),),
        (Extent(5, 5, 0),),
    ]
    assert extents(Shard(0, padded=True), (5,), 4)[2:] == [(Extent(4, 5, 2),), (Extent(5, 5, 2),)]


def test_given_sizes() -> None:
    assert extents(Shard(1, sizes=(3, 0, 1)), (2, 4), 3) == [
        (Extent(0, 2, 2), Extent(0, 3, 3)),
        (Extent(0, 2, 2), Extent(3, 3, 0)),
        (Extent(0, 2, 2), Extent(3, 4, 1)),
    ]
    padded = extents(Shard(1, padded=True, sizes=(3, 0, 1)), (2, 4), 3)
    assert [part[1] for part in padded] == [Extent(0, 3, 3), Extent(3, 3, 3), Extent(3, 4, 3)]


def test_negative_dim_counts_from_the_last() -> None:
    assert extents(Shard(-1), (4, 6), 2) == extents(Shard(1), (4, 6), 2)


def test_replicate_keeps_all() -> None:
    assert extents(Replicate(), (4, 6), 3) == [(Extent(0, 4, 4), Extent(0, 6, 6))] * 3


def test_two_axes_cut_one_dimension_outermost_first() -> None:
    layout = Layout((Shard(0), Shard(0)))
    held = [
        layout.extents((8,), [Place(outer, 2), Place(inner, 2)])[0]
        for outer in range(2)
        for inner in range(2)
    ]
    assert [(part.start, part.stop) for part in held] == [(0, 2), (2, 4), (4, 6), (6, 8)]


@given(size=st.integers(0, 30), outer=st.integers(1, 4), inner=st.integers(1, 4))
def test_padding_of_the_outer_axis_is_cut_by_the_inner(size: int, outer: int, inner: int) -> None:
    layout = Layout((Shard(0, padded=True), Shard(0, padded=True)))
    parts = [
        layout.extents((size,), [Place(i, outer), Place(j, inner)])[0]
        for i in range(outer)
        for j in range(inner)
    ]
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(size))
    assert {part.length for part in parts} == {math.ceil(math.ceil(size / outer) / inner)}


def test_two_axes_cut_two_dimensions() -> None:
    layout = Layout((Shard(1), Shard(0)))
    assert layout.local_shape((4, 6), [Place(1, 2), Place(0, 2)]) == (2, 3)
    assert layout.extents((4, 6), [Place(1, 2), Place(0, 2)]) == (Extent(0, 2, 2), Extent(3, 6, 3))


def test_default_is_replicate() -> None:
    assert Layout() == Layout((Replicate(),))


@pytest.mark.parametrize(
    ("placement", "match"),
    [
        (Shard(2), "needs dimension 2; the tensor has 2"),
        (Shard(-3), "needs dimension -3; the tensor has 2"),
        (Shard(0, sizes=(1, 2)), "does not cut 4 elements into 2 parts"),
        (Shard(0, sizes=(1, 2, 1)), "does not cut 4 elements into 2 parts"),
        (Shard(0, sizes=(5, -1)), "does not cut 4 elements into 2 parts"),
    ],
)
def test_a_placement_that_does_not_fit_is_refused(placement: Placement, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Layout((placement,)).extents((4, 6), [Place(0, 2)])


def test_axes_must_be_as_many_as_placements() -> None:
    with pytest.raises(ValueError, match="is for 1 axes, not 2"):
        Layout((Shard(0),)).extents((4,), [Place(0, 2), Place(0, 2)])
