"""Finds the cheapest steps from one layout to another on one mesh. Pure: all ranks find the same.

Each step changes the placement of one axis, by one collective along it or without communicating:

    all_gather      Shard → Replicate        all_reduce      Partial → Replicate
    all_to_all      Shard → Shard            reduce_scatter  Partial → Shard
    slice           Replicate → Shard        as_term         Replicate, Shard → Partial

`plan` searches all sequences of such steps (Dijkstra's algorithm), also over intermediate
arrangements that no layout describes: see `coordinator.layout.planning.arrangement`.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from coordinator.layout.placement import Layout, Partial, Placement, Replicate, Shard
from coordinator.layout.planning.arrangement import Arrangement
from device_comm import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from coordinator.layout.planning.costs import MeshCosts

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
