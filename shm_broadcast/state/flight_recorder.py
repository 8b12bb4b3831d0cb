"""Record the last operations of each member, and count all of them by group and verb.

They are stored on the board, so its other members and outside observers can read them, even after
the member has been killed. `shm_broadcast.layout` has their layout; `Board.stamp` and
`Board.ended`, and the C extensions, write them.

A history forgets its oldest entries, totals do not: a reader that looks now and then misses
nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from shm_broadcast import layout
from shm_broadcast.atomics import SharedBytes, text_of
from shm_broadcast.errors import (
    DivergenceError,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    PeerLostError,
)

_ENTRY: Final = struct.Struct(layout.ENTRY_FORMAT)

_ATTEMPTS: Final = 10
"""How often to read, if a writer overtakes the reader each time."""

_ERRORS: Final = (
    (GroupTimeoutError, "timed out"),
    (PeerLostError, "peer lost"),
    (GroupAbortedError, "aborted"),
    (DivergenceError, "diverged"),
    (GroupClosedError, "closed"),
)


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """An operation of a member.

    Attributes:
        verb: ``"all_reduce"``, ``"enqueue"``; of another operation what it was called.
        group: the group, the first 23 bytes of its name; ``""`` for one that has none.
        begin: monotonic ns.
        end: monotonic ns; None: it is under way, or was when its process ended.
        outcome: one of `layout.OUTCOME_NAMES`.
        sequence: its number among the member's operations, as `MemberStatus.sequence`.
        number: its number among the rank's collectives in the group, or among its messages to or
            from that peer; a queue's message has its number there. 0: it is not known.
        size: bytes that this member gave, or got in a receive; of a message its encoded size.
        peer: the root or the other rank, in the group.
        dtype: the name of the tensor's dtype; ``""`` where there is no tensor.
    """

    verb: str
    group: str
    begin: int
    end: int | None
    outcome: str
    sequence: int
    number: int
    size: int
    peer: int | None
    dtype: str


def outcome_of(error: BaseException) -> int:
    """The code of how an operation ended that raised ``error``."""
    name = next((name for kind, name in _ERRORS if isinstance(error, kind)), "failed")
    return layout.OUTCOME_NAMES.index(name)


def read_history(
    memory: SharedBytes, member: int, n_members: int, read: Callable[[int, int], bytes]
) -> tuple[OperationRecord, ...]:
    """The last operations of a member, the oldest first; () if the board keeps none.

    Args:
        memory: the board's, as far as its histories at least.
        member: a member number.
        n_members: of the board.
        read: bytes of the board as they are now: their offset, and how many.
    """
    kept = memory.words.load32(layout.BOARD_HISTORY)
    if kept != layout.HISTORY_ENTRIES:
        return ()

    def sequence() -> int:
        at = layout.member_slot(member) + layout.MEMBER_SEQUENCE
        return int.from_bytes(read(at, 8), "little")

    for _ in range(_ATTEMPTS):
        last = sequence()
        memory.words.fence()  # the entries are read after the first sequence, before the second
        data = read(layout.history_slot(member, n_members), kept * layout.ENTRY_STRIDE)
        memory.words.fence()
        # The one after the last may have been half written over the oldest one.
        first = max(sequence() + 2 - kept, 1)
        # A reader that is stalled between these finds that all were overwritten, within 1 ms.
        if first <= last or not last:
            break
    found = []
    for wanted in range(first, last + 1):
        at = (wanted - 1) % kept * layout.ENTRY_STRIDE
        past = _decoded(_ENTRY.unpack_from(data, at)) if at < len(data) else None
        if past is not None and past.sequence == wanted:
            found.append(past)
    return tuple(found)


def _decoded(fields: tuple[int, int, int, int, int, int, int, int, int, bytes]) -> OperationRecord:
    begin, end, sequence, size, number, peer, verb, dtype, outcome, raw = fields
    group = text_of(raw)
    known = 0 < verb < len(layout.DID_NAMES)
    # The end is stored after the outcome, but may have been copied before it.
    told = outcome if 0 < outcome < len(layout.OUTCOME_NAMES) else layout.OUTCOME_DONE
    return OperationRecord(
        verb=layout.DID_NAMES[verb] if known else group,
        group=group if known else "",
        begin=begin,
        end=end or None,
        outcome=layout.OUTCOME_NAMES[told if end else 0],
        sequence=sequence,
        number=number,
        size=size,
        peer=None if peer == layout.NO_PEER else peer,
        dtype=layout.DTYPE_NAMES[dtype] if 0 < dtype < len(layout.DTYPE_NAMES) else "",
    )


_NAME: Final = struct.Struct(f"{layout.ENTRY_GROUP_BYTES}sx")
_TOTAL: Final = struct.Struct("<QQQQ")

FURTHER_GROUPS: Final = "(further groups)"
"""Stands for the groups of a member beyond the first 14 that did something."""


@dataclass(frozen=True, slots=True)
class VerbTotal:
    """What the operations of one verb in one group came to. Those under way are not in it.

    Attributes:
        group: the first 23 bytes of its name; ``""`` for queues.
        verb: as in `OperationRecord`.
        ended: how many have ended.
        failed: how many of them were not done.
        seconds: from their begin to their end, waiting for others included.
        size: their bytes, as in `OperationRecord`.
    """

    group: str
    verb: str
    ended: int
    failed: int
    seconds: float
    size: int

    def __add__(self, other: VerbTotal) -> VerbTotal:
        """Both together, of the same group and verb."""
        return VerbTotal(
            self.group,
            self.verb,
            self.ended + other.ended,
            self.failed + other.failed,
            self.seconds + other.seconds,
            self.size + other.size,
        )


def read_totals(memory: SharedBytes, member: int, n_members: int) -> tuple[VerbTotal, ...]:
    """The totals of a member's operations; () if the board keeps none."""
    if not memory.words.load32(layout.BOARD_HISTORY):
        return ()
    history = layout.history_slot(member, n_members)
    names, rows = history + layout.TOTALS, history + layout.TOTALS_ROWS
    found = []
    for group in range(layout.TOTAL_GROUPS):
        for verb in range(1, layout.TOTAL_VERBS):
            row = rows + (group * layout.TOTAL_VERBS + verb) * layout.TOTAL_STRIDE
            # Stored after the rest and the name, with release, so loaded before them, with acquire.
            if ended := memory.words.load64(row + layout.TOTAL_ENDED):
                _, failed, ns, size = _TOTAL.unpack_from(memory.memory, row)
                (raw,) = _NAME.unpack_from(memory.memory, names + group * layout.TOTAL_NAME_STRIDE)
                name = FURTHER_GROUPS if group == layout.TOTAL_GROUPS - 1 else text_of(raw)
                verb_name = layout.DID_NAMES[verb]
                found.append(VerbTotal(name, verb_name, ended, failed, ns / 1e9, size))
    return tuple(found)


def added_up(totals: Iterable[VerbTotal]) -> tuple[VerbTotal, ...]:
    """One for each group and verb."""
    found: dict[tuple[str, str], VerbTotal] = {}
    for each in totals:
        key = each.group, each.verb
        found[key] = found[key] + each if key in found else each
    return tuple(found.values())


def forget_totals(memory: SharedBytes, member: int, n_members: int) -> None:
    """Begin to count anew: another process is the member now."""
    if memory.words.load32(layout.BOARD_HISTORY):
        at = layout.history_slot(member, n_members) + layout.TOTALS
        memory.words.write(at, bytes(layout.HISTORY_STRIDE - layout.TOTALS))
