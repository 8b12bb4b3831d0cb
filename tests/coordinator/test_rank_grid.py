"""The grid of ranks: its laws over random grids, and what is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rank_grid import RankGrid

pytestmark = pytest.mark.quick

GRID = RankGrid.of({"dp": 2, "pp": 2, "tp": 2})
CONTEXTS = RankGrid.of({"pcp": 2, "tp": 4})


def test_decode_context_groups_are_those_of_vllm() -> None:
    """Ranks as (dp, pp, pcp, tp), pcp and tp exchanged, cut into runs of dcp."""
    cases = [
        (dp, pp, pcp, tp, dcp)
        for dp, pp, pcp, tp in itertools.product((1, 2), (1, 2), (1, 2, 4), (1, 2, 4, 8))
        for dcp in (1, 2, 3, 4, 8, 16, 32)
        if tp * pcp % dcp == 0
    ]
    assert len(cases) >= 120
    for dp, pp, pcp, tp, dcp in cases:
        ranks = np.arange(dp * pp * pcp * tp).reshape(dp, pp, pcp, tp)
        expected = ranks.swapaxes(-1, -2).reshape(-1, dcp).tolist()
        grid = RankGrid.of({"dp": dp, "pp": pp, "pcp": pcp, "tp": tp})
        for group in expected:
            for rank in group:
                assert grid.dcp_group_of(rank, dcp) == group


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RankGrid.of({"tp": 0}), "tp must be 1 or more; got 0"),
        (lambda: RankGrid((("tp", 2), ("tp", 2))), "each a different one"),
        (lambda: RankGrid((("", 2),)), "need names"),
        (lambda: RankGrid((("a\n", 2),)), "name of an axis must be of printable characters only"),
        (lambda: GRID.coordinates(8), "rank 8 is not in a grid of 8 ranks"),
        (lambda: GRID.coordinates(-1), "rank -1 is not in"),
        (lambda: GRID.group_of(8, "tp"), "rank 8 is not in"),
        (lambda: GRID.groups("ep"), r"no axis \['ep'\]"),
        (lambda: GRID.group_of(0, "ep"), r"no axis \['ep'\]"),
        (lambda: CONTEXTS.dcp_group_of(8, 2), "rank 8 is not in"),
        (lambda: CONTEXTS.dcp_group_of(0, 3), "dcp=3 does not divide tp=4 x pcp=2"),
        (lambda: CONTEXTS.dcp_group_of(0, 0), "dcp must be 1 or more; got 0"),
        (lambda: GRID.rank({"dp": 0, "pp": 0}), "need a position on each"),
        (lambda: GRID.rank({"dp": 0, "pp": 0, "tp": 2}), "positions 0 to 1; got 2"),
    ],
)
def test_wrong_values(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


@pytest.mark.parametrize("size", [2.0, "2", True])
def test_a_size_is_an_integer(size: object) -> None:
    with pytest.raises(TypeError, match="tp must be a whole number; got"):
        RankGrid.of({"tp": size})  # type: ignore[dict-item]


def test_names_and_sizes_are_plain() -> None:
    """They are sent to other processes."""
    ((name, size),) = RankGrid.of({np.str_("cfg"): np.int64(2)}).axes  # type: ignore[dict-item]
    assert (type(name), type(size)) == (str, int)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_groups_are_those_of_an_array_of_ranks(shape: list[int], data: st.DataObject) -> None:
    names = [f"axis{i}" for i in range(len(shape))]
    grid = RankGrid(tuple(zip(names, shape, strict=True)))
    chosen = sorted(data.draw(st.sets(st.integers(0, len(shape) - 1))))
    array = np.arange(grid.size).reshape(shape)
    ends = range(len(shape) - len(chosen), len(shape))
    width = int(np.prod([shape[i] for i in chosen], dtype=int))
    expected = np.moveaxis(array, chosen, list(ends)).reshape(-1, width).tolist()
    axes = [names[i] for i in chosen]
    assert grid.groups(*axes) == expected
    axes = data.draw(st.permutations(axes))
    for group in grid.groups(*axes):
        for rank in group:
            assert grid.group_of(rank, *axes) == group
            assert grid.rank(grid.coordinates(rank)) == rank
