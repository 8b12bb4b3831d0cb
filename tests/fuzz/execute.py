"""Carrying out a program as one of its ranks.

At each place of the program a member first receives the messages that are due, then waits for what
it began and has to end here, the latest first, and then takes part in the step itself. A message is
received when it is due at its receiver, and behind those of the same sender before it; but before
an asynchronous collective of objects, which is in order with messages.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from device_comm import Work
from tests.fuzz import verbs
from tests.fuzz.verbs import MESSAGES, OBJECT_VERBS, Given

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from coordinator import GroupCoordinator
    from tests.fuzz.faults import Fault
    from tests.fuzz.program import Program, Step


@dataclass
class Execution:
    """One rank's way through one program.

    Attributes:
        groups: by name of their kind, the group that this rank is in.
    """

    groups: Mapping[str, GroupCoordinator]
    _receives: list[tuple[int, GroupCoordinator, Given]] = field(default_factory=list)
    _waits: dict[int, list[Callable[[], None]]] = field(default_factory=lambda: defaultdict(list))
    _received_last: dict[tuple[str, int], int] = field(default_factory=dict)

    def run(self, program: Program, fault: Fault | None = None) -> str:
        """Carry it out; what went wrong first, with where, or ``""``."""
        place: int | str = 0
        me = self.groups["world"].rank
        try:
            for place, step in enumerate(program.steps):
                self._catch_up(place)
                if fault is not None and (fault.rank, fault.place) == (me, place):
                    step = fault.strike(step)
                group = self.groups.get(step.group)
                if group is not None:
                    given = Given(step, place, group.rank_in_group, group.world_size)
                    self._take_part(group, given)
            for place in sorted({*self._waits, *(due for due, *_ in self._receives)}):
                self._catch_up(place)
        except Exception as error:  # noqa: BLE001 - all that goes wrong is the answer
            for group in self.groups.values():
                group.abort(error)
            return f"at step {place}: {traceback.format_exc()}"
        return ""

    def _catch_up(self, place: int) -> None:
        self._receive_if(lambda due, _: due <= place)
        for wait in reversed(self._waits.pop(place, [])):
            wait()

    def _take_part(self, group: GroupCoordinator, given: Given) -> None:
        step = given.step
        if step.verb in MESSAGES:
            self._message(group, given)
            return
        if step.verb in OBJECT_VERBS:
            if step.form == "async":
                self._receive_if(lambda _, where: where is group)
            began, check = verbs.call_object_verb(group, given)
        elif step.verb == "barrier":
            began, check = verbs.barrier(group, given)
        elif step.verb == "hierarchical":
            began, check = verbs.hierarchical(group, given)
        else:
            began, check = verbs.call_tensor_verb(group, given)
        self._end(given, began, check)

    def _end(self, given: Given, began: Any, check: Callable[[Any], None]) -> None:
        """Check what has come, now or when it is to be waited for."""
        if given.step.form == "async":
            assert isinstance(began, Work), f"{type(began).__name__} is no Work"
            place = given.number + 1 + _later(given.step, given.rank)
            self._waits[place].append(lambda: check(began.wait()))
        else:
            check(began)

    def _message(self, group: GroupCoordinator, given: Given) -> None:
        step = given.step
        if step.root == step.peer:
            return
        if given.rank == step.root:
            self._end(given, verbs.send(group, given), _nothing)
        elif given.rank == step.peer:
            due = given.number + 1 + _later(step, step.peer)
            before = self._received_last.get((step.group, step.root), 0)
            due = self._received_last[step.group, step.root] = max(due, before)
            self._receives.append((due, group, given))

    def _receive_if(self, wanted: Callable[[int, GroupCoordinator], bool]) -> None:
        """Receive the messages that are wanted, by when they are due and their group."""
        now = [each for each in self._receives if wanted(*each[:2])]
        self._receives = [each for each in self._receives if each not in now]
        for _, group, given in now:
            began, check = verbs.receive(group, given)
            check(began.wait() if given.step.form == "async" else began)


def _later(step: Step, rank: int) -> int:
    return step.later[rank] if step.later else 0


def _nothing(found: Any) -> None:
    assert found is None
