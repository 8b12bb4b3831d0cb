"""Describe how tensors are divided among the ranks of a mesh. Pure arithmetic.

A `Layout` has one `Placement` per mesh axis (a group), outermost first. Each placement divides the
part that the placements before it give to this rank:

    8 rows, Layout((Shard(0), Shard(0))) on axes of 2 and 2    5 rows on an axis of 4
    axis 0 → [0,4) [4,8)                                       Shard(0)              2 2 1 0
    axis 1 → [0,2) [2,4) | [4,6) [6,8)                         Shard(0, padded=True) 2 2 2 2

An uneven dimension is sharded as by `torch.chunk` and DTensor: every shard has ceil(size / ranks)
elements until none are left. A padded shard always has that many; elements beyond the tensor's end
are padding.

A `Layout` cuts in the order of its axes. An `Arrangement` may cut in another order, as between two
steps of a plan. Only the innermost cut of a dimension can be undone, and a new cut becomes the
innermost.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from device_comm import ReduceOp


class Axis(Protocol):
    """A mesh axis; a `GroupCoordinator` is one."""

    @property
    def rank_in_group(self) -> int:
        """Return this process's position on the axis, from 0."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks on the axis."""


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's position on an axis, without a group."""

    rank_in_group: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Extent:
    """One rank's part of one dimension: elements ``start`` to ``stop`` (exclusive).

    ``length`` is the size of the local tensor's dimension: ``stop - start`` and the padding.
    """

    start: int
    stop: int
    length: int

    @property
    def size(self) -> int:
        """Return the number of elements that the rank holds."""
        return self.stop - self.start

    @property
    def padding(self) -> int:
        """Return the number of padding elements at the end of the local dimension."""
        return self.length - self.size


class Placement(ABC):
    """The division of a tensor by one mesh axis."""

    @abstractmethod
    def split(self, extents: Sequence[Extent], axis: Axis) -> tuple[Extent, ...]:
        """Return this rank's part of ``extents``, which has one entry per dimension."""

    def normalized(self, ndim: int) -> Placement:  # noqa: ARG002
        """Return this placement with a non-negative dimension."""
        return self


@dataclass(frozen=True, slots=True)
class Replicate(Placement):
    """Every rank of the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "Replicate"

    def split(self, extents: Sequence[Extent], axis: Axis) -> tuple[Extent, ...]:  # noqa: ARG002
        """Return ``extents``."""
        return tuple(extents)


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Every rank of the axis holds a term; reducing all terms by ``op`` gives the tensor."""

    op: ReduceOp = ReduceOp.SUM

    def __str__(self) -> str:
        return f"Partial({self.op.name})"

    def split(self, extents: Sequence[Extent], axis: Axis) -> tuple[Extent, ...]:  # noqa: ARG002
        """Return ``extents``: a term has the shape of the whole tensor."""
        return tuple(extents)


@dataclass(frozen=True, slots=True)
class Shard(Placement):
    """The ranks of the axis hold consecutive parts of one dimension, in rank order.

    Attributes:
        dim: the sharded dimension; negative counts from the last.
        padded: pad every rank's part at its end to the size of the largest.
        sizes: the number of elements of each rank, in rank order; None: as even as possible.
    """

    dim: int = 0
    padded: bool = False
    sizes: tuple[int, ...] | None = None

    def __str__(self) -> str:
        sizes = "" if self.sizes is None else f", sizes={list(self.sizes)}"
        return f"Shard({self.dim}{', padded' if self.padded else ''}{sizes})"

    def split(self, extents: Sequence[Extent], axis: Axis) -> tuple[Extent, ...]:
        """Return this rank's consecutive part of dimension ``dim``.

        Raises ValueError if ``dim`` does not exist, or ``sizes`` fits neither it nor the axis.
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
        """Return the number of elements of each rank, without padding; their sum is ``length``.

        Raises ValueError if ``sizes`` has another sum, or not one entry per rank.
        """
        if self.sizes is None:
            chunk = -(-length // ranks)
            return tuple(min(chunk, max(length - rank * chunk, 0)) for rank in range(ranks))
        if len(self.sizes) != ranks or sum(self.sizes) != length or min(self.sizes) < 0:
            raise ValueError(f"{self} does not cut {length} elements into {ranks} parts")
        return self.sizes

    def normalized(self, ndim: int) -> Shard:
        """Return this placement with ``dim`` >= 0; raise ValueError if ``dim`` does not exist."""
        if not -ndim <= self.dim < ndim:
            raise ValueError(f"{self} needs dimension {self.dim}; the tensor has {ndim}")
        return self if self.dim >= 0 else replace(self, dim=self.dim % ndim)


@dataclass(frozen=True, slots=True)
class Layout:
    """The division of a tensor among ranks: one placement per mesh axis, outermost first."""

    placements: tuple[Placement, ...] = (Replicate(),)

    @classmethod
    def of(cls, layout: Layout | Placement) -> Layout:
        """Return ``layout``, or the layout of a single placement."""
        return layout if isinstance(layout, Layout) else cls((layout,))

    @property
    def has_terms(self) -> bool:
        """Return whether a placement is `Partial`."""
        return any(isinstance(placement, Partial) for placement in self.placements)

    def normalized(self, ndim: int) -> Layout:
        """Return this layout with non-negative dimensions: equivalent layouts then compare equal.

        Raises ValueError if the tensor lacks a dimension.
        """
        return Layout(tuple(placement.normalized(ndim) for placement in self.placements))

    def extents(self, shape: Sequence[int], axes: Sequence[Axis]) -> tuple[Extent, ...]:
        """Return this rank's part of each dimension of a tensor of ``shape``.

        Raises:
            ValueError: there is not one axis per placement, or a placement does not fit the shape.
        """
        if len(axes) != len(self.placements):
            raise ValueError(f"{self} is for {len(self.placements)} axes, not {len(axes)}")
        extents = tuple(Extent(0, size, size) for size in shape)
        for placement, axis in zip(self.placements, axes, strict=True):
            extents = placement.split(extents, axis)
        return extents

    def local_shape(self, shape: Sequence[int], axes: Sequence[Axis]) -> tuple[int, ...]:
        """Return the shape of this rank's part of a tensor of ``shape``, padding included."""
        return tuple(extent.length for extent in self.extents(shape, axes))


def convert_dim_partition_dict(
    dim_size: int, dim_partition_dict: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """Return a copy of the table with non-negative dimensions.

    ``dim_size`` is the number of dimensions. The table has the mesh axes that shard each dimension.

    Raises:
        ValueError: the tensor lacks a dimension, or two keys are the same dimension.
    """
    converted: dict[int, list[int]] = {}
    for dim, axes in dim_partition_dict.items():
        normalized = Shard(dim).normalized(dim_size).dim
        if normalized in converted:
            raise ValueError(f"dimension {normalized} occurs twice: {dict(dim_partition_dict)}")
        converted[normalized] = list(axes)
    return converted


def merge_same_dim_mesh_list(
    dim_size: int, dim_partition_dict: Mapping[int, Sequence[int]]
) -> dict[int, list[int]]:
    """Return the table with non-negative dimensions; merge keys of the same dimension.

    For a tensor of two dimensions ``{1: [0], -1: [1]}`` gives ``{1: [0, 1]}``, in the keys' order.

    Raises:
        ValueError: the tensor lacks a dimension, or an axis occurs twice.
    """
    merged: dict[int, list[int]] = {}
    for dim, axes in dim_partition_dict.items():
        merged.setdefault(Shard(dim).normalized(dim_size).dim, []).extend(axes)
    all_axes = [axis for axes in merged.values() for axis in axes]
    if len(set(all_axes)) != len(all_axes):
        raise ValueError(f"an axis cuts twice: {dict(dim_partition_dict)}")
    return merged


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The axes that cut a tensor, and the axes whose ranks hold terms of it.

    Attributes:
        cuts: (axis, its `Shard`), sorted by dimension; cuts of one dimension outermost first.
        terms: (axis, its `Partial`), sorted by axis.
    """

    cuts: tuple[tuple[int, Shard], ...] = ()
    terms: tuple[tuple[int, Partial], ...] = ()

    @classmethod
    def of(cls, layout: Layout, ndim: int, mesh: Sequence[int]) -> Arrangement:
        """Return the arrangement of a layout; ``mesh`` is the number of ranks on each axis.

        Axes of one rank are left out. Raises ValueError if there is not one axis per placement, the
        tensor lacks a dimension, or the layout has terms of different reductions.
        """
        if len(mesh) != len(layout.placements):
            raise ValueError(f"{layout} is for {len(layout.placements)} axes, not {len(mesh)}")
        arrangement = cls()
        for axis, placement in enumerate(layout.normalized(ndim).placements):
            if mesh[axis] > 1:
                arrangement = arrangement.then(axis, placement)
        if len({partial.op for _, partial in arrangement.terms}) > 1:
            raise ValueError(f"{layout} mixes reductions: their order would matter")
        return arrangement

    def at(self, axis: int) -> Placement:
        """Return the placement of ``axis``."""
        for other, placement in (*self.cuts, *self.terms):
            if other == axis:
                return placement
        return Replicate()

    def then(self, axis: int, placement: Placement) -> Arrangement:
        """Return this arrangement with ``placement``, as the innermost cut, on a free ``axis``."""
        if isinstance(placement, Shard):
            cuts = sorted((*self.cuts, (axis, placement)), key=lambda cut: cut[1].dim)
            return Arrangement(tuple(cuts), self.terms)
        if isinstance(placement, Partial):
            terms = sorted((*self.terms, (axis, placement)), key=lambda term: term[0])
            return Arrangement(self.cuts, tuple(terms))
        return self

    def without(self, axis: int) -> Arrangement:
        """Return this arrangement without the cut or the terms of ``axis``."""
        return Arrangement(
            tuple(cut for cut in self.cuts if cut[0] != axis),
            tuple(term for term in self.terms if term[0] != axis),
        )

    def is_innermost(self, axis: int, dim: int) -> bool:
        """Return whether ``axis`` is the innermost to cut dimension ``dim``."""
        return [each for each, shard in self.cuts if shard.dim == dim][-1] == axis

    def extents(
        self, shape: Sequence[int], mesh: Sequence[int], coordinates: Sequence[int]
    ) -> tuple[Extent, ...]:
        """Return the part of each dimension that the rank at ``coordinates`` holds."""
        extents = tuple(Extent(0, size, size) for size in shape)
        for axis, shard in self.cuts:
            extents = shard.split(extents, Place(coordinates[axis], mesh[axis]))
        return extents

    def largest(self, shape: Sequence[int], mesh: Sequence[int]) -> tuple[int, ...]:
        """Return the largest local size of each dimension on any rank.

        Raises ValueError if the explicit sizes of a cut do not fit on some rank.
        """
        lengths = [{size} for size in shape]
        for axis, shard in self.cuts:
            parts = [shard.cut(length, mesh[axis]) for length in lengths[shard.dim]]
            lengths[shard.dim] = {
                size for cut in parts for size in ([max(cut)] if shard.padded else cut)
            }
        return tuple(max(each) for each in lengths)
