"""Carrying out a program as one of its ranks.

At each place of the program a member first receives the messages that are due, then waits for what
it began and has to end here, the latest first, and then takes part in the step itself. A message is
received when it is due at its receiver, and behind those of the same sender before it; but before
an asynchronous collective of objects, which is in order with messages.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import coordinator.context
from coordinator.hosts import HostTopology, find_nodes
from coordinator.messages.transport import COPIED_BYTES
from coordinator.torch_groups import default_store
from device_comm import Work
from tests.fuzz.program import groups_of
from tests.fuzz.verbs import (
    MESSAGES,
    OBJECT_VERBS,
    Given,
    barrier,
    call_dispatch,
    call_object_verb,
    call_tensor_verb,
    receive,
    send,
    sent_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from coordinator import GroupCoordinator
    from tests.fuzz.fleet import Post
    from tests.fuzz.generate import Fault
    from tests.fuzz.program import Program, Step

_LAST = 1 << 20
"""A place behind all others."""


class ProgramRank:
    def __init__(self, post: Post) -> None:
        self._groups = {
            name: self._make(post, name, members)
            for name, members in groups_of(post.n).items()
            if any(post.rank in ranks for ranks in members)
        }

    @staticmethod
    def _make(post: Post, name: str, members: Sequence[Sequence[int]]) -> GroupCoordinator:
        if name == "halves":
            return post.make_group(name, members, store=default_store())
        if name != "nodes":
            return post.make_group(name, members, queue=name == "turned")
        halves = tuple(post.n // 2 * int(2 * rank >= post.n) for rank in range(post.n))

        def pretended(*arguments: Any, **options: Any) -> HostTopology:
            return replace(find_nodes(*arguments, **options), node_of=halves)

        with mock.patch.object(coordinator.context, "find_nodes", pretended):
            return post.make_group(name, members)

    def run(self, program: Program, fault: Fault | None) -> str:
        return Executors(self._groups).run(program, fault)


@dataclass
class Executors:
    groups: Mapping[str, GroupCoordinator]
    _receives: list[tuple[int, GroupCoordinator, Given]] = field(default_factory=list)
    _waits: dict[int, list[Callable[[], None]]] = field(default_factory=lambda: defaultdict(list))
    _received_last: dict[tuple[str, int], int] = field(default_factory=dict)

    def run(self, program: Program, fault: Fault | None = None) -> str:
        place: int | str = 0
        me = self.groups["world"].rank
        try:
            for place, step in enumerate(program.steps):
                self._catch_up(place)
                if fault is not None and (fault.rank, fault.place) == (me, place):
                    step = fault.strike(step)
                group = self.groups.get(step.group)
                if group is not None:
                    slicing = self.groups["rows"] if step.group == "columns" else None
                    given = Given(step, place, group.rank_in_group, group.world_size, slicing)
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
        if step.verb in OBJECT_VERBS and step.run_on:
            self._receive_if(lambda _, where: where is group)
        self._end(given, *begin(group, given))

    def _end(
        self, given: Given, began: Any, check: Callable[[Any], None], at: int | None = None
    ) -> None:
        """Check what has come, now or when it is to be waited for: as the step says, or ``at``."""
        if given.step.run_on:
            assert isinstance(began, Work), f"{type(began).__name__} is no Work"
            place = given.number + 1 + _later(given.step, given.rank) if at is None else at
            self._waits[place].append(lambda: check(began.wait()))
        else:
            check(began)

    def _message(self, group: GroupCoordinator, given: Given) -> None:
        step = given.step
        if step.root == step.peer:
            return
        if given.rank == step.root:
            # One that is not copied may be done with its receive only, which may come last.
            last = sent_bytes(given) > COPIED_BYTES
            self._end(given, send(group, given), _nothing, at=_LAST if last else None)
        elif given.rank == step.peer:
            due = given.number + 1 + _later(step, step.peer)
            before = self._received_last.get((step.group, step.root), 0)
            due = self._received_last[step.group, step.root] = max(due, before)
            self._receives.append((due, group, given))

    def _receive_if(self, wanted: Callable[[int, GroupCoordinator], bool]) -> None:
        now = [each for each in self._receives if wanted(*each[:2])]
        self._receives = [each for each in self._receives if each not in now]
        for _, group, given in now:
            began, check = receive(group, given)
            check(began.wait() if given.step.run_on else began)


def begin(group: GroupCoordinator, given: Given) -> tuple[Any, Callable[[Any], None]]:
    verb = given.step.verb
    if verb in OBJECT_VERBS:
        return call_object_verb(group, given)
    if verb == "dispatch":
        return call_dispatch(group, given)
    return barrier(group, given) if verb == "barrier" else call_tensor_verb(group, given)


def _later(step: Step, rank: int) -> int:
    return step.later[rank] if step.later else 0


def _nothing(found: Any) -> None:
    assert found is None
