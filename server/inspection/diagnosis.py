"""Find the process of a program that blocks the others: wait-for graph, culprits, stacks.

A process waits if one of its threads does, on any board. Waits of an idle process (blocked in
dequeue on a driver, while others wait for it elsewhere), and of one that has closed the group of
the others' wait, do not count. The culprits are the awaited processes that wait for none; without
such, the processes of a cycle.
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
from shm_broadcast.state.stacks import STACK_SIGNAL, StackFile, catches, read_stacks
from shm_broadcast.state.status import Membership, Wait

from .snapshot import (
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

_DRIVER: Final = name_of(DRIVER_RANK)
_READS: Final = layout.DID_NAMES[layout.DID_DEQUEUE :]
"""The waits of a reader for a message, which are normal while no message is due."""


@dataclass(frozen=True, slots=True)
class WaitEdge:
    """A wait of one node for another."""

    operation: str  # with its number if known
    verb: str  # the operation without the number
    seconds: float


@dataclass(slots=True, eq=False)
class WaitNode:
    """A process, or a member that has none."""

    name: str  # on its first board: "rank 1", "rank 1 of board 2", "rank 1 of thinker" (a pool)
    members: list[MemberSnapshot]  # on each board, the latest progress first
    waits_for: dict[str, WaitEdge] = field(default_factory=dict)  # by awaited node
    waited_by: list[WaitNode] = field(default_factory=list)
    idle: str = ""  # the driver whose next message it waits for while others wait for it
    closed: str = ""  # the group that it has closed while others wait for it there

    @property
    def status(self) -> MemberStatus:
        """Return its last status, on any board."""
        return self.members[0].status

    @property
    def who(self) -> str:
        """Return ``"rank 1 (pid 4242)"``, or ``"rank 1 (pid 4242 on b)"`` on another host."""
        host = f" on {self.status.host}" if self.status.host else ""
        return f"{self.name} (pid {self.status.pid}{host})" if self.status.pid else self.name

    @property
    def only_read_from(self) -> bool:
        """Return whether only readers wait for it, for a message."""
        return all(each.waits_for[self.name].verb in _READS for each in self.waited_by)

    @property
    def is_driver(self) -> bool:
        """Return whether it is a driver, which may wait for some workers and call others."""
        return any(member.status.rank == DRIVER_RANK for member in self.members)

    @property
    def order(self) -> tuple[int, int]:
        """Return its sort key in lists."""
        return self.status.rank, self.status.pid

    @property
    def is_stopped(self) -> bool:
        """Return whether its process is stopped, by a signal or a debugger."""
        return self.members[0].condition == "stopped"

    @property
    def problem(self) -> str:
        """Return the problem of its process, apart from waits; ``""`` if there is none."""
        match self.status.state:
            case "absent":
                return "it has not joined, or runs on another host"
            case "lost":
                return "its process has ended"
            case "closed":
                return "it has closed the group"
        if self.is_stopped:
            return "its process is stopped, by a signal or a debugger"
        return ""

    def reason(self) -> str:
        """Return why others wait for it."""
        if self.problem:
            why = self.problem
        elif self.closed:
            why = f"it has closed {self.closed}"
        elif self.idle:
            why = f"it is idle, and waits for the next message of {self.idle}"
        elif self.members[0].condition == "in the kernel":
            why = "it waits in the kernel, for a disk or another device"
        else:
            why = "it waits for no other process"
        return why if self.status.state == "absent" else f"{why}; {self.status.last_seen}"


def wait_graph(boards: Sequence[BoardSnapshot]) -> dict[str, WaitNode]:
    """Return all nodes by name, one for each process."""
    by_process: dict[tuple[str, int], WaitNode] = {}
    nodes: dict[str, WaitNode] = {}
    pools = [board.name for board in boards if board.is_pool]
    for place, board in enumerate(boards, 1):
        here = []
        for member in board.members:
            process = member.status.host, member.status.pid
            node = by_process.get(process) if member.status.pid else None
            if node is None:
                name = name_of(member.status.rank)
                named = board.is_pool and pools.count(board.name) == 1
                if name in nodes or (named and len(pools) > 1 and name != _DRIVER):
                    name += f" of {board.name if named else f'board {place}'}"
                while name in nodes:  # a queue's writer and reader may have the same rank
                    name += "'"
                node = nodes[name] = WaitNode(name, [])
                if member.status.pid:
                    by_process[process] = node
            node.members.append(member)
            here.append(node)
        for node, member in zip(here, board.members, strict=True):
            if member.condition != "stopped":  # its wait may be over
                _note_waits(node, member, board.members, here)
    for node in nodes.values():
        node.members.sort(key=lambda m: (m.status.age is None, m.status.age or 0.0))
    for node in [each for each in nodes.values() if each.closed or _takes_no_part(each, nodes)]:
        node.idle = next(iter(node.waits_for), "")
        for name in node.waits_for:
            nodes[name].waited_by.remove(node)
        node.waits_for.clear()
    return nodes


def _note_waits(
    node: WaitNode,
    member: MemberSnapshot,
    members: Sequence[MemberSnapshot],
    here: Sequence[WaitNode],
) -> None:
    for wait in member.waits:
        same = member.status.operation == wait.operation
        number = f" #{member.status.sequence}" if same else ""
        waiting = WaitEdge(wait.operation + number, wait.operation, wait.seconds)
        for each in wait.members:
            late = here[each]
            if late is node:
                continue
            if _has_closed(members[each], member, wait):
                late.closed = wait.operation.rpartition(" ")[0]
            if late.name not in node.waits_for:
                node.waits_for[late.name] = waiting
                late.waited_by.append(node)


def _has_closed(late: MemberSnapshot, member: MemberSnapshot, wait: Wait) -> bool:
    name = text_of(wait.operation.rpartition(" ")[0].encode()[: layout.ENTRY_GROUP_BYTES])
    closed = {replace(each, rank=0) for each in late.groups if each.closed}
    return any(replace(each, rank=0) in closed for each in member.groups if each.name == name)


def _takes_no_part(node: WaitNode, nodes: Mapping[str, WaitNode]) -> bool:
    """Return whether it waits for a message that may not be due, while others wait for it."""
    return (
        bool(node.waits_for)
        and not node.only_read_from
        and all(
            wait.verb in _READS
            and not nodes[name].problem
            and (nodes[name].is_driver or not nodes[name].waits_for)
            for name, wait in node.waits_for.items()
        )
    )


def find_cycle(nodes: Mapping[str, WaitNode]) -> list[WaitNode]:
    """Return nodes that wait for each other in a cycle without an exit, or []."""
    free = {name for name, node in nodes.items() if not node.waits_for}
    grown = True
    while grown:
        reach = {n for n in nodes if n not in free and nodes[n].waits_for.keys() & free}
        free |= reach
        grown = bool(reach)
    stuck = sorted((nodes[name] for name in nodes if name not in free), key=lambda p: p.order)
    path = stuck[:1]
    while path:
        late = min((nodes[name] for name in path[-1].waits_for), key=lambda each: each.order)
        if late in path:
            cycle = path[path.index(late) :]
            first = cycle.index(min(cycle, key=lambda each: each.order))
            return [*cycle[first:], *cycle[:first]]
        path.append(late)
    return []


_NAMED: Final = 8
"""The most nodes that one sentence names."""

_MOST_WAITS: Final = 16
"""The most waits that are listed for the same culprits."""

_FULL: Final = 0.5
"""A queue that is fuller is mentioned: the next message may need the other half."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings about a program."""

    sentences: tuple[str, ...]  # the most important first
    culprits: tuple[WaitNode, ...]  # the blocking processes
    sample: tuple[WaitNode, ...]  # to show stacks of: culprits, or an idle one's first waiter
    is_hang: bool  # False if all waits are readers without a message


def diagnose(program: Program) -> Diagnosis:
    """Return who waits for whom in a program, and the culprits."""
    nodes = wait_graph(program.boards)
    sentences = [
        f"The group{f' {board.name}' if board.name else ''} was aborted: {board.failure}."
        for board in program.boards
        if board.failure is not None
    ]
    ends = sorted(
        (each for each in nodes.values() if each.waited_by and not each.waits_for),
        key=lambda each: (not (each.problem or each.closed), each.order),
    )
    culprits = [each for each in ends if each.problem or not each.only_read_from]
    sentences += _blame(culprits, "hold", "up others")
    cycle = find_cycle(nodes)
    sentences += _cycle_sentences(cycle)
    names = {id(each): node.name for node in nodes.values() for each in node.members}
    for board in program.boards:
        by_rank = {each.status.rank: names[id(each)] for each in board.members}
        sentences += [_full(queue, by_rank) for queue in board.queues if _is_full(queue)]
    is_hang = bool(culprits or cycle)
    if not is_hang:
        if ends:
            sentences.append("Readers wait for messages. This is a hang only if one is due:")
        elif not sentences:
            sentences.append("No process has waited for another for a tenth of a second.")
        sentences += _blame(ends, "send", "nothing")
        culprits = ends
    sentences += [line for board in program.boards for line in _closed_by_some(board, nodes, names)]
    sample = [_first_waiting(each) if each.idle or each.closed else each for each in culprits]
    sample = [each for each in dict.fromkeys(sample) if each.status.state != "absent"]
    return Diagnosis(tuple(sentences), (*culprits, *cycle), (*sample, *cycle), is_hang)


def _blame(culprits: Sequence[WaitNode], verb: str, what: str) -> list[str]:
    """Return a sentence per culprit, each followed by its direct and indirect waits.

    Culprits that block the same nodes are reported together.
    """
    reach = {each.name: {node.name for node, _ in _held_up([each])} for each in culprits}
    sentences, left = [], list(culprits)
    while left:
        held_up = reach[left[0].name]
        while (grown := held_up.union(*(s for s in reach.values() if s & held_up))) != held_up:
            held_up = grown
        alike = [each for each in left if reach[each.name] & held_up]
        left = [each for each in left if each not in alike]
        absent = [each.name for each in alike if each.status.state == "absent"]
        if len(absent) > 1:
            why = "they have not joined, or run on another host"
            sentences.append(f"{_title(_some(absent))} {verb} {what}: {why}.")
        sentences += [
            f"{_title(each.who)} {verb}s {what}: {each.reason()}."
            for each in alike
            if len(absent) < 2 or each.name not in absent
        ]
        waits = []
        for node, late in _held_up(alike):
            waiting = node.waits_for[late.name]
            also = [each for each in alike if node.waits_for.get(each.name) == waiting]
            waits.append(_wait(node, also or [late]))
        sentences += waits[:_MOST_WAITS]
        if len(waits) > _MOST_WAITS:
            sentences.append(f"  And {len(waits) - _MOST_WAITS} more wait.")
    return sentences


def _held_up(culprits: Sequence[WaitNode]) -> Iterator[tuple[WaitNode, WaitNode]]:
    reached, todo = {each.name for each in culprits}, list(culprits)
    while todo:
        late = todo.pop(0)
        for node in sorted(late.waited_by, key=lambda each: each.order):
            if node.name not in reached:
                reached.add(node.name)
                todo.append(node)
                yield node, late


def _wait(node: WaitNode, late: Sequence[WaitNode]) -> str:
    waiting = node.waits_for[late[0].name]
    return (
        f"  {_title(node.who)} waits for {_some([each.name for each in late])} in "
        f"{waiting.operation}, for {waiting.seconds:.1f} s."
    )


def _cycle_sentences(cycle: list[WaitNode]) -> list[str]:
    if not cycle:
        return []
    members = _title(_listed([each.who for each in cycle]))
    sentences = [f"{members} wait for each other, so none goes on."]
    waits = []
    for node, late in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        sentences.append(_wait(node, [late]))
        waits.append((node, node.waits_for[late.name]))
    if len({waiting.verb for _, waiting in waits}) > 1:
        each = ", ".join(f"{waiting.operation} on {node.name}" for node, waiting in waits)
        sentences.append(f"Their operations differ; the first ones that do: {each}.")
    elif waits[0][1].verb.endswith(" recv"):
        sentences.append("All of them receive, and none has sent.")
    return sentences


def _first_waiting(late: WaitNode) -> WaitNode:
    return min(late.waited_by, key=lambda each: (each.is_driver, each.order))


def _closed_by_some(
    board: BoardSnapshot, nodes: Mapping[str, WaitNode], names: Mapping[int, str]
) -> list[str]:
    """Return who has closed a group that others have open, unless a culprit's reason has it.

    ``names``: the members' names, by their `id`.
    """
    reported = {node.closed for node in nodes.values()}
    closed: dict[Membership, list[str]] = defaultdict(list)
    open_: dict[Membership, list[str]] = defaultdict(list)
    for member in board.members:
        for each in member.groups:
            (closed if each.closed else open_)[replace(each, rank=0)].append(names[id(member)])
    return [
        f"{_title(_some(closers))} {_has(closers)} closed {group.name}, "
        f"which {_some(open_[group])} {_has(open_[group])} open."
        for group, closers in closed.items()
        if group in open_ and group.name not in reported
    ]


def _is_full(queue: QueueSnapshot) -> bool:
    return not queue.closed and queue.behind > 0 and queue.used > _FULL * queue.capacity


def _full(queue: QueueSnapshot, names: Mapping[int, str]) -> str:
    slow = [names[each.rank] for each in queue.readers if each.behind == queue.behind]
    percent, size = 100 * queue.used // queue.capacity, queue.capacity >> 10
    unread = counted(queue.behind, "message")
    return (
        f"The queue from {names[queue.writer]}, of {size} KiB, is {percent} % full: "
        f"{_some(slow)} {_has(slow)} {unread} to read."
    )


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return _listed(names if more < 2 else [*names[:_NAMED], f"{more} more"])


def _has(names: list[str]) -> str:
    return "has" if len(names) == 1 else "have"


def _title(text: str) -> str:
    return text[0].upper() + text[1:]


def stacks_of(nodes: Iterable[WaitNode], deadline: Deadline) -> dict[str, str]:
    """Return the Python stacks of ``nodes``, or the reasons for missing ones, by name.

    Waits for the stacks until the deadline. A process that does not catch the signal gets none.
    """
    texts: dict[str, str] = {}
    with ExitStack() as closing:
        files: dict[int, StackFile] = {}
        pidfds: dict[int, int] = {}
        names: dict[int, str] = {}
        for node in nodes:
            pid = node.status.pid
            descriptor = next((m.stacks for m in node.members if m.stacks is not None), None)
            texts[node.name] = node.problem or "it catches no signal for that"
            if node.problem or descriptor is None:
                continue
            try:
                pidfds[pid] = os.pidfd_open(pid)
                closing.callback(os.close, pidfds[pid])
                # Checked after the pidfd is open, so of the same process that gets the signal.
                if catches(pid, STACK_SIGNAL):
                    files[pid] = StackFile.of(pid, descriptor)
                    closing.callback(files[pid].close)
                    names[pid] = node.name
            except OSError as error:
                texts[node.name] = f"it cannot be asked: {error.strerror}"

        def ask(pid: int) -> None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfds[pid], STACK_SIGNAL)

        texts |= dict.fromkeys(names.values(), "it did not answer in time")
        stacks = read_stacks(files, {pid: pid for pid in files}, ask, deadline)
        texts |= {names[pid]: stack.rstrip() for pid, stack in stacks.items()}
    return texts


def own_programs() -> list[Program]:
    """Return the programs of this process, as far as they run on this host.

    Takes some milliseconds: it scans all processes of this user. Raises OSError if /proc cannot be
    read, for example without a free descriptor.
    """
    seen = scan()
    return of_process(os.getpid(), seen, programs(seen))


def own_diagnoses(elsewhere: Sequence[HostSnapshot] = ()) -> list[Diagnosis]:
    """Return a diagnosis of each program of this process, including ``elsewhere``.

    Raises OSError as `own_programs`, and takes as long.
    """
    return [diagnose(merge_hosts(each, elsewhere)) for each in own_programs()]
