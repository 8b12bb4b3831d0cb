"""Collectives as tasks: plans that are carried out one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from device_comm.shm.collectives.steps import Status
from device_comm.shm.signature import signature_text
from shm_broadcast.errors import DivergenceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from device_comm.shm.attendance import Attendance
    from device_comm.shm.collectives.slot_plan import SlotPlan
    from device_comm.shm.collectives.steps import Steps


class Collective:
    """One collective on its way; a `shm_broadcast.progress.Task`."""

    def __init__(
        self,
        steps: Steps,
        attendance: Attendance,
        operation: str,
        plans: Iterator[SlotPlan],
        keep: object = None,
        *,
        call: int = 0,
        begun: bool = False,
    ) -> None:
        """Carry out ``plans`` by ``steps``; the next is asked for when the last is done.

        Args:
            steps: nobody else uses them until this is done.
            attendance: says which ranks have closed the group.
            operation: what this is, for messages.
            plans: one or more.
            keep: the tensors whose memory is used.
            call: the number of the call that this is part of; 0: none.
            begun: ``steps`` have a plan already, which comes first.
        """
        self.operation = operation
        self._steps = steps
        self._attendance = attendance
        self._plans = plans
        self._keep = keep
        self._begun = begun
        self._call = call

    def advance(self, spin_ns: int) -> bool:
        """Go on as far as possible, or for a few MiB; whether all is done.

        Raises:
            DivergenceError: another rank is in another operation.
            GroupClosedError: a rank that is needed has closed the group, which is aborted.
        """
        while True:
            if not self._begun:
                plan = next(self._plans, None)
                if plan is None:
                    return True
                self._steps.begin(plan, self._call)
                self._begun = True
            status = self._steps.advance(spin_ns)
            if status == Status.BLOCKED and self._attendance.anyone_left:
                status = self._advance_without_those_that_left()
            if status == Status.BLOCKED:
                return False
            if status == Status.DIVERGED:
                self._raise_divergence()
            self._begun = False

    def ready(self) -> bool:
        """Whether `advance` would get further."""
        return not self._begun or self._steps.ready() or self._lacks_one()

    def missing(self) -> list[int]:
        """The members that have not arrived."""
        members = self._attendance.members
        return [members[rank] for rank in self._steps.missing()] if self._begun else []

    def check_divergence(self) -> None:
        """Raise `DivergenceError` if a rank has arrived in another operation."""
        if self._begun and self._steps.divergent() is not None:
            self._raise_divergence()

    def _lacks_one(self) -> bool:
        attendance = self._attendance
        return attendance.anyone_left and any(map(attendance.has_left, self._steps.missing()))

    def _advance_without_those_that_left(self) -> int:
        """Look once more for what they did before they left."""
        left = self._attendance.left()
        status = self._steps.advance(0)
        if status == Status.BLOCKED:
            for rank in self._steps.missing():
                if rank in left:
                    raise self._attendance.end(self.operation, rank)
        return status

    def _raise_divergence(self) -> None:
        found = self._steps.divergent()
        if found is not None:
            rank, ours, theirs = found
            raise DivergenceError(rank, signature_text(ours), signature_text(theirs))
