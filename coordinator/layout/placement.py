"""Describe how tensors are divided over the ranks of a mesh. Pure arithmetic.

A `Layout` has one `Placement` for each mesh axis (a group), outermost first. A placement divides
what the axes before it have left to this rank:

    8 rows, Layout((Shard(0), Shard(0))) on axes of 2 and 2    5 rows on an axis of 4
    axis 0 → [0,4) [4,8)                                       Shard(0)              2 2 1 0
    axis 1 → [0,2) [2,4) | [4,6) [6,8)                         Shard(0, padded=True) 2 2 2 2

A dimension that does not divide evenly is sharded as `torch.chunk` and DTensor do it: every shard
has ceil(size / ranks) elements until none are left. A padded shard always has that many; those
beyond the tensor's end are padding.

A `Layout` cuts in the order of its axes. On the way from one layout to another there are
arrangements that no layout describes: a dimension that axis 1 cuts first and axis 0 second, for
example. Only the innermost cut of a dimension can be undone, and a new cut becomes the innermost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from device_comm import ReduceOp


class Axis(Protocol):
    """What a layout needs to know of a mesh axis; a `GroupCoordinator` has it."""

    @property
    def rank_in_group(self) -> int:
        """This process's position on the axis, from 0."""

    @property
    def world_size(self) -> int:
        """The number of ranks on the axis."""


@dataclass(frozen=True, slots=True)
class Place:
    """Some rank's position on an axis, as an `Axis` without a group."""

    rank_in_group: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Extent:
    """A rank's part of one dimension.

    Attributes:
        start: the first element that the rank holds.
        stop: one past the last element that the rank holds.
        length: the size of the local tensor's dimension: ``stop - start`` and the padding.
    """

    start: int
    stop: int
    length: int

    @property
    def size(self) -> int:
        """How many elements of the tensor's dimension the rank holds."""
        return self.stop - self.start

    @property
    def padding(self) -> int:
        """How many elements at the end of the local dimension are padding."""
        return self.length - self.size


class Placement(ABC):
    """How one mesh axis divides a tensor."""

    @abstractmethod
    def split(self, extents: Sequence[Extent], axis: Axis) -> tuple[Extent, ...]:
        """The part of ``extents`` (one per dimension) that belongs to this rank of ``axis``."""

    def normalized(self, ndim: int) -> Placement:  # noqa: ARG002
        """The same placement with a non-negative dimension, for a tensor of ``ndim`` dimensions."""
        return self


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank of the axis holds the whole."""

    def __str__(self) -> str:
        return "Replicate"

    def split(self, extents: Sequence[Extent], axis: Axis) -> tuple[Extent, ...]:  # noqa: ARG002
        """``extents`` unchanged."""
        return tuple(extents)


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Every rank of the axis holds a term; the tensor is the reduction of all terms.

    Attributes:
        op: the reduction.
    """

    op: ReduceOp = ReduceOp.SUM

    def __str__(self) -> str:
        return f"Partial({self.op.name})"

    def split(self, extents: Sequence[Extent], axis: Axis) -> tuple[Extent, ...]:  # noqa: ARG002
        """``extents`` unchanged: a term has the shape of the whole."""
        return tuple(extents)


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """The ranks of the axis hold consecutive parts of one dimension, in rank order.

    Attributes:
        dim: the dimension that is divided; negative counts from the last.
        padded: whether every rank's part has the size of the largest, with padding at its end.
        sizes: how many elements each rank holds, in rank order; ``None``: as even as possible.
    """

    dim: int = 0
    padded: bool = False
    sizes: tuple[int, ...] | None = None

    def __str__(self) -> str:
        sizes = "" if self.sizes is None else f", sizes={list(self.sizes)}"
        return f"Shard({self.dim}{', padded' if self.padded else ''}{sizes})"

    def split(self, extents: Sequence[Extent], axis: Axis) -> tuple[Extent, ...]:
        """This rank's consecutive part of dimension ``dim``.

        Raises:
            ValueError: there is no such dimension, or ``sizes`` fits neither it nor the axis.
        """
        dim = self.normalized(len(extents)).dim
        whole = extents[dim]
        sizes = self.cut(whole.length, axis.world_size)
        begin = whole.start + sum(sizes[: axis.rank_in_group])
        size = sizes[axis.rank_in_group]
        part = Extent(
            start=min(begin, whole.stop),
            stop=min(begin + size, whole.stop),
            length=max(sizes) if self.padded else size,
        )
        return (*extents[:dim], part, *extents[dim + 1 :])

    def cut(self, length: int, ranks: int) -> tuple[int, ...]:
        """How many of ``length`` elements each of ``ranks`` ranks holds, without padding.

        Raises:
            ValueError: ``sizes`` has another sum than ``length``, or not one entry for each rank.
        """
        if self.sizes is None:
            chunk = -(-length // ranks)
            return tuple(min(chunk, max(length - rank * chunk, 0)) for rank in range(ranks))
        if len(self.sizes) != ranks or sum(self.sizes) != length or min(self.sizes) < 0:
            raise ValueError(f"{self} does not cut {length} elements into {ranks} parts")
        return self.sizes

    def normalized(self, ndim: int) -> Shard:
        """With a non-negative ``dim``: for two dimensions, -1 becomes 1.

        Raises:
            ValueError: there is no such dimension.
        """
        if not -ndim <= self.dim < ndim:
            raise ValueError(f"{self} needs dimension {self.dim}; the tensor has {ndim}")
        return self if self.dim >= 0 else replace(self, dim=self.dim % ndim)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor is divided among the ranks of a mesh.

    Attributes:
        placements: one placement per mesh axis, outermost first.
    """

    placements: tuple[Placement, ...] = (Replicate(),)

    @classmethod
    def of(cls, layout: Layout | Placement) -> Layout:
        """``layout`` itself, or the layout with one placement if it is a placement."""
        return layout if isinstance(layout, Layout) else cls((layout,))

    @property
    def has_terms(self) -> bool:
        """Whether a placement is `Partial`."""
        return any(isinstance(placement, Partial) for placement in self.placements)

    def normalized(self, ndim: int) -> Layout:
        """With non-negative dimensions everywhere, so that equivalent layouts compare equal.

        Raises:
            ValueError: there is no such dimension.
        """
        return Layout(tuple(placement.normalized(ndim) for placement in self.placements))

    def extents(self, shape: Sequence[int], axes: Sequence[Axis]) -> tuple[Extent, ...]:
        """This rank's part of every dimension of a tensor of ``shape``. Collective: no.

        Raises:
            ValueError: there are more or fewer axes than placements, or a placement does not fit
                the shape.
        """
        if len(axes) != len(self.placements):
            raise ValueError(f"{self} is for {len(self.placements)} axes, not {len(axes)}")
        extents = tuple(Extent(0, size, size) for size in shape)
        for placement, axis in zip(self.placements, axes, strict=True):
            extents = placement.split(extents, axis)
        return extents

    def local_shape(self, shape: Sequence[int], axes: Sequence[Axis]) -> tuple[int, ...]:
        """The shape of this rank's part of a tensor of ``shape``, padding included."""
        return tuple(extent.length for extent in self.extents(shape, axes))


def convert_dim_partition_dict(
    dim_size: int, dim_partition_dict: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """A copy of the table with non-negative dimensions.

    Args:
        dim_size: the tensor's number of dimensions.
        dim_partition_dict: for each dimension, which may be negative, the mesh axes that shard it.

    Raises:
        ValueError: the tensor has no such dimension, or two keys are the same dimension: see
            `merge_same_dim_mesh_list`.
    """
    converted: dict[int, list[int]] = {}
    for dim, axes in dim_partition_dict.items():
        found = Shard(dim).normalized(dim_size).dim
        if found in converted:
            raise ValueError(f"dimension {found} is there twice: {dict(dim_partition_dict)}")
        converted[found] = list(axes)
    return converted


def merge_same_dim_mesh_list(
    dim_size: int, dim_partition_dict: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """As `convert_dim_partition_dict`, but keys that are the same dimension are merged.

    For a tensor of two dimensions ``{1: [0], -1: [1]}`` gives ``{1: [0, 1]}``. The axes are in the
    order of the keys.

    Raises:
        ValueError: the tensor has no such dimension, or an axis occurs twice.
    """
    merged: dict[int, list[int]] = {}
    for dim, axes in dim_partition_dict.items():
        merged.setdefault(Shard(dim).normalized(dim_size).dim, []).extend(axes)
    every = [axis for axes in merged.values() for axis in axes]
    if len(set(every)) != len(every):
        raise ValueError(f"an axis cuts twice: {dict(dim_partition_dict)}")
    return merged


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
