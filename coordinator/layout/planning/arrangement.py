"""A generalised layout: which mesh axes divide ("cut") which dimensions, in any order.

A `Layout` cuts in the order of its axes. On the way from one layout to another there are
arrangements that no layout describes: a dimension that axis 1 cuts first and axis 0 second, for
example. Only the innermost cut of a dimension can be undone, and a new cut becomes the innermost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.layout.placement import Extent, Partial, Place, Placement, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.layout.placement import Layout


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Which axes cut a tensor, and on which axes the ranks hold terms of it.

    Attributes:
        cuts: (axis, its `Shard`), sorted by dimension; those of one dimension outermost first.
        terms: (axis, its `Partial`), sorted by axis.
    """

    cuts: tuple[tuple[int, Shard], ...] = ()
    terms: tuple[tuple[int, Partial], ...] = ()

    @classmethod
    def of(cls, layout: Layout, ndim: int, mesh: Sequence[int]) -> Arrangement:
        """The arrangement of a layout.

        Args:
            layout: the layout.
            ndim: the tensor's number of dimensions.
            mesh: the number of ranks on each axis. Axes of one rank are left out.

        Raises:
            ValueError: there are more or fewer axes than placements, the tensor has no such
                dimension, or the layout has terms of different reductions.
        """
        if len(mesh) != len(layout.placements):
            raise ValueError(f"{layout} is for {len(layout.placements)} axes, not {len(mesh)}")
        found = cls()
        for axis, placement in enumerate(layout.normalized(ndim).placements):
            if mesh[axis] > 1:
                found = found.then(axis, placement)
        if len({partial.op for _, partial in found.terms}) > 1:
            raise ValueError(f"{layout} mixes reductions: their order would matter")
        return found

    def at(self, axis: int) -> Placement:
        """The placement of ``axis``."""
        for each, placement in (*self.cuts, *self.terms):
            if each == axis:
                return placement
        return Replicate()

    def then(self, axis: int, placement: Placement) -> Arrangement:
        """With ``placement`` added on ``axis``, which has none yet; a cut becomes the innermost."""
        if isinstance(placement, Shard):
            cuts = sorted((*self.cuts, (axis, placement)), key=lambda cut: cut[1].dim)
            return Arrangement(tuple(cuts), self.terms)
        if isinstance(placement, Partial):
            terms = sorted((*self.terms, (axis, placement)), key=lambda term: term[0])
            return Arrangement(self.cuts, tuple(terms))
        return self

    def without(self, axis: int) -> Arrangement:
        """Without the cut or the terms of ``axis``."""
        return Arrangement(
            tuple(cut for cut in self.cuts if cut[0] != axis),
            tuple(term for term in self.terms if term[0] != axis),
        )

    def is_innermost(self, axis: int, dim: int) -> bool:
        """Whether the cut by ``axis`` is the innermost one of dimension ``dim``."""
        return [each for each, shard in self.cuts if shard.dim == dim][-1] == axis

    def extents(
        self, shape: Sequence[int], mesh: Sequence[int], coordinates: Sequence[int]
    ) -> tuple[Extent, ...]:
        """The part of a tensor of ``shape`` that the rank at ``coordinates`` has, by dimension."""
        extents = tuple(Extent(0, size, size) for size in shape)
        for axis, shard in self.cuts:
            extents = shard.split(extents, Place(coordinates[axis], mesh[axis]))
        return extents

    def largest(self, shape: Sequence[int], mesh: Sequence[int]) -> tuple[int, ...]:
        """The largest local size of each dimension on any rank.

        Raises:
            ValueError: the explicit sizes of a cut do not fit on some rank.
        """
        lengths = [{size} for size in shape]
        for axis, shard in self.cuts:
            parts = [shard.cut(length, mesh[axis]) for length in lengths[shard.dim]]
            lengths[shard.dim] = {
                size for cut in parts for size in ([max(cut)] if shard.padded else cut)
            }
        return tuple(max(each) for each in lengths)
