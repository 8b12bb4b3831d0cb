"""Plan the cheapest steps from one layout to another, on one mesh or between two. Pure arithmetic.

    n: ranks of the axis    a: alpha, the time to start    b: beta, the time per byte
    B: bytes of a rank's tensor, before or after the collective as noted

    all_gather      a + b · (n-1)/n · B + 0.1             B: the gathered tensor
    all_reduce      a + 2b · (n-1)/n · B + 0.01           B: the tensor
    reduce_scatter  a + b · (n-1)/n · B + 0.001           B: the tensor before
    all_to_all      a + b · (n-1)/n² · B · n/2 + 0.001    B: the tensor before, as large as after
    mix_gather      as all_gather, over all axes at once: the largest a, the smallest b

The small constants order collectives of equal cost. A step without communication costs nothing.

Each step changes the placement of one axis, by one collective along it or without communication:

    all_gather      Shard → Replicate        all_reduce      Partial → Replicate
    all_to_all      Shard → Shard            reduce_scatter  Partial → Shard
    slice           Replicate → Shard        as_term         Replicate, Shard → Partial

`plan` searches all sequences of such steps (Dijkstra's algorithm), also over arrangements that no
layout describes: see `coordinator.layout.placement`.

Between two meshes, a rank receives each part (of a `Partial` tensor: each term of the part) from
one rank that holds it: from itself if possible, else from the replicas in turn.
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
"""Default microseconds to start a collective."""

DEFAULT_BETA = 0.0005
"""Default microseconds per byte: 2 GB/s."""

Axes = int | Sequence[int]
"""One axis of a mesh, or several in ascending order that form one."""


@dataclass(frozen=True, slots=True)
class MeshCosts:
    """The number of ranks on each axis of a mesh, outermost first, and the cost along each.

    ``alpha`` is microseconds to start a collective, ``beta`` microseconds per byte.
    """

    shape: tuple[int, ...]
    alpha: tuple[float, ...]
    beta: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.alpha) == len(self.beta):
            raise ValueError(f"shape, alpha and beta have one entry for each axis; got {self}")
        if any(size < 1 for size in self.shape):
            raise ValueError(f"every axis has 1 rank or more; got {self.shape}")

    @classmethod
    def uniform(
        cls, shape: Sequence[int], alpha: float = DEFAULT_ALPHA, beta: float = DEFAULT_BETA
    ) -> MeshCosts:
        """Return equal costs along all axes."""
        return cls(tuple(shape), (alpha,) * len(shape), (beta,) * len(shape))

    def all_gather(self, size: float, axes: Axes = 0) -> float:
        """Return microseconds of an all-gather whose result has ``size`` bytes."""
        n, alpha, beta = self._of(axes)
        return alpha + beta * (n - 1) / n * size + 0.1

    def all_reduce(self, size: float, axes: Axes = 0) -> float:
        """Return microseconds of an all-reduce of ``size`` bytes."""
        n, alpha, beta = self._of(axes)
        return alpha + beta * 2 * (n - 1) / n * size + 0.01

    def reduce_scatter(self, size: float, axes: Axes = 0) -> float:
        """Return microseconds of a reduce-scatter whose input has ``size`` bytes."""
        n, alpha, beta = self._of(axes)
        return alpha + beta * (n - 1) / n * size + 0.001

    def all_to_all(self, size: float, axes: Axes = 0) -> float:
        """Return microseconds of an all-to-all with ``size`` bytes on each rank."""
        n, alpha, beta = self._of(axes)
        return alpha + beta * (n - 1) / n / n * size * (n / 2) + 0.001

    def mix_gather(self, size: float) -> float:
        """Return microseconds of an all-gather over all axes; its result has ``size`` bytes."""
        return self.all_gather(size, range(len(self.shape)))

    def _of(self, axes: Axes) -> tuple[int, float, float]:
        if isinstance(axes, int):
            return self.shape[axes], self.alpha[axes], self.beta[axes]
        return (
            math.prod(self.shape[axis] for axis in axes),
            max(self.alpha[axis] for axis in axes),
            min(self.beta[axis] for axis in axes),
        )


NEUTRAL = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.BOR: 0, ReduceOp.BXOR: 0}
"""The neutral elements of reductions. MIN, MAX, AVG and BAND need none: reducing equal terms gives
the term."""


@dataclass(frozen=True, slots=True)
class Step:
    """A change of one axis's placement; ``cost`` is in microseconds, by the cost model."""

    verb: str
    axis: int
    before: Arrangement
    after: Arrangement
    cost: float

    @property
    def source(self) -> Placement:
        """Return the axis's placement before the step."""
        return self.before.at(self.axis)

    @property
    def target(self) -> Placement:
        """Return the axis's placement after the step."""
        return self.after.at(self.axis)

    def __str__(self) -> str:
        change = f"{self.source} → {self.target}"
        return f"{self.verb:<14} axis {self.axis}  {change}  {self.cost:.3f} µs"


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps from one layout to another, in order; ``print`` shows them with their costs.

    ``shape`` is the whole tensor's; ``mesh`` has the number of ranks on each axis.
    """

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    source: Layout
    target: Layout
    steps: tuple[Step, ...]

    @property
    def cost(self) -> float:
        """Return microseconds of all steps, by the cost model."""
        return sum(step.cost for step in self.steps)

    @property
    def head(self) -> str:
        """Return the first line that ``print`` shows."""
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
    """Return the cheapest steps from ``source`` to ``target``, of a tensor of ``shape``.

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
        """Run Dijkstra's algorithm; of equal costs, fewer steps win."""
        queue: list[tuple[float, int, int, Arrangement, tuple[Step, ...]]] = []
        heapq.heappush(queue, (0.0, 0, 0, self.start, ()))
        settled: set[Arrangement] = set()
        pushed = 0
        while queue:
            cost, length, _, current, steps = heapq.heappop(queue)
            if current == self.goal:
                return steps
            if current in settled:
                continue
            settled.add(current)
            for step in self._steps(current):
                if step.after not in settled:
                    pushed += 1
                    entry = (cost + step.cost, length + 1, pushed, step.after, (*steps, step))
                    heapq.heappush(queue, entry)
        raise ValueError(f"no sequence of steps leads from {self.start} to {self.goal}")

    def _steps(self, current: Arrangement) -> Iterator[Step]:
        for axis, ranks in enumerate(self.costs.shape):
            placement = current.at(axis)
            if ranks == 1:
                continue
            if isinstance(placement, Shard) and not current.is_innermost(axis, placement.dim):
                continue
            without = current.without(axis)
            for target in self._choices(axis, placement, current):
                after = without.then(axis, target)
                verb = _verb(placement, target)
                if self._fits(after):
                    yield Step(verb, axis, current, after, self._cost(verb, axis, current, after))

    def _choices(
        self, axis: int, placement: Placement, current: Arrangement
    ) -> Iterator[Placement]:
        goal = self.goal.at(axis)
        if not isinstance(placement, Replicate):
            yield Replicate()
        for dim in range(len(self.shape)):
            shards = [Shard(dim)]
            if isinstance(goal, Shard) and goal.dim == dim and goal != shards[0]:
                shards.append(goal)
            yield from (shard for shard in shards if shard != placement)
        if isinstance(goal, Partial) and not isinstance(placement, Partial):
            # Terms of the source must be reduced first: reducing them later would include the
            # neutral elements that fill the new terms.
            is_blocked = any(current.at(other) != self.goal.at(other) for other, _ in current.terms)
            if not is_blocked and (isinstance(placement, Replicate) or goal.op in NEUTRAL):
                yield goal

    def _fits(self, arrangement: Arrangement) -> bool:
        try:
            arrangement.largest(self.shape, self.costs.shape)
        except ValueError:
            return False
        return True

    def _cost(self, verb: str, axis: int, before: Arrangement, after: Arrangement) -> float:
        if verb in ("slice", "as_term"):
            return 0.0
        arrangement = after if verb == "all_gather" else before
        size = math.prod(arrangement.largest(self.shape, self.costs.shape)) * self.itemsize
        cost: float = getattr(self.costs, verb)(size, axis)
        return cost


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
        ValueError: the shape does not fit the ranks, or a rank occurs twice or is negative.
    """

    ranks: tuple[int, ...]
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(self.ranks))
        object.__setattr__(self, "shape", tuple(self.shape) or (len(self.ranks),))
        if math.prod(self.shape) != len(self.ranks):
            raise ValueError(f"{len(self.ranks)} ranks cannot form a mesh of {self.shape}")
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks, default=0) < 0:
            raise ValueError(f"each rank must be 0 or more and occur once; got {self.ranks}")

    def places(self, rank: int) -> tuple[Place, ...]:
        """Return the position of a rank on each axis; raise ValueError if the mesh lacks it."""
        if rank not in self.ranks:
            raise ValueError(f"rank {rank} is not in the mesh of ranks {list(self.ranks)}")
        index, places = self.ranks.index(rank), []
        for size in reversed(self.shape):
            index, position = divmod(index, size)
            places.append(Place(position, size))
        return tuple(reversed(places))


@dataclass(frozen=True, slots=True)
class Piece:
    """A part (``box``) of the whole tensor that one rank of a group sends to another, or keeps."""

    source: int
    target: int
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the piece's shape."""
        return tuple(stop - start for start, stop in self.box)

    def view(self, held: Sequence[Extent]) -> tuple[slice, ...]:
        """Return the piece's slices of the local tensor of a rank that holds ``held``."""
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
    """Return all pieces, the same on every rank; terms of one part in the source mesh's order.

    The meshes may share ranks. Raises ValueError if a layout does not fit its mesh or the shape.
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
    """Return a rank's coordinates on the axes that shard, and on the axes with terms."""
    shard, term = [], []
    for placement, place in zip(layout.placements, places, strict=True):
        if isinstance(placement, Shard):
            shard.append(place.rank_in_group)
        elif not isinstance(placement, Replicate):
            term.append(place.rank_in_group)
    return tuple(shard), tuple(term)


def _keeps_values(layout: Layout, places: Sequence[Place]) -> bool:
    """Return whether a rank's term has the values, not the neutral element."""
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
    """Group the pieces that one rank receives by part; yield indexes of each part's terms."""
    numbered = sorted(range(len(pieces)), key=lambda number: pieces[number].box)
    for box, numbers in itertools.groupby(numbered, key=lambda number: pieces[number].box):
        yield box, sorted(numbers)
