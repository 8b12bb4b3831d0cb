"""A layout on its way to another: which axes cut which dimensions, in which order.

A `Layout` cuts in the order of its axes. Between two layouts there are arrangements that no
layout describes, such as a dimension that axis 1 cuts first and axis 0 second. Only the
innermost cut of a dimension can be undone, and a new cut becomes the innermost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.layout.placement import (
    Extent,
    Partial,
    Place,
    Placement,
    Replicate,
    Shard,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from coordinator.layout.placement import Layout


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Which axes cut a tensor, and along which ones its terms lie.

    Attributes:
        cuts: (axis, how it cuts), by dimension; those of one dimension outermost first.
        terms: (axis, the reduction), by axis.
    """

    cuts: tuple[tuple[int, Shard], ...] = ()
    terms: tuple[tuple[int, Partial], ...] = ()

    @classmethod
    def of(cls, layout: Layout, ndim: int, mesh: Sequence[int]) -> Arrangement:
        """That of a layout of a tensor with ``ndim`` dimensions, on axes of these sizes.

        Axes of one rank do nothing, and are left out.

        Raises:
            ValueError: the axes are not as many as the placements, a dimension is not there,
                or terms are to be reduced in different ways.
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
        """What ``axis`` does."""
        for each, placement in (*self.cuts, *self.terms):
            if each == axis:
                return placement
        return Replicate()

    def then(self, axis: int, placement: Placement) -> Arrangement:
        """With ``placement`` on ``axis``, which does nothing yet: an innermost cut."""
        if isinstance(placement, Shard):
            cuts = sorted((*self.cuts, (axis, placement)), key=lambda cut: cut[1].dim)
            return Arrangement(tuple(cuts), self.terms)
        if isinstance(placement, Partial):
            return Arrangement(
                self.cuts, tuple(sorted((*self.terms, (axis, placement)), key=_axis))
            )
        return self

    def without(self, axis: int) -> Arrangement:
        """With ``axis`` doing nothing."""
        return Arrangement(
            tuple(cut for cut in self.cuts if cut[0] != axis),
            tuple(term for term in self.terms if term[0] != axis),
        )

    def is_innermost(self, axis: int, dim: int) -> bool:
        """Whether no other axis cuts what ``axis`` leaves of dimension ``dim``."""
        return [each for each, shard in self.cuts if shard.dim == dim][-1] == axis

    def extents(
        self, shape: Sequence[int], mesh: Sequence[int], coordinates: Sequence[int]
    ) -> tuple[Extent, ...]:
        """What the rank at ``coordinates`` holds of each dimension of a tensor of ``shape``."""
        extents = tuple(Extent(0, size, size) for size in shape)
        for axis, shard in self.cuts:
            extents = shard.split(extents, Place(coordinates[axis], mesh[axis]))
        return extents

    def largest(self, shape: Sequence[int], mesh: Sequence[int]) -> tuple[int, ...]:
        """The largest local shape of any rank.

        Raises:
            ValueError: sizes that are given do not fit what some rank has to cut.
        """
        lengths = [{size} for size in shape]
        for axis, shard in self.cuts:
            parts = [shard.cut(length, mesh[axis]) for length in lengths[shard.dim]]
            lengths[shard.dim] = {
                size for cut in parts for size in ([max(cut)] if shard.padded else cut)
            }
        return tuple(max(each) for each in lengths)


def _axis(term: tuple[int, Partial]) -> int:
    return term[0]
