"""Record the last operations of each member, and count all of them by group and verb.

They are on the board, so other members and outside observers can read them, even after the member
has been killed. `shm_broadcast.layout` has their layout; `Board.record_begin`, `Board.record_end`
and the C extensions write them. A history overwrites its oldest entries; totals include all.
An operation whose entry is overwritten before its end counts as done at that moment.
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
"""How often to read if a writer overtakes the reader each time."""

_ERRORS: Final = (
    (GroupTimeoutError, "timed out"),
    (PeerLostError, "peer lost"),
    (GroupAbortedError, "aborted"),
    (DivergenceError, "diverged"),
    (GroupClosedError, "closed"),
)


@dataclass(frozen=True, slots=True)
class OperationRecord:
    """An operation of a member."""

    verb: str  # such as all_reduce, or the name of another operation
    group: str  # the first 23 bytes of its name; "" without a group
    begin: int  # monotonic ns
    end: int | None  # monotonic ns; None: under way, or its process exited in it
    outcome: str  # one of layout.OUTCOME_NAMES
    sequence: int  # as MemberStatus.sequence
    number: int  # among its collectives, its messages with that peer, or in its queue; 0: unknown
    size: int  # bytes of the input, or of the received or encoded message
    peer: int | None  # the root or the other rank, in the group
    dtype: str  # "" without a tensor


def outcome_of(error: BaseException) -> int:
    """Return the outcome code of an operation that raised ``error``."""
    name = next((name for kind, name in _ERRORS if isinstance(error, kind)), "failed")
    return layout.OUTCOME_NAMES.index(name)


def read_history(
    memory: SharedBytes, member: int, n_members: int, read: Callable[[int, int], bytes]
) -> tuple[OperationRecord, ...]:
    """Return a member's last operations, the oldest first; () if the board keeps none.

    ``read`` returns the board's present bytes, given their offset and number; ``memory`` may be
    older.
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
        # The next entry may be half written over the oldest one.
        first = max(sequence() + 2 - kept, 1)
        # If this reader stalled, even for 1 ms, all entries may have been overwritten.
        if first <= last or not last:
            break
    records = []
    for wanted in range(first, last + 1):
        at = (wanted - 1) % kept * layout.ENTRY_STRIDE
        record = _decoded(_ENTRY.unpack_from(data, at)) if at < len(data) else None
        if record is not None and record.sequence == wanted:
            records.append(record)
    return tuple(records)


def _decoded(fields: tuple[int, int, int, int, int, int, int, int, int, bytes]) -> OperationRecord:
    begin, end, sequence, size, number, peer, verb, dtype, outcome, raw = fields
    group = text_of(raw)
    known = 0 < verb < len(layout.DID_NAMES)
    # The end is stored after the outcome, but may have been copied before it.
    code = outcome if 0 < outcome < len(layout.OUTCOME_NAMES) else layout.OUTCOME_DONE
    return OperationRecord(
        verb=layout.DID_NAMES[verb] if known else group,
        group=group if known else "",
        begin=begin,
        end=end or None,
        outcome=layout.OUTCOME_NAMES[code if end else 0],
        sequence=sequence,
        number=number,
        size=size,
        peer=None if peer == layout.NO_PEER else peer,
        dtype=layout.DTYPE_NAMES[dtype] if 0 < dtype < len(layout.DTYPE_NAMES) else "",
    )


_NAME: Final = struct.Struct(f"{layout.ENTRY_GROUP_BYTES}sx")
_TOTAL: Final = struct.Struct("<QQQQ")

FURTHER_GROUPS: Final = "(further groups)"
"""Stands for the groups of a member beyond the first 14 with operations."""


@dataclass(frozen=True, slots=True)
class VerbTotal:
    """The sums over the ended operations of one verb in one group."""

    group: str  # the first 23 bytes of its name; "" for queues
    verb: str
    ended: int
    failed: int  # how many were not done
    seconds: float  # from begin to end, including waits for others
    size: int  # bytes, as in OperationRecord

    def __add__(self, other: VerbTotal) -> VerbTotal:
        return VerbTotal(
            self.group,
            self.verb,
            self.ended + other.ended,
            self.failed + other.failed,
            self.seconds + other.seconds,
            self.size + other.size,
        )


def read_totals(memory: SharedBytes, member: int, n_members: int) -> tuple[VerbTotal, ...]:
    """Return the totals of a member's operations; () if the board keeps none."""
    if not memory.words.load32(layout.BOARD_HISTORY):
        return ()
    history = layout.history_slot(member, n_members)
    names, rows = history + layout.TOTALS, history + layout.TOTALS_ROWS
    totals = []
    for group in range(layout.TOTAL_GROUPS):
        for verb in range(1, layout.TOTAL_VERBS):
            row = rows + (group * layout.TOTAL_VERBS + verb) * layout.TOTAL_STRIDE
            # Stored after the rest and the name, with release, so loaded before them, with acquire.
            if ended := memory.words.load64(row + layout.TOTAL_ENDED):
                _, failed, ns, size = _TOTAL.unpack_from(memory.memory, row)
                (raw,) = _NAME.unpack_from(memory.memory, names + group * layout.TOTAL_NAME_STRIDE)
                name = FURTHER_GROUPS if group == layout.TOTAL_GROUPS - 1 else text_of(raw)
                verb_name = layout.DID_NAMES[verb]
                totals.append(VerbTotal(name, verb_name, ended, failed, ns / 1e9, size))
    return tuple(totals)


def added_up(totals: Iterable[VerbTotal]) -> tuple[VerbTotal, ...]:
    """Return the sums for each group and verb."""
    sums: dict[tuple[str, str], VerbTotal] = {}
    for each in totals:
        key = each.group, each.verb
        sums[key] = sums[key] + each if key in sums else each
    return tuple(sums.values())


def forget_totals(memory: SharedBytes, member: int, n_members: int) -> None:
    """Clear the totals for a new process that is the member."""
    if memory.words.load32(layout.BOARD_HISTORY):
        at = layout.history_slot(member, n_members) + layout.TOTALS
        memory.words.write(at, bytes(layout.HISTORY_STRIDE - layout.TOTALS))
