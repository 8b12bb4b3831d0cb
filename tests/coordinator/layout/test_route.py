"""Which piece goes where: by hand, and that every rank gets every element it needs, once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import ReduceOp
from coordinator.layout import Layout, Partial, Replicate, Shard, SubMesh
from coordinator.layout.moving.transfer import Transfer
from coordinator.layout.planning.route import Piece, by_box, route
from tests.coordinator.layout.by_hand import hold, layouts, of_gradient, shapes, share
from tests.coordinator.layout.thread_groups import ThreadGroup, on_mesh

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


@st.composite
def sub_meshes(draw: st.DrawFn, size: int) -> SubMesh:
    shape = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 1, 2)]))
    ranks = draw(st.permutations(range(size)))
    return SubMesh(tuple(ranks[: math.prod(shape)]), shape)


SIZE = 5
linear = (ReduceOp.SUM, ReduceOp.AVG)
every = (*linear, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT)


@given(st.data())
@settings(deadline=None, max_examples=200)
def test_any_layout_on_any_mesh_to_any_other(data: st.DataObject) -> None:
    """Values, and gradients where there are any: that of the whole is W, on both sides."""
    shape = data.draw(shapes())
    source_mesh, target_mesh = data.draw(sub_meshes(SIZE)), data.draw(sub_meshes(SIZE))
    ops = data.draw(st.sampled_from([linear, every]))
    source = data.draw(layouts(shape, source_mesh.shape, ops)).normalized(len(shape))
    target = data.draw(layouts(shape, target_mesh.shape, ops)).normalized(len(shape))
    x = torch.arange(1.0, math.prod(shape) + 1, dtype=torch.float64).reshape(shape)
    w = x * 3 + 1
    backward = ops is linear

    def body(axes: list[ThreadGroup], flat: ThreadGroup) -> None:
        rank = flat.rank_in_group
        has, gets = rank in source_mesh.ranks, rank in target_mesh.ranks
        move = Transfer(shape, source, source_mesh, target, target_mesh, flat)
        held = None
        if has:
            held = hold(x, source, source_mesh.places(rank)).requires_grad_(backward)
        found = move(move.prepare(held, x.dtype, backward))
        kept = (
            [extent.size for extent in target.extents(shape, target_mesh.places(rank))]
            if gets
            else [0]
        )
        assert list(found.shape) == kept
        back = Transfer(shape, target, target_mesh, R, SubMesh((0,)), flat)(found.detach())
        if rank == 0:
            torch.testing.assert_close(back, x)
        if not backward:
            return
        upstream = found.new_zeros(0)
        if gets:
            upstream = hold(w, of_gradient(target), target_mesh.places(rank))
            upstream = upstream[tuple(slice(size) for size in kept)] * share(
                target, target_mesh.shape
            )
        torch.autograd.backward(found, upstream)
        if has:
            assert held is not None
            expected = hold(w, of_gradient(source), source_mesh.places(rank))
            torch.testing.assert_close(held.grad, expected * share(source, source_mesh.shape))

    on_mesh((SIZE,), body)
