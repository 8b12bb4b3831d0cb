"""The plans of each verb: what a shared-memory backend carries out for an operation."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, assert_never

from device_comm.shm.collectives.slot_plan import SlotPlanner
from device_comm.shm.signature import signature_of
from device_comm.span import Span
from shm_broadcast.errors import DivergenceError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from device_comm.operation import Operation
    from device_comm.shm.collectives.slot_plan import SlotPlan


_WORD: Final = 8
"""Bytes of a size that ranks tell each other."""


class Plans:
    """Makes the plans of one rank's collectives.

    Where every rank's share has its own size, the ranks first tell each other the sizes, so that
    they notice if these do not match before they touch each other's data.
    """

    def __init__(self, rank: int, world_size: int, whole_bytes: int) -> None:
        """For a rank; all-reduces of up to ``whole_bytes`` are one step."""
        self._planner = SlotPlanner(rank, world_size)
        self._rank = rank
        self._n = world_size
        self._whole_bytes = whole_bytes

    def of(self, operation: Operation) -> Iterator[SlotPlan]:
        """What to carry out, one after the other; the next is asked for when the last is done."""
        planner, source, output = self._planner, operation.source, operation.output
        signature, op, root = signature_of(operation), operation.op, operation.peer
        match operation.verb:
            case "all_reduce":
                plan = planner.all_reduce(signature, output, source, op, self._whole_bytes)
            case "all_gather":
                sizes = operation.output_parts(self._n)
                plan = planner.all_gather(signature, output, source, sizes)
            case "all_gatherv":
                sizes = operation.output_parts(self._n)
                plan = planner.all_gather(signature, output, source, sizes)
                return self._agreed(operation.verb, signature, sizes, plan)
            case "reduce_scatter":
                sizes = operation.source_parts(self._n)
                plan = planner.reduce_scatter(signature, output, source, sizes, op)
            case "reduce_scatterv":
                sizes = operation.source_parts(self._n)
                plan = planner.reduce_scatter(signature, output, source, sizes, op)
                return self._agreed(operation.verb, signature, sizes, plan)
            case "broadcast":
                plan = planner.broadcast(signature, operation.buffer, root)
            case "reduce":
                plan = planner.reduce(signature, output, source, root, op)
            case "gather":
                plan = planner.gather(signature, output, source, root)
            case "scatter":
                plan = planner.scatter(signature, output, source, root)
            case "all_to_all" if operation.source_sizes is not None:
                return self._all_to_all(signature, operation)
            case "all_to_all":
                takes, gives = operation.output_parts(self._n), operation.source_parts(self._n)
                plan = planner.all_to_all(signature, output, source, takes, gives, gives[0])
            case "barrier":
                plan = planner.barrier(signature)
            case "send" | "recv":
                raise ValueError(f"{operation.name}: messages have no plans")
            case _:
                assert_never(operation.verb)
        return iter((plan,))

    def _agreed(
        self, verb: str, signature: bytes, sizes: Sequence[int], plan: SlotPlan
    ) -> Generator[SlotPlan, None, None]:
        """``plan``, once all ranks have told the same sizes."""
        table = yield from self._swap(signature, sizes)
        for rank, row in enumerate(table):
            if row != list(sizes):
                raise DivergenceError(rank, f"{verb} of {list(sizes)}", f"{verb} of {row}")
        yield plan

    def _all_to_all(
        self, signature: bytes, operation: Operation
    ) -> Generator[SlotPlan, None, None]:
        """Plans that give each rank its part of every rank's source."""
        takes, gives = operation.output_parts(self._n), operation.source_parts(self._n)
        table = yield from self._swap(signature, gives)
        for rank, row in enumerate(table):
            if row[self._rank] != takes[rank]:
                raise DivergenceError(
                    rank,
                    f"all_to_all that takes {takes[rank]} elements from it",
                    f"all_to_all that gives {row[self._rank]} elements to rank {self._rank}",
                )
        longest = max(max(row) for row in table)
        output, source = operation.output, operation.source
        yield self._planner.all_to_all(signature, output, source, takes, gives, longest)

    def _swap(
        self, signature: bytes, sizes: Sequence[int]
    ) -> Generator[SlotPlan, None, list[list[int]]]:
        """Plans after which this rank knows every rank's sizes, which are returned by rank."""
        mine, table = array("Q", sizes), array("Q", bytes(_WORD * self._n * self._n))
        yield self._planner.table(signature, _span_of(mine), _span_of(table))
        numbers = table.tolist()
        return [numbers[r * self._n : (r + 1) * self._n] for r in range(self._n)]


def _span_of(numbers: array[int]) -> Span:
    address, count = numbers.buffer_info()
    return Span(address, count * _WORD)
