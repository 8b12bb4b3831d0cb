"""Find which process of a program blocks the others: a graph of waits, its culprits, and their
stacks.

A process waits if one of its threads does, on any board. Who waits for the next message of a
driver, while others wait for it in something else, takes no part in that, and nor does who has
closed the group in which others wait for it.

Those that are waited for and wait for nobody hold the others up. Where there are none, those that
wait for each other do. `parties` finds out who waits for whom.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Final

from shm_broadcast import layout
from shm_broadcast.atomics import text_of
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import DRIVER_RANK, MemberStatus, counted, name_of
from shm_broadcast.inspection.snapshot import (
    BoardSnapshot,
    HostSnapshot,
    MemberSnapshot,
    Program,
    QueueSnapshot,
    merge_hosts,
    of_process,
    programs,
    scan,
)
from shm_broadcast.state.stacks import STACK_SIGNAL, StackFile, catches, read_stacks
from shm_broadcast.state.status import Membership, Wait

_DRIVER: Final = name_of(DRIVER_RANK)
_READS: Final = layout.DID_NAMES[layout.DID_DEQUEUE :]
"""What a reader is in that waits for a message: nothing is wrong if none is due."""


@dataclass(frozen=True, slots=True)
class WaitEdge:
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
class WaitNode:
    """A process that takes part, or a member that has none.

    Attributes:
        name: what its first board calls it: ``"rank 1"``, ``"rank 1 of board 2"``; a worker, where
            there are several pools, each with a name of its own, ``"rank 1 of thinker"``.
        members: what it is on each board, its latest progress first.
        waits_for: the names of those that it waits for.
        waited_by: those that wait for it.
        idle: whose next message it waits for, while others wait for it in something else.
        closed: the group that it has closed, while others wait for it there.
    """

    name: str
    members: list[MemberSnapshot]
    waits_for: dict[str, WaitEdge] = field(default_factory=dict)
    waited_by: list[WaitNode] = field(default_factory=list)
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
        return all(each.waits_for[self.name].verb in _READS for each in self.waited_by)

    @property
    def is_driver(self) -> bool:
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
    def problem(self) -> str:
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

    def reason(self) -> str:
        """Why those that wait for it do so."""
        if self.problem:
            why = self.problem
        elif self.closed:
            why = f"it has closed {self.closed}"
        elif self.idle:
            why = f"it takes no part, and waits for the next message of {self.idle}"
        elif self.members[0].condition == "in the kernel":
            why = "it waits in the kernel, for a disk or another device"
        else:
            why = "it waits for no other process"
        return why if self.status.state == "absent" else f"{why}; {self.status.last_seen}"


def wait_graph(boards: Sequence[BoardSnapshot]) -> dict[str, WaitNode]:
    """All that take part, by name: a process once, called as the first of its boards does."""
    by_process: dict[tuple[str, int], WaitNode] = {}
    parties: dict[str, WaitNode] = {}
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
                party = parties[name] = WaitNode(name, [])
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
        party.idle = next(iter(party.waits_for), "")
        for name in party.waits_for:
            parties[name].waited_by.remove(party)
        party.waits_for.clear()
    return parties


def _note_waits(
    party: WaitNode,
    member: MemberSnapshot,
    members: Sequence[MemberSnapshot],
    here: Sequence[WaitNode],
) -> None:
    """Note for whom a party waits, as a ``member`` of a board that has these members, who are the
    parties ``here``.
    """
    for wait in member.waits:
        same = member.status.operation == wait.operation
        number = f" #{member.status.sequence}" if same else ""
        waiting = WaitEdge(wait.operation + number, wait.operation, wait.seconds)
        for each in wait.members:
            late = here[each]
            if late is party:
                continue
            if _has_closed(members[each], member, wait):
                late.closed = wait.operation.rpartition(" ")[0]
            if late.name not in party.waits_for:
                party.waits_for[late.name] = waiting
                late.waited_by.append(party)


def _has_closed(late: MemberSnapshot, member: MemberSnapshot, wait: Wait) -> bool:
    """Whether a member has closed the group of the operation in which another one waits for it."""
    name = text_of(wait.operation.rpartition(" ")[0].encode()[: layout.ENTRY_GROUP_BYTES])
    left = {replace(each, rank=0) for each in late.groups if each.closed}
    return any(replace(each, rank=0) in left for each in member.groups if each.name == name)


def _takes_no_part(party: WaitNode, parties: Mapping[str, WaitNode]) -> bool:
    """Whether it waits for a message that nobody may owe it, while others wait for it to act."""
    return (
        bool(party.waits_for)
        and not party.only_read_from
        and all(
            wait.verb in _READS
            and not parties[name].problem
            and (parties[name].is_driver or not parties[name].waits_for)
            for name, wait in party.waits_for.items()
        )
    )


def find_cycle(parties: Mapping[str, WaitNode]) -> list[WaitNode]:
    """Some that wait for each other in a circle, of whom nobody waits for others; or nobody."""
    free = {name for name, party in parties.items() if not party.waits_for}
    grown = True
    while grown:
        reach = {n for n in parties if n not in free and parties[n].waits_for.keys() & free}
        free |= reach
        grown = bool(reach)
    stuck = sorted((parties[name] for name in parties if name not in free), key=lambda p: p.order)
    path = stuck[:1]
    while path:
        late = min((parties[name] for name in path[-1].waits_for), key=lambda each: each.order)
        if late in path:
            knot = path[path.index(late) :]
            first = knot.index(min(knot, key=lambda each: each.order))
            return [*knot[first:], *knot[:first]]
        path.append(late)
    return []


_NAMED: Final = 8
"""How many of those of whom the same is said are named."""

_MOST_WAITS: Final = 16
"""How many of those that wait because of the same ones are told."""

_FULL: Final = 0.5
"""A queue that is full to this degree is mentioned: the next message may need the other half."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is to be said about a program.

    Attributes:
        sentences: in plain words, the most important first.
        culprits: because of whom others wait.
        sample: those whose stacks tell the most: the culprits that have come, but for one that
        takes
            no part, or has closed the group, who waits for it.
        is_hang: whether they should not have to: it is more than readers that no message is for.
    """

    sentences: tuple[str, ...]
    culprits: tuple[WaitNode, ...]
    sample: tuple[WaitNode, ...]
    is_hang: bool


def diagnose(program: Program) -> Diagnosis:
    """Say who waits for whom in a program, and because of whom."""
    parties = wait_graph(program.boards)
    told = [
        f"The group{f' {board.name}' if board.name else ''} was aborted: {board.failure}."
        for board in program.boards
        if board.failure is not None
    ]
    ends = sorted(
        (each for each in parties.values() if each.waited_by and not each.waits_for),
        key=lambda each: (not (each.problem or each.closed), each.order),
    )
    culprits = [each for each in ends if each.problem or not each.only_read_from]
    told += _tell(culprits, "hold", "up others")
    knot = find_cycle(parties)
    told += _cycle_sentences(knot)
    names = {id(each): party.name for party in parties.values() for each in party.members}
    for board in program.boards:
        called = {each.status.rank: names[id(each)] for each in board.members}
        told += [_full(queue, called) for queue in board.queues if _is_full(queue)]
    held_up = bool(culprits or knot)
    if not held_up:
        if ends:
            told.append("Readers wait for messages. Nobody is held up, unless one is due:")
        elif not told:
            told.append("Nobody has waited for anybody for longer than a tenth of a second.")
        told += _tell(ends, "send", "nothing")
        culprits = ends
    told += [line for board in program.boards for line in _closed_by_some(board, parties, names)]
    asked = [_first_waiting(each) if each.idle or each.closed else each for each in culprits]
    asked = [each for each in dict.fromkeys(asked) if each.status.state != "absent"]
    return Diagnosis(tuple(told), (*culprits, *knot), (*asked, *knot), held_up)


def _tell(culprits: Sequence[WaitNode], verb: str, what: str) -> list[str]:
    """What parties do to others, then each that waits for them, also because of others.

    Those because of whom the same ones wait are told together.
    """
    reach = {each.name: {party.name for party, _ in _held_up([each])} for each in culprits}
    told, left = [], list(culprits)
    while left:
        held_up = reach[left[0].name]
        while (grown := held_up.union(*(s for s in reach.values() if s & held_up))) != held_up:
            held_up = grown
        alike = [each for each in left if reach[each.name] & held_up]
        left = [each for each in left if each not in alike]
        absent = [each.name for each in alike if each.status.state == "absent"]
        if len(absent) > 1:
            why = "they have not joined, or run on another host"
            told.append(f"{_title(_some(absent))} {verb} {what}: {why}.")
        told += [
            f"{_title(each.who)} {verb}s {what}: {each.reason()}."
            for each in alike
            if len(absent) < 2 or each.name not in absent
        ]
        waits = []
        for party, late in _held_up(alike):
            waiting = party.waits_for[late.name]
            also = [each for each in alike if party.waits_for.get(each.name) == waiting]
            waits.append(_wait(party, also or [late]))
        told += waits[:_MOST_WAITS]
        if len(waits) > _MOST_WAITS:
            told.append(f"  And {len(waits) - _MOST_WAITS} more wait.")
    return told


def _held_up(culprits: Sequence[WaitNode]) -> Iterator[tuple[WaitNode, WaitNode]]:
    """Each that waits for one of them, also because of others, with the one that it waits for."""
    reached, todo = {each.name for each in culprits}, list(culprits)
    while todo:
        late = todo.pop(0)
        for party in sorted(late.waited_by, key=lambda each: each.order):
            if party.name not in reached:
                reached.add(party.name)
                todo.append(party)
                yield party, late


def _wait(party: WaitNode, late: Sequence[WaitNode]) -> str:
    waiting = party.waits_for[late[0].name]
    return (
        f"  {_title(party.who)} waits for {_some([each.name for each in late])} in "
        f"{waiting.operation}, for {waiting.seconds:.1f} s."
    )


def _cycle_sentences(knot: list[WaitNode]) -> list[str]:
    if not knot:
        return []
    told = [f"{_title(_listed([each.who for each in knot]))} wait for each other, so none goes on."]
    waits = []
    for party, late in zip(knot, [*knot[1:], knot[0]], strict=True):
        told.append(_wait(party, [late]))
        waits.append((party, party.waits_for[late.name]))
    if len({waiting.verb for _, waiting in waits}) > 1:
        each = ", ".join(f"{waiting.operation} on {party.name}" for party, waiting in waits)
        told.append(f"Their operations differ; the first ones that do: {each}.")
    elif waits[0][1].verb.endswith(" recv"):
        told.append("All of them receive, and none has sent.")
    return told


def _first_waiting(late: WaitNode) -> WaitNode:
    return min(late.waited_by, key=lambda each: (each.is_driver, each.order))


def _closed_by_some(
    board: BoardSnapshot, parties: Mapping[str, WaitNode], names: Mapping[int, str]
) -> list[str]:
    """Who has closed a group that others have open, where no culprit's reason says so.

    ``names``: what members are called, by their `id`.
    """
    said = {party.closed for party in parties.values()}
    closed: dict[Membership, list[str]] = defaultdict(list)
    open_: dict[Membership, list[str]] = defaultdict(list)
    for member in board.members:
        for each in member.groups:
            (closed if each.closed else open_)[replace(each, rank=0)].append(names[id(member)])
    return [
        f"{_title(_some(left))} {_has(left)} closed {group.name}, "
        f"which {_some(open_[group])} {_has(open_[group])} open."
        for group, left in closed.items()
        if group in open_ and group.name not in said
    ]


def _is_full(queue: QueueSnapshot) -> bool:
    return not queue.closed and queue.behind > 0 and queue.used > _FULL * queue.capacity


def _full(queue: QueueSnapshot, called: Mapping[int, str]) -> str:
    """What is to be said of a full queue, of whose board the ranks are ``called`` so."""
    slow = [called[each.rank] for each in queue.readers if each.behind == queue.behind]
    percent, size = 100 * queue.used // queue.capacity, queue.capacity >> 10
    left = counted(queue.behind, "message")
    return (
        f"The queue from {called[queue.writer]}, of {size} KiB, is {percent} % full: "
        f"{_some(slow)} {_has(slow)} {left} to read."
    )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _some(names: list[str]) -> str:
    """The first of them, and how many more there are."""
    more = len(names) - _NAMED
    return _listed(names if more < 2 else [*names[:_NAMED], f"{more} more"])


def _has(names: list[str]) -> str:
    return "has" if len(names) == 1 else "have"


def _title(text: str) -> str:
    return text[0].upper() + text[1:]


def stacks_of(parties: Iterable[WaitNode], deadline: Deadline) -> dict[str, str]:
    """The Python stacks of parties, by name; of one that has none to show, why.

    Waits until all are written, at most until the deadline. Nobody is sent a signal that it does
    not catch.
    """
    told: dict[str, str] = {}
    with ExitStack() as closing:
        files: dict[int, StackFile] = {}
        pidfds: dict[int, int] = {}
        names: dict[int, str] = {}
        for party in parties:
            pid = party.status.pid
            descriptor = next((m.stacks for m in party.members if m.stacks is not None), None)
            told[party.name] = party.problem or "it catches no signal for that"
            if party.problem or descriptor is None:
                continue
            try:
                pidfds[pid] = os.pidfd_open(pid)
                closing.callback(os.close, pidfds[pid])
                # Looked at after the process is held: it is the same one that gets the signal.
                if catches(pid, STACK_SIGNAL):
                    files[pid] = StackFile.of(pid, descriptor)
                    closing.callback(files[pid].close)
                    names[pid] = party.name
            except OSError as error:
                told[party.name] = f"it cannot be asked: {error.strerror}"

        def ask(pid: int) -> None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfds[pid], STACK_SIGNAL)

        told |= dict.fromkeys(names.values(), "it did not answer in time")
        stacks = read_stacks(files, {pid: pid for pid in files}, ask, deadline)
        told |= {names[pid]: stack.rstrip() for pid, stack in stacks.items()}
    return told


def own_programs() -> list[Program]:
    """The programs of this process, as far as they run on this host.

    Takes some milliseconds: it looks at all processes of this user.

    Raises:
        OSError: /proc cannot be read, say for want of descriptors.
    """
    seen = scan()
    return of_process(os.getpid(), seen, programs(seen))


def own_diagnoses(elsewhere: Sequence[HostSnapshot] = ()) -> list[Diagnosis]:
    """Who waits for whom in the programs of this process.

    Args:
        elsewhere: what other hosts see of them.

    Raises:
        OSError: as `own_programs`, and it takes as long.
    """
    return [diagnose(merge_hosts(each, elsewhere)) for each in own_programs()]
