"""Collectives as tasks: plans that are carried out one after the other."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from device_comm.shm.plan import Plan, Planner, Span
from device_comm.shm.signature import describe, sign
from device_comm.shm.steps import Status
from shm_broadcast.errors import DivergenceError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from torch import Tensor

    from device_comm.reduce_op import ReduceOp
    from device_comm.shm.steps import Steps

_WORD = 8


class Collective:
    """One collective on its way; a `shm_broadcast.progress.Task`."""

    def __init__(
        self,
        steps: Steps,
        members: Sequence[int],
        operation: str,
        plans: Iterator[Plan],
        keep: object = None,
        *,
        begun: bool = False,
    ) -> None:
        """Carry out ``plans`` by ``steps``; the next is asked for when the last is done.

        Args:
            steps: nobody else uses them until this is done.
            members: the board's member number of each rank.
            operation: what this is, for messages.
            plans: one or more.
            keep: the tensors whose memory is used.
            begun: ``steps`` have a plan already, which comes first.
        """
        self.operation = operation
        self._steps = steps
        self._members = members
        self._plans = plans
        self._keep = keep
        self._begun = begun

    def advance(self, spin_ns: int) -> bool:
        """Go on as far as possible; whether all is done.

        Raises:
            DivergenceError: another rank is in another operation.
        """
        while True:
            if not self._begun:
                plan = next(self._plans, None)
                if plan is None:
                    return True
                self._steps.begin(plan)
                self._begun = True
            status = self._steps.advance(spin_ns)
            if status == Status.BLOCKED:
                return False
            if status == Status.DIVERGED:
                self._raise_divergence()
            self._begun = False

    def ready(self) -> bool:
        """Whether `advance` would get further."""
        return not self._begun or self._steps.ready()

    def missing(self) -> list[int]:
        """The members that have not arrived."""
        return [self._members[rank] for rank in self._steps.missing()] if self._begun else []

    def check_divergence(self) -> None:
        """Raise `DivergenceError` if a rank has arrived in another operation."""
        if self._begun and self._steps.divergent() is not None:
            self._raise_divergence()

    def _raise_divergence(self) -> None:
        found = self._steps.divergent()
        if found is not None:
            rank, ours, theirs = found
            raise DivergenceError(rank, describe(ours), describe(theirs))


class Agreement:
    """Plans of the verbs in which every rank's share has its own size.

    The sizes go round first, so that ranks which differ about them find out before they touch each
    other's data.
    """

    def __init__(self, planner: Planner, rank: int, world_size: int) -> None:
        self._planner = planner
        self._rank = rank
        self._n = world_size

    def all_gatherv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int]
    ) -> Generator[Plan, None, None]:
        """Plans to put all ``source`` in a row."""
        signature = sign("all_gatherv", source.dtype)
        yield from self._agree("all_gatherv", signature, sizes)
        yield self._planner.gather_parts(signature, output, source, sizes)

    def reduce_scatterv(
        self, output: Tensor, source: Tensor, sizes: Sequence[int], op: ReduceOp
    ) -> Generator[Plan, None, None]:
        """Plans to reduce this rank's part of all ``source``."""
        signature = sign("reduce_scatterv", source.dtype, op=op)
        yield from self._agree("reduce_scatterv", signature, sizes)
        yield self._planner.reduce_parts(signature, output, source, sizes, op)

    def all_to_all(
        self,
        output: Tensor,
        source: Tensor,
        output_sizes: Sequence[int],
        source_sizes: Sequence[int],
    ) -> Generator[Plan, None, None]:
        """Plans to exchange parts."""
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
    ) -> Generator[Plan, None, None]:
        table = yield from self._swap(signature, sizes)
        for rank, row in enumerate(table):
            if row != list(sizes):
                raise DivergenceError(rank, f"{verb} of {list(sizes)}", f"{verb} of {row}")

    def _swap(
        self, signature: bytes, sizes: Sequence[int]
    ) -> Generator[Plan, None, list[list[int]]]:
        """Everybody's sizes, by rank."""
        mine, table = array("Q", sizes), array("Q", bytes(_WORD * self._n * self._n))
        yield self._planner.table(signature, _span_of(mine), _span_of(table))
        numbers = table.tolist()
        return [numbers[r * self._n : (r + 1) * self._n] for r in range(self._n)]


def _span_of(numbers: array[int]) -> Span:
    address, count = numbers.buffer_info()
    return Span(address, count * _WORD)
