"""Which process of a program holds the others up: conclusions from its boards, in sentences.

Those that are waited for and wait for nobody hold the others up. Where there are none, those that
wait for each other do. `parties` finds out who waits for whom.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from shm_broadcast.errors import counted
from shm_broadcast.onlooker.parties import knot_of, parties_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shm_broadcast.board.outward import Membership
    from shm_broadcast.onlooker.parties import Party
    from shm_broadcast.onlooker.programs import BoardSeen, Program, QueueSeen

_NAMED: Final = 8
"""How many of those of whom the same is said are named."""

_MOST_WAITS: Final = 16
"""How many of those that wait because of the same ones are told."""

_FULL: Final = 0.5
"""A queue that is full to this degree is mentioned: the next message may need the other half."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be said about a program.

    Attributes:
        sentences: in plain words, the most important first.
        culprits: because of whom others wait.
        asked: those whose stacks tell the most: the culprits that have come, but for one that takes
            no part, or has closed the group, who waits for it.
        held_up: whether they should not have to: it is more than readers that no message is for.
    """

    sentences: tuple[str, ...]
    culprits: tuple[Party, ...]
    asked: tuple[Party, ...]
    held_up: bool


def judge(program: Program) -> Verdict:
    """Say who waits for whom in a program, and because of whom."""
    parties = parties_of(program.boards)
    told = [
        f"The group{f' {board.name}' if board.name else ''} was aborted: {board.failure}."
        for board in program.boards
        if board.failure is not None
    ]
    ends = sorted(
        (each for each in parties.values() if each.awaited_by and not each.waits_on),
        key=lambda each: (not (each.fault or each.closed), each.order),
    )
    culprits = [each for each in ends if each.fault or not each.only_read_from]
    told += _tell(culprits, "hold", "up others")
    knot = knot_of(parties)
    told += _tell_knot(knot)
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
    return Verdict(tuple(told), (*culprits, *knot), (*asked, *knot), held_up)


def _tell(culprits: Sequence[Party], verb: str, what: str) -> list[str]:
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
            f"{_title(each.who)} {verb}s {what}: {each.holds_up()}."
            for each in alike
            if len(absent) < 2 or each.name not in absent
        ]
        waits = []
        for party, late in _held_up(alike):
            waiting = party.waits_on[late.name]
            also = [each for each in alike if party.waits_on.get(each.name) == waiting]
            waits.append(_wait(party, also or [late]))
        told += waits[:_MOST_WAITS]
        if len(waits) > _MOST_WAITS:
            told.append(f"  And {len(waits) - _MOST_WAITS} more wait.")
    return told


def _held_up(culprits: Sequence[Party]) -> Iterator[tuple[Party, Party]]:
    """Each that waits for one of them, also because of others, with the one that it waits for."""
    reached, todo = {each.name for each in culprits}, list(culprits)
    while todo:
        late = todo.pop(0)
        for party in sorted(late.awaited_by, key=lambda each: each.order):
            if party.name not in reached:
                reached.add(party.name)
                todo.append(party)
                yield party, late


def _wait(party: Party, late: Sequence[Party]) -> str:
    waiting = party.waits_on[late[0].name]
    return (
        f"  {_title(party.who)} waits for {_some([each.name for each in late])} in "
        f"{waiting.operation}, for {waiting.seconds:.1f} s."
    )


def _tell_knot(knot: list[Party]) -> list[str]:
    if not knot:
        return []
    told = [f"{_title(_listed([each.who for each in knot]))} wait for each other, so none goes on."]
    waits = []
    for party, late in zip(knot, [*knot[1:], knot[0]], strict=True):
        told.append(_wait(party, [late]))
        waits.append((party, party.waits_on[late.name]))
    if len({waiting.verb for _, waiting in waits}) > 1:
        each = ", ".join(f"{waiting.operation} on {party.name}" for party, waiting in waits)
        told.append(f"Their operations differ; the first ones that do: {each}.")
    elif waits[0][1].verb.endswith(" recv"):
        told.append("All of them receive, and none has sent.")
    return told


def _first_waiting(late: Party) -> Party:
    return min(late.awaited_by, key=lambda each: (each.drives, each.order))


def _closed_by_some(
    board: BoardSeen, parties: Mapping[str, Party], names: Mapping[int, str]
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


def _is_full(queue: QueueSeen) -> bool:
    return not queue.closed and queue.behind > 0 and queue.used > _FULL * queue.capacity


def _full(queue: QueueSeen, called: Mapping[int, str]) -> str:
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
