"""Plan the cheapest way from one layout to another, on one mesh or between two. Pure arithmetic.

    n: ranks of the axis    a: alpha, the time to start    b: beta, the time per byte
    B: bytes of a rank's tensor, before or after the collective as noted

    all_gather      a + b · (n-1)/n · B + 0.1             B: the gathered tensor
    all_reduce      a + 2b · (n-1)/n · B + 0.01           B: the tensor
    reduce_scatter  a + b · (n-1)/n · B + 0.001           B: the tensor before
    all_to_all      a + b · (n-1)/n² · B · n/2 + 0.001    B: the tensor before, as large as after
    mix_gather      as all_gather, over all axes at once: the largest a, the smallest b

The small constants decide between collectives that cost the same otherwise. A step that does not
communicate costs nothing.

Each step changes the placement of one axis, by one collective along it or without communicating:

    all_gather      Shard → Replicate        all_reduce      Partial → Replicate
    all_to_all      Shard → Shard            reduce_scatter  Partial → Shard
    slice           Replicate → Shard        as_term         Replicate, Shard → Partial

`plan` searches all sequences of such steps (Dijkstra's algorithm), also over intermediate
arrangements that no layout describes: see `coordinator.layout.placement`.

A rank takes each part that it needs (of a `Partial` tensor: each term of the part) from one rank
that holds it: from itself if it can, else from one of the replicas, which take turns.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from coordinator.layout.placement import (
    Arrangement,
    Extent,
    Layout,
    Partial,
    Place,
    Placement,
    Replicate,
    Shard,
)
from device_comm import ReduceOp

DEFAULT_ALPHA = 20.0
"""Microseconds to start a collective, if nothing was measured."""

DEFAULT_BETA = 0.0005
"""Microseconds per byte, if nothing was measured: 2 GB/s."""

Axes = int | Sequence[int]
"""One axis of a mesh, or several, in ascending order, that are used as one."""


@dataclass(frozen=True, slots=True)
class MeshCosts:
    """The sizes of a mesh's axes, and the cost of communicating along each.

    Attributes:
        shape: the number of ranks on each axis, outermost first.
        alpha: for each axis, microseconds to start a collective.
        beta: for each axis, microseconds per byte.
    """

    shape: tuple[int, ...]
    alpha: tuple[float, ...]
    beta: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check the values."""
        if not len(self.shape) == len(self.alpha) == len(self.beta):
            raise ValueError(f"shape, alpha and beta have one entry for each axis; got {self}")
        if any(size < 1 for size in self.shape):
            raise ValueError(f"every axis has 1 rank or more; got {self.shape}")

    @classmethod
    def uniform(
        cls, shape: Sequence[int], alpha: float = DEFAULT_ALPHA, beta: float = DEFAULT_BETA
    ) -> MeshCosts:
        """The same costs along all axes."""
        return cls(tuple(shape), (alpha,) * len(shape), (beta,) * len(shape))

    def all_gather(self, size: float, axes: Axes = 0) -> float:
        """Microseconds of an all-gather whose result has ``size`` bytes."""
        n, alpha, beta = self._of(axes)
        return alpha + beta * (n - 1) / n * size + 0.1

    def all_reduce(self, size: float, axes: Axes = 0) -> float:
        """Microseconds of an all-reduce of a tensor of ``size`` bytes."""
        n, alpha, beta = self._of(axes)
        return alpha + beta * 2 * (n - 1) / n * size + 0.01

    def reduce_scatter(self, size: float, axes: Axes = 0) -> float:
        """Microseconds of a reduce-scatter whose input has ``size`` bytes."""
        n, alpha, beta = self._of(axes)
        return alpha + beta * (n - 1) / n * size + 0.001

    def all_to_all(self, size: float, axes: Axes = 0) -> float:
        """Microseconds of an all-to-all in which each rank has ``size`` bytes."""
        n, alpha, beta = self._of(axes)
        return alpha + beta * (n - 1) / n / n * size * (n / 2) + 0.001

    def mix_gather(self, size: float) -> float:
        """Microseconds of an all-gather over all axes at once whose result has ``size`` bytes."""
        return self.all_gather(size, range(len(self.shape)))

    def _of(self, axes: Axes) -> tuple[int, float, float]:
        """Ranks, alpha and beta of an axis, or of several that are used as one."""
        if isinstance(axes, int):
            return self.shape[axes], self.alpha[axes], self.beta[axes]
        return (
            math.prod(self.shape[axis] for axis in axes),
            max(self.alpha[axis] for axis in axes),
            min(self.beta[axis] for axis in axes),
        )


NEUTRAL = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.BOR: 0, ReduceOp.BXOR: 0}
"""The neutral elements of reductions. MIN, MAX, AVG and BAND need none: the reduction of equal
terms is the term itself."""


@dataclass(frozen=True, slots=True)
class Step:
    """A change of one axis's placement.

    Attributes:
        verb: one of the table above.
        axis: the mesh axis.
        before: the arrangement before the step.
        after: the arrangement after the step.
        cost: microseconds, by the cost model.
    """

    verb: str
    axis: int
    before: Arrangement
    after: Arrangement
    cost: float

    @property
    def source(self) -> Placement:
        """The axis's placement before the step."""
        return self.before.at(self.axis)

    @property
    def target(self) -> Placement:
        """The axis's placement after the step."""
        return self.after.at(self.axis)

    def __str__(self) -> str:
        change = f"{self.source} → {self.target}"
        return f"{self.verb:<14} axis {self.axis}  {change}  {self.cost:.3f} µs"


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps from one layout to another; ``print`` shows them with their costs.

    Attributes:
        shape: the whole tensor's shape.
        mesh: the number of ranks on each axis.
        source: the layout before.
        target: the layout after.
        steps: the steps, in order.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    source: Layout
    target: Layout
    steps: tuple[Step, ...]

    @property
    def cost(self) -> float:
        """Microseconds of all steps, by the cost model."""
        return sum(step.cost for step in self.steps)

    @property
    def head(self) -> str:
        """The first line of what is printed."""
        return f"{list(self.shape)} on a mesh of {list(self.mesh)}: {self.cost:.3f} µs"

    def __str__(self) -> str:
        return "\n".join([self.head, *(f"  {step}" for step in self.steps)])


def plan(
    source: Layout | Placement,
    target: Layout | Placement,
    shape: Sequence[int],
    costs: MeshCosts,
    itemsize: int = 4,
) -> Plan:
    """The cheapest steps from ``source`` to ``target``. Collective: no.

    Args:
        source: the layout before; a single placement is for a mesh of one axis.
        target: the layout after; likewise.
        shape: the whole tensor's shape.
        costs: the mesh's costs; must be the same on all ranks.
        itemsize: bytes of an element.

    Raises:
        ValueError: a layout does not fit the mesh or the shape, or has terms of different
            reductions.
    """
    return _plan(Layout.of(source), Layout.of(target), tuple(shape), costs, itemsize)


@lru_cache(maxsize=4096)
def _plan(
    source: Layout, target: Layout, shape: tuple[int, ...], costs: MeshCosts, itemsize: int
) -> Plan:
    start = Arrangement.of(source, len(shape), costs.shape)
    goal = Arrangement.of(target, len(shape), costs.shape)
    for each in (start, goal):
        each.largest(shape, costs.shape)
    search = _Search(shape, costs, itemsize, start, goal)
    return Plan(shape, costs.shape, source, target, search.run())


@dataclass(frozen=True)
class _Search:
    shape: tuple[int, ...]
    costs: MeshCosts
    itemsize: int
    start: Arrangement
    goal: Arrangement

    def run(self) -> tuple[Step, ...]:
        """Dijkstra's algorithm; of ways that cost the same, the one with fewer steps."""
        queue: list[tuple[float, int, int, Arrangement, tuple[Step, ...]]] = []
        heapq.heappush(queue, (0.0, 0, 0, self.start, ()))
        settled: set[Arrangement] = set()
        found = 0
        while queue:
            cost, length, _, here, steps = heapq.heappop(queue)
            if here == self.goal:
                return steps
            if here in settled:
                continue
            settled.add(here)
            for step in self._steps(here):
                if step.after not in settled:
                    found += 1
                    entry = (cost + step.cost, length + 1, found, step.after, (*steps, step))
                    heapq.heappush(queue, entry)
        raise ValueError(f"there is no way from {self.start} to {self.goal}")

    def _steps(self, here: Arrangement) -> Iterator[Step]:
        for axis, ranks in enumerate(self.costs.shape):
            placement = here.at(axis)
            if ranks == 1:
                continue
            if isinstance(placement, Shard) and not here.is_innermost(axis, placement.dim):
                continue
            bare = here.without(axis)
            for wanted in self._choices(axis, placement, here):
                after = bare.then(axis, wanted)
                verb = _verb(placement, wanted)
                if self._fits(after):
                    yield Step(verb, axis, here, after, self._cost(verb, axis, here, after))

    def _choices(self, axis: int, placement: Placement, here: Arrangement) -> Iterator[Placement]:
        """The placements that ``axis`` may change to."""
        goal = self.goal.at(axis)
        if not isinstance(placement, Replicate):
            yield Replicate()
        for dim in range(len(self.shape)):
            shards = [Shard(dim)]
            if isinstance(goal, Shard) and goal.dim == dim and goal != shards[0]:
                shards.append(goal)
            yield from (shard for shard in shards if shard != placement)
        if isinstance(goal, Partial) and not isinstance(placement, Partial):
            # Not while terms of the source are left to be reduced: that reduction would take in
            # the neutral elements that fill the new terms.
            waits = any(here.at(each) != self.goal.at(each) for each, _ in here.terms)
            if not waits and (isinstance(placement, Replicate) or goal.op in NEUTRAL):
                yield goal

    def _fits(self, arrangement: Arrangement) -> bool:
        try:
            arrangement.largest(self.shape, self.costs.shape)
        except ValueError:
            return False
        return True

    def _cost(self, verb: str, axis: int, before: Arrangement, after: Arrangement) -> float:
        if verb == "all_gather":
            return self.costs.all_gather(self._bytes(after), axis)
        if verb == "all_to_all":
            return self.costs.all_to_all(self._bytes(before), axis)
        if verb == "all_reduce":
            return self.costs.all_reduce(self._bytes(before), axis)
        if verb == "reduce_scatter":
            return self.costs.reduce_scatter(self._bytes(before), axis)
        return 0.0

    def _bytes(self, arrangement: Arrangement) -> int:
        return math.prod(arrangement.largest(self.shape, self.costs.shape)) * self.itemsize


def _verb(source: Placement, target: Placement) -> str:
    if isinstance(target, Partial):
        return "as_term"
    if isinstance(source, Partial):
        return "reduce_scatter" if isinstance(target, Shard) else "all_reduce"
    if isinstance(source, Shard):
        return "all_to_all" if isinstance(target, Shard) else "all_gather"
    return "slice"


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
