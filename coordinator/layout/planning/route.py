"""Decides which rank sends which part of a tensor to which, from one mesh to another. Pure.

A rank takes each part that it needs (of a `Partial` tensor: each term of the part) from one rank
that holds it: from itself if it can, else from one of the replicas, which take turns.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from coordinator.layout.placement import Layout, Partial, Place, Replicate, Shard
from coordinator.layout.planning.arrangement import Arrangement
from coordinator.layout.planning.plan import NEUTRAL

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from coordinator.layout.placement import Extent

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: (start, stop) of each dimension."""


@dataclass(frozen=True, slots=True)
class SubMesh:
    """Some ranks of a group, arranged as a mesh.

    Attributes:
        ranks: ranks in the group, in row-major order: the last axis varies fastest.
        shape: the number of ranks on each axis, outermost first; empty: one axis with all ranks.

    Raises:
        ValueError: the shape does not fit the number of ranks, or a rank occurs twice or is
            negative.
    """

    ranks: tuple[int, ...]
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Fill in the shape."""
        object.__setattr__(self, "ranks", tuple(self.ranks))
        object.__setattr__(self, "shape", tuple(self.shape) or (len(self.ranks),))
        if math.prod(self.shape) != len(self.ranks):
            raise ValueError(f"{len(self.ranks)} ranks do not make up a grid of {self.shape}")
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks, default=0) < 0:
            raise ValueError(f"every rank is there once; got {self.ranks}")

    def places(self, rank: int) -> tuple[Place, ...]:
        """The position of a rank of the group on each axis.

        Raises:
            ValueError: the rank is not in this mesh.
        """
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not in the mesh of ranks {list(self.ranks)}")
        index, found = self.ranks.index(rank), []
        for size in reversed(self.shape):
            index, position = divmod(index, size)
            found.append(Place(position, size))
        return tuple(reversed(found))


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor that one rank sends to another, or keeps.

    Attributes:
        source: the sender's rank in the group.
        target: the receiver's rank in the group.
        box: the part of the whole tensor.
    """

    source: int
    target: int
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """The piece's shape."""
        return tuple(stop - start for start, stop in self.box)

    def view(self, held: Sequence[Extent]) -> tuple[slice, ...]:
        """The piece's slices of a rank's local tensor; ``held`` is that rank's part."""
        return tuple(
            slice(start - extent.start, stop - extent.start)
            for (start, stop), extent in zip(self.box, held, strict=True)
        )


@lru_cache(maxsize=4096)
def route(
    shape: tuple[int, ...],
    source: Layout,
    source_mesh: SubMesh,
    target: Layout,
    target_mesh: SubMesh,
) -> tuple[Piece, ...]:
    """All pieces, the same on every rank; the terms of one part in the order of the source mesh.

    Args:
        shape: the whole tensor's shape.
        source: the layout on ``source_mesh``.
        source_mesh: the source mesh, as ranks of the group.
        target: the layout on ``target_mesh``.
        target_mesh: the target mesh, as ranks of the group; it may share ranks with the source.

    Raises:
        ValueError: a layout does not fit its mesh or the shape.
    """
    for layout, mesh in ((source, source_mesh), (target, target_mesh)):
        Arrangement.of(layout, len(shape), mesh.shape).largest(shape, mesh.shape)
    shards: dict[tuple[int, ...], dict[tuple[int, ...], list[int]]] = {}
    for rank in source_mesh.ranks:
        shard, term = _coordinates(source, source_mesh.places(rank))
        shards.setdefault(shard, {}).setdefault(term, []).append(rank)
    boxes = {
        shard: _box(shape, source, source_mesh, next(iter(terms.values()))[0])
        for shard, terms in shards.items()
    }
    pieces = []
    for turn, rank in enumerate(target_mesh.ranks):
        if not _keeps_values(target, target_mesh.places(rank)):
            continue
        wanted = _box(shape, target, target_mesh, rank)
        for shard, box in _overlapping(wanted, boxes):
            for holders in shards[shard].values():
                holder = rank if rank in holders else holders[turn % len(holders)]
                pieces.append(Piece(holder, rank, box))
    return tuple(pieces)


def _coordinates(
    layout: Layout, places: Sequence[Place]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A rank's coordinates on the axes that shard, and on those with terms."""
    shard, term = [], []
    for placement, place in zip(layout.placements, places, strict=True):
        if isinstance(placement, Shard):
            shard.append(place.rank_in_group)
        elif not isinstance(placement, Replicate):
            term.append(place.rank_in_group)
    return tuple(shard), tuple(term)


def _keeps_values(layout: Layout, places: Sequence[Place]) -> bool:
    """Whether a rank's term has the values, not the neutral element."""
    return all(
        place.rank_in_group == 0
        for placement, place in zip(layout.placements, places, strict=True)
        if isinstance(placement, Partial) and placement.op in NEUTRAL
    )


def _box(shape: Sequence[int], layout: Layout, mesh: SubMesh, rank: int) -> Box:
    extents = layout.extents(shape, mesh.places(rank))
    return tuple((extent.start, extent.stop) for extent in extents)


def _overlapping(
    wanted: Box, boxes: dict[tuple[int, ...], Box]
) -> Iterator[tuple[tuple[int, ...], Box]]:
    for shard, box in boxes.items():
        common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, box, strict=True))
        if all(low < high for low, high in common):
            yield shard, common


def by_box(pieces: Sequence[Piece]) -> Iterator[tuple[Box, list[int]]]:
    """Group the pieces that one rank receives by their part; gives indexes into ``pieces``.

    The pieces of one part are its terms.
    """
    numbered = sorted(range(len(pieces)), key=lambda number: pieces[number].box)
    for box, numbers in itertools.groupby(numbered, key=lambda number: pieces[number].box):
        yield box, sorted(numbers)
