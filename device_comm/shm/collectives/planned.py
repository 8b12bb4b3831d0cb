"""The plans of each verb: what a shared-memory backend carries out for an operation."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from device_comm.shm.collectives.slot_plan import SlotPlanner
from device_comm.shm.signature import sign
from device_comm.span import Span
from shm_broadcast.errors import DivergenceError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from torch import Tensor

    from device_comm.operation import Operation
    from device_comm.reduce_op import ReduceOp
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
        match operation.verb:
            case "all_reduce":
                plan = planner.all_reduce(output, source, operation.op, self._whole_bytes)
            case "all_gather":
                plan = planner.all_gather(output, source)
            case "reduce_scatter":
                plan = planner.reduce_scatter(output, source, operation.op)
            case "broadcast":
                plan = planner.broadcast(operation.buffer, operation.peer)
            case "reduce":
                plan = planner.reduce(output, source, operation.peer, operation.op)
            case "gather":
                plan = planner.gather(output, source, operation.peer)
            case "scatter":
                plan = planner.scatter(output, source, operation.peer)
            case "all_to_all" if operation.source_sizes is None:
                plan = planner.all_to_all(output, source, operation.source_parts(self._n))
            case "barrier":
                plan = planner.barrier()
            case _:
                return self._agreed(operation)
        return iter((plan,))

    def _agreed(self, operation: Operation) -> Iterator[SlotPlan]:
        """The plans of verbs in which the ranks' shares may differ in size."""
        source, output = operation.source, operation.output
        takes, gives = operation.output_parts(self._n), operation.source_parts(self._n)
        if operation.verb == "all_gatherv":
            return self.all_gatherv(output, source, takes)
        if operation.verb == "reduce_scatterv":
            return self.reduce_scatterv(output, source, gives, operation.op)
        return self.all_to_all(output, source, takes, gives)

    def all_gatherv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int]
    ) -> Generator[SlotPlan, None, None]:
        """Plans that concatenate every rank's ``source``."""
        signature = sign("all_gatherv", source.dtype)
        yield from self._agree("all_gatherv", signature, sizes)
        yield self._planner.gather_parts(signature, output, source, sizes)

    def reduce_scatterv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], op: ReduceOp
    ) -> Generator[SlotPlan, None, None]:
        """Plans that reduce this rank's part of every rank's ``source``."""
        signature = sign("reduce_scatterv", source.dtype, op=op)
        yield from self._agree("reduce_scatterv", signature, sizes)
        yield self._planner.reduce_parts(signature, output, source, sizes, op)

    def all_to_all(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: Sequence[int],
        source_sizes: Sequence[int],
    ) -> Generator[SlotPlan, None, None]:
        """Plans that give each rank its part of every rank's ``source``."""
        signature = sign("all_to_all", source.dtype)
        table = yield from self._swap(signature, source_sizes)
        for rank, row in enumerate(table):
            if row[self._rank] != output_sizes[rank]:
                raise DivergenceError(
                    rank,
                    f"all_to_all that takes {output_sizes[rank]} elements from it",
                    f"all_to_all that gives {row[self._rank]} elements to rank {self._rank}",
                )
        longest = max(max(row) for row in table)
        yield self._planner.exchange_parts(
            signature, output, source, output_sizes, source_sizes, longest
        )

    def _agree(
        self, verb: str, signature: bytes, sizes: Sequence[int]
    ) -> Generator[SlotPlan, None, None]:
        table = yield from self._swap(signature, sizes)
        for rank, row in enumerate(table):
            if row != list(sizes):
                raise DivergenceError(rank, f"{verb} of {list(sizes)}", f"{verb} of {row}")

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
