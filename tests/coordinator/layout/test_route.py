"""Which piece goes where, by hand; `tests.fuzz` tries any layouts on any meshes."""

from __future__ import annotations

import pytest

from coordinator.layout import Layout, Partial, Replicate, Shard, SubMesh
from coordinator.layout.plan import Piece, by_box, route

R, S0, P = Layout((Replicate(),)), Layout((Shard(0),)), Layout((Partial(),))


def test_from_four_to_two() -> None:
    """Rank 0 keeps its own half of the new shard and takes the other from rank 1."""
    pieces = route((8,), S0, SubMesh((0, 1, 2, 3)), S0, SubMesh((0, 1)))
    assert pieces == (
        Piece(0, 0, ((0, 2),)),
        Piece(1, 0, ((2, 4),)),
        Piece(2, 1, ((4, 6),)),
        Piece(3, 1, ((6, 8),)),
    )


def test_from_two_to_four_uneven() -> None:
    pieces = route((5,), S0, SubMesh((0, 1)), S0, SubMesh((2, 3, 4, 5)))
    assert [(p.source, p.target, p.box) for p in pieces] == [
        (0, 2, ((0, 2),)),
        (0, 3, ((2, 3),)),
        (1, 3, ((3, 4),)),
        (1, 4, ((4, 5),)),
    ]


def test_replicas_take_turns_and_nothing_travels_to_whom_has_it() -> None:
    pieces = route((4,), R, SubMesh((0, 1)), R, SubMesh((1, 2, 3)))
    assert [(piece.source, piece.target) for piece in pieces] == [(1, 1), (1, 2), (0, 3)]


def test_every_term_travels() -> None:
    pieces = route((4,), P, SubMesh((0, 1)), S0, SubMesh((2, 3)))
    assert [(p.source, p.target, p.box) for p in pieces] == [
        (0, 2, ((0, 2),)),
        (1, 2, ((0, 2),)),
        (0, 3, ((2, 4),)),
        (1, 3, ((2, 4),)),
    ]
    assert [numbers for _, numbers in by_box(pieces)] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("ranks", "shape"), [((0, 0), ()), ((0, 1), (3,)), ((-1,), ()), ((0, 1, 2), (2, 2))]
)
def test_no_mesh(ranks: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rank"):
        SubMesh(ranks, shape)


def test_places() -> None:
    mesh = SubMesh((5, 6, 7, 8), (2, 2))
    assert [(place.rank_in_group, place.world_size) for place in mesh.places(7)] == [(1, 2), (0, 2)]
