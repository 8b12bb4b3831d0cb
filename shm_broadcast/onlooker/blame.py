"""Which process waits for which, and which holds the others up: conclusions from the boards.

A process waits if one of its threads does, on any board. Those that are waited for and wait for
nobody hold the others up. Where there are none, those that wait for each other do. Who waits for
the next message of a driver, while others wait for it in something else, takes no part in that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shm_broadcast import layout
from shm_broadcast.errors import DRIVER_RANK, name_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shm_broadcast.errors import MemberStatus
    from shm_broadcast.onlooker.programs import BoardSeen, MemberSeen, Program, QueueSeen

_READS: Final = layout.DID_NAMES[layout.DID_DEQUEUE :]
"""What a reader is in that waits for a message: nothing is wrong if none is due."""

_FULL: Final = 0.5
"""A queue that is full to this degree is mentioned: the next message may need the other half."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """One party waits for another.

    Attributes:
        operation: what it is in, with the operation's number where that is known.
        verb: the same without the number.
        seconds: how long.
    """

    operation: str
    verb: str
    seconds: float


@dataclass(slots=True, eq=False)
class Party:
    """A process that takes part, or a member that has none.

    Attributes:
        name: what the largest board calls it: ``"rank 1"``, ``"rank 1 of board 2"``.
        members: what it is on each board, its latest progress first.
        waits_on: the names of those that it waits for.
        awaited_by: those that wait for it.
        idle: whose next message it waits for, while others wait for it in something else.
    """

    name: str
    members: list[MemberSeen]
    waits_on: dict[str, Waiting] = field(default_factory=dict)
    awaited_by: list[Party] = field(default_factory=list)
    idle: str = ""

    @property
    def status(self) -> MemberStatus:
        """What it did last, on whatever board."""
        return self.members[0].status

    @property
    def who(self) -> str:
        """``"rank 1 (pid 4242)"``."""
        return f"{self.name} (pid {self.status.pid})" if self.status.pid else self.name

    @property
    def only_read_from(self) -> bool:
        """Whether all that wait for it are readers that wait for a message."""
        return all(each.waits_on[self.name].verb in _READS for each in self.awaited_by)

    @property
    def drives(self) -> bool:
        """Whether it is the driver of others: it may wait for some while it calls others."""
        return any(member.status.rank == DRIVER_RANK for member in self.members)

    @property
    def order(self) -> tuple[int, int]:
        """Where it stands in lists."""
        return self.status.rank, self.status.pid

    @property
    def fault(self) -> str:
        """What is wrong with its process, whatever it waits for; ``""`` if nothing is seen."""
        match self.status.state:
            case "absent":
                return "it has not joined, or runs on another host"
            case "lost":
                return "its process has ended"
            case "closed":
                return "it has left"
        if self.members[0].condition == "stopped":
            return "its process is stopped, by a signal or a debugger"
        return ""

    def holds_up(self) -> str:
        """Why those that wait for it do so."""
        why = self.fault or (
            f"it takes no part, and waits for the next message of {self.idle}"
            if self.idle
            else "it waits for no other process"
        )
        return why if self.status.state == "absent" else f"{why}; {self.status.last_seen}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be said about a program.

    Attributes:
        sentences: in plain words, the most important first.
        culprits: because of whom others wait.
        held_up: whether they should not have to: it is more than readers that no message is for.
    """

    sentences: tuple[str, ...]
    culprits: tuple[Party, ...]
    held_up: bool


def judge(program: Program) -> Verdict:
    """Say who waits for whom in a program, and because of whom."""
    parties = _parties(program.boards)
    told = [
        f"The group{f' {board.name}' if board.name else ''} was aborted: {board.failure}."
        for board in program.boards
        if board.failure is not None
    ]
    ends = sorted(
        (each for each in parties.values() if each.awaited_by and not each.waits_on),
        key=lambda each: each.order,
    )
    culprits = [each for each in ends if each.fault or not each.only_read_from]
    told += [line for each in culprits for line in _tell("holds up others", each)]
    knot = _knot(parties)
    told += _tell_knot(knot)
    held_up = bool(culprits or knot)
    if not held_up:
        if ends:
            told.append("Readers wait for messages. Nobody is held up, unless one is due:")
        elif not told:
            told.append("Nobody has waited for anybody for longer than a tenth of a second.")
        told += [line for each in ends for line in _tell("sends nothing", each)]
        culprits = ends
    told += [_full(queue) for board in program.boards for queue in board.queues if _is_full(queue)]
    return Verdict(tuple(told), (*culprits, *knot), held_up)


def _parties(boards: Iterable[BoardSeen]) -> dict[str, Party]:
    """All that take part, by name: a process once, called as the largest of its boards does."""
    by_pid: dict[int, Party] = {}
    parties: dict[str, Party] = {}
    for place, board in enumerate(boards, 1):
        here = []
        for member in board.members:
            pid = member.status.pid
            party = by_pid.get(pid) if pid else None
            if party is None:
                name = name_of(member.status.rank)
                if name in parties:
                    name += f" of board {place}"
                while name in parties:  # a queue may call its writer and a reader the same
                    name += "'"
                party = parties[name] = Party(name, [])
                if pid:
                    by_pid[pid] = party
            party.members.append(member)
            here.append(party)
        for party, member in zip(here, board.members, strict=True):
            if member.condition == "stopped":
                continue  # what it waited for may have come: it goes on no more than before
            for wait in member.waits:
                same = member.status.operation == wait.operation
                number = f" #{member.status.sequence}" if same else ""
                waiting = Waiting(wait.operation + number, wait.operation, wait.seconds)
                for each in wait.members:
                    late = here[each]
                    if late is not party and late.name not in party.waits_on:
                        party.waits_on[late.name] = waiting
                        late.awaited_by.append(party)
    for party in parties.values():
        party.members.sort(key=lambda m: (m.status.age is None, m.status.age or 0.0))
    for party in [each for each in parties.values() if _takes_no_part(each, parties)]:
        party.idle = next(iter(party.waits_on))
        for name in party.waits_on:
            parties[name].awaited_by.remove(party)
        party.waits_on.clear()
    return parties


def _takes_no_part(party: Party, parties: Mapping[str, Party]) -> bool:
    """Whether it waits for a message that nobody may owe it, while others wait for it to act."""
    return (
        bool(party.waits_on)
        and not party.only_read_from
        and all(
            wait.verb in _READS and (parties[name].drives or not parties[name].waits_on)
            for name, wait in party.waits_on.items()
        )
    )


def _tell(what: str, culprit: Party) -> list[str]:
    """What a party does to others, and each that waits for it, also because of others."""
    told = [f"{_title(culprit.who)} {what}: {culprit.holds_up()}."]
    reached, todo = {culprit.name}, [culprit]
    while todo:
        late = todo.pop(0)
        for party in sorted(late.awaited_by, key=lambda each: each.order):
            if party.name not in reached:
                reached.add(party.name)
                todo.append(party)
                told.append(_wait(party, late))
    return told


def _wait(party: Party, late: Party) -> str:
    waiting = party.waits_on[late.name]
    return (
        f"  {_title(party.who)} waits for {late.name} in {waiting.operation}, "
        f"for {waiting.seconds:.1f} s."
    )


def _knot(parties: Mapping[str, Party]) -> list[Party]:
    """Some that wait for each other in a circle, of whom nobody waits for others; or nobody."""
    free = {name for name, party in parties.items() if not party.waits_on}
    grown = True
    while grown:
        reach = {n for n in parties if n not in free and parties[n].waits_on.keys() & free}
        free |= reach
        grown = bool(reach)
    stuck = sorted((parties[name] for name in parties if name not in free), key=lambda p: p.order)
    path = stuck[:1]
    while path:
        late = min((parties[name] for name in path[-1].waits_on), key=lambda each: each.order)
        if late in path:
            knot = path[path.index(late) :]
            first = knot.index(min(knot, key=lambda each: each.order))
            return [*knot[first:], *knot[:first]]
        path.append(late)
    return []


def _tell_knot(knot: list[Party]) -> list[str]:
    if not knot:
        return []
    told = [f"{_title(_listed([each.who for each in knot]))} wait for each other, so none goes on."]
    waits = []
    for party, late in zip(knot, [*knot[1:], knot[0]], strict=True):
        told.append(_wait(party, late))
        waits.append((party, party.waits_on[late.name]))
    if len({waiting.verb for _, waiting in waits}) > 1:
        each = ", ".join(f"{waiting.operation} on {party.name}" for party, waiting in waits)
        told.append(f"Their operations differ; the first ones that do: {each}.")
    elif waits[0][1].verb.endswith(" recv"):
        told.append("All of them receive, and none has sent.")
    return told


def _is_full(queue: QueueSeen) -> bool:
    return not queue.closed and queue.behind > 0 and queue.used > _FULL * queue.capacity


def _full(queue: QueueSeen) -> str:
    slow = [name_of(each.rank) for each in queue.readers if each.behind == queue.behind]
    percent, size = 100 * queue.used // queue.capacity, queue.capacity >> 10
    left = f"{queue.behind} message{'s' if queue.behind > 1 else ''} to read"
    return (
        f"The queue from {name_of(queue.writer)}, of {size} KiB, is {percent} % full: "
        f"{_listed(slow)} {'has' if len(slow) == 1 else 'have'} {left}."
    )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _title(text: str) -> str:
    return text[0].upper() + text[1:]
