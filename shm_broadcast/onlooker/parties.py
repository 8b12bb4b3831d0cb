"""The processes that take part in a program, and which of them waits for which: see `blame`.

A process waits if one of its threads does, on any board. Who waits for the next message of a
driver, while others wait for it in something else, takes no part in that, and nor does who has
closed the group in which others wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from shm_broadcast import layout
from shm_broadcast.board.fixed_text import text_of
from shm_broadcast.errors import DRIVER_RANK, name_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shm_broadcast.board.outward import Wait
    from shm_broadcast.errors import MemberStatus
    from shm_broadcast.onlooker.programs import BoardSeen, MemberSeen

_DRIVER: Final = name_of(DRIVER_RANK)
_READS: Final = layout.DID_NAMES[layout.DID_DEQUEUE :]
"""What a reader is in that waits for a message: nothing is wrong if none is due."""


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
        name: what its first board calls it: ``"rank 1"``, ``"rank 1 of board 2"``; a worker, where
            there are several pools, each with a name of its own, ``"rank 1 of thinker"``.
        members: what it is on each board, its latest progress first.
        waits_on: the names of those that it waits for.
        awaited_by: those that wait for it.
        idle: whose next message it waits for, while others wait for it in something else.
        closed: the group that it has closed, while others wait for it there.
    """

    name: str
    members: list[MemberSeen]
    waits_on: dict[str, Waiting] = field(default_factory=dict)
    awaited_by: list[Party] = field(default_factory=list)
    idle: str = ""
    closed: str = ""

    @property
    def status(self) -> MemberStatus:
        """What it did last, on whatever board."""
        return self.members[0].status

    @property
    def who(self) -> str:
        """``"rank 1 (pid 4242)"``, or ``"rank 1 (pid 4242 on b)"`` on another host."""
        host = f" on {self.status.host}" if self.status.host else ""
        return f"{self.name} (pid {self.status.pid}{host})" if self.status.pid else self.name

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
    def is_stopped(self) -> bool:
        """Whether its process is stopped, by a signal or a debugger."""
        return self.members[0].condition == "stopped"

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
        if self.is_stopped:
            return "its process is stopped, by a signal or a debugger"
        return ""

    def holds_up(self) -> str:
        """Why those that wait for it do so."""
        if self.fault:
            why = self.fault
        elif self.closed:
            why = f"it has closed {self.closed}"
        elif self.idle:
            why = f"it takes no part, and waits for the next message of {self.idle}"
        elif self.members[0].condition == "in the kernel":
            why = "it waits in the kernel, for a disk or another device"
        else:
            why = "it waits for no other process"
        return why if self.status.state == "absent" else f"{why}; {self.status.last_seen}"


def parties_of(boards: Sequence[BoardSeen]) -> dict[str, Party]:
    """All that take part, by name: a process once, called as the first of its boards does."""
    by_process: dict[tuple[str, int], Party] = {}
    parties: dict[str, Party] = {}
    pools = [board.name for board in boards if board.is_pool]
    for place, board in enumerate(boards, 1):
        here = []
        for member in board.members:
            process = member.status.host, member.status.pid
            party = by_process.get(process) if member.status.pid else None
            if party is None:
                name = name_of(member.status.rank)
                named = board.is_pool and pools.count(board.name) == 1
                if name in parties or (named and len(pools) > 1 and name != _DRIVER):
                    name += f" of {board.name if named else f'board {place}'}"
                while name in parties:  # a queue may call its writer and a reader the same
                    name += "'"
                party = parties[name] = Party(name, [])
                if member.status.pid:
                    by_process[process] = party
            party.members.append(member)
            here.append(party)
        for party, member in zip(here, board.members, strict=True):
            if member.condition != "stopped":  # what that waited for may have come
                _note_waits(party, member, board.members, here)
    for party in parties.values():
        party.members.sort(key=lambda m: (m.status.age is None, m.status.age or 0.0))
    for party in [
        each for each in parties.values() if each.closed or _takes_no_part(each, parties)
    ]:
        party.idle = next(iter(party.waits_on), "")
        for name in party.waits_on:
            parties[name].awaited_by.remove(party)
        party.waits_on.clear()
    return parties


def _note_waits(
    party: Party, member: MemberSeen, members: Sequence[MemberSeen], here: Sequence[Party]
) -> None:
    """Note for whom a party waits, as a ``member`` of a board that has these members, who are the
    parties ``here``.
    """
    for wait in member.waits:
        same = member.status.operation == wait.operation
        number = f" #{member.status.sequence}" if same else ""
        waiting = Waiting(wait.operation + number, wait.operation, wait.seconds)
        for each in wait.members:
            late = here[each]
            if late is party:
                continue
            if _has_closed(members[each], member, wait):
                late.closed = wait.operation.rpartition(" ")[0]
            if late.name not in party.waits_on:
                party.waits_on[late.name] = waiting
                late.awaited_by.append(party)


def _has_closed(late: MemberSeen, member: MemberSeen, wait: Wait) -> bool:
    """Whether a member has closed the group of the operation in which another one waits for it."""
    name = text_of(wait.operation.rpartition(" ")[0].encode()[: layout.ENTRY_GROUP_BYTES])
    left = {replace(each, rank=0) for each in late.groups if each.closed}
    return any(replace(each, rank=0) in left for each in member.groups if each.name == name)


def _takes_no_part(party: Party, parties: Mapping[str, Party]) -> bool:
    """Whether it waits for a message that nobody may owe it, while others wait for it to act."""
    return (
        bool(party.waits_on)
        and not party.only_read_from
        and all(
            wait.verb in _READS
            and not parties[name].fault
            and (parties[name].drives or not parties[name].waits_on)
            for name, wait in party.waits_on.items()
        )
    )


def knot_of(parties: Mapping[str, Party]) -> list[Party]:
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
