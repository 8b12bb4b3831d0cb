"""Totals of all operations of a member, by group and verb; see `shm_broadcast.layout`.

A history forgets its oldest entries, totals do not: a reader that looks now and then misses
nothing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shm_broadcast import layout
from shm_broadcast.board.fixed_text import text_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shm_broadcast.board.fixed_text import SharedBytes

_NAME: Final = struct.Struct(f"{layout.ENTRY_GROUP_BYTES}sx")
_TOTAL: Final = struct.Struct("<QQQQ")

FURTHER_GROUPS: Final = "(further groups)"
"""Stands for the groups of a member beyond the first 14 that did something."""


@dataclass(frozen=True, slots=True)
class VerbTotal:
    """What the operations of one verb in one group came to. Those under way are not in it.

    Attributes:
        group: the first 23 bytes of its name; ``""`` for queues.
        verb: as in `PastOperation`.
        ended: how many have ended.
        failed: how many of them were not done.
        seconds: from their begin to their end, waiting for others included.
        size: their bytes, as in `PastOperation`.
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
