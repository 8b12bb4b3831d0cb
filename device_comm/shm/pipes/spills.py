"""Spills: shared memory for data that does not fit into a pipe, used again and again.

A spill is a segment: its sender marks it as taken and fills it, posts a chunk about it, and does
not touch it before the receiver has copied it out and freed the mark::

    64   | taken u32 |
    128  | data ...  |

Reused spills have their pages mapped already, in both processes, which saves four times the cost of
the copy. So a few spills are kept. If all of these are taken, a transfer uses spills that are not
kept, each twice as large as the one before, so that a few suffice.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from device_comm.span import address_of
from shm_broadcast.layout import align
from shm_broadcast.segment import Segment

if TYPE_CHECKING:
    from shm_broadcast.segment import SegmentHandle

SMALLEST_ROOM: Final = 64 << 10
KEPT_ROOM: Final = 1 << 20
SPILL_KEPT_BYTES: Final = 4 << 20
AHEAD_BYTES: Final = 64 << 20
"""What may wait for its receivers in spills, besides one tensor of any size."""

_TAKEN = 64
_DATA = 128


class Spill:
    """One spill, at either end."""

    def __init__(self, segment: Segment, kept: bool) -> None:
        self.segment = segment
        self.kept = kept
        self.room = segment.size - _DATA
        self.address = address_of(segment) + _DATA

    @property
    def taken(self) -> bool:
        """Whether data is in it that nobody has copied out."""
        return self.segment.words.load32(_TAKEN) != 0

    def mark(self, *, taken: bool) -> None:
        """Sender: data is in it. Receiver: it has been copied out."""
        self.segment.words.store32(_TAKEN, int(taken))


class SentSpill(Spill):
    """A spill at its sender, which owns the memory."""

    def __init__(self, room: int, kept: bool) -> None:
        super().__init__(Segment.create(room + _DATA, "group-spill"), kept)
        self.handle = self.segment.handle()


class SpillPool:
    """The spills that one rank sends. Thread-safe: transfers to several ranks go on at once."""

    def __init__(self) -> None:
        self._spills: list[SentSpill] = []
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of all spills, in use and kept."""
        with self._lock:
            return sum(spill.segment.size for spill in self._spills)

    @property
    def waiting(self) -> int:
        """Bytes of the spills that have not been emptied."""
        with self._lock:
            return sum(spill.room for spill in self._spills if spill.taken)

    def allow(self, wanted: int) -> bool:
        """Whether ``wanted`` bytes of one more transfer may wait in spills."""
        waiting = self.waiting
        return waiting == 0 or waiting + wanted <= AHEAD_BYTES

    def take(self, wanted: int, spare: int) -> SentSpill:
        """A spill with room for ``wanted`` bytes, or for a good part of them, marked as taken.

        Args:
            wanted: bytes still to be sent.
            spare: the least room of a spill that is not kept, unless less is wanted.

        Raises:
            SharedMemoryError: too little memory is free.
        """
        self.forget()
        with self._lock:
            spill = self._free_or_new(wanted, spare)
            spill.mark(taken=True)
            return spill

    def forget(self) -> None:
        """Close the spills that have been emptied and are not kept."""
        with self._lock:
            for spill in [each for each in self._spills if not each.kept and not each.taken]:
                spill.segment.close()
                self._spills.remove(spill)

    def close(self) -> None:
        """Close all spills. Receivers can still copy out of those that they have opened."""
        with self._lock:
            for spill in self._spills:
                spill.segment.close()
            self._spills.clear()

    def _free_or_new(self, wanted: int, spare: int) -> SentSpill:
        room = min(align(wanted, SMALLEST_ROOM), KEPT_ROOM)
        found = self._free(room)
        if found is None and self._kept() + room <= SPILL_KEPT_BYTES:
            return self._make(room, kept=True)
        return found or self._make(min(wanted, max(spare, 2 * KEPT_ROOM)), kept=False)

    def _free(self, room: int) -> SentSpill | None:
        for spill in self._spills:
            if spill.kept and spill.room >= room and not spill.taken:
                return spill
        return None

    def _make(self, room: int, *, kept: bool) -> SentSpill:
        spill = SentSpill(room, kept)
        self._spills.append(spill)
        return spill

    def _kept(self) -> int:
        return sum(spill.room & -SMALLEST_ROOM for spill in self._spills if spill.kept)


class ReceivedSpills:
    """The spills of one sender, as their receiver sees them."""

    def __init__(self) -> None:
        self._known: dict[bytes, Spill] = {}

    def find(self, handle: SegmentHandle, kept: bool) -> Spill:
        """The spill that ``handle`` names.

        Raises:
            SharedMemoryError: the sender has ended.
        """
        spill = self._known.get(handle.nonce)
        if spill is None:
            spill = Spill(Segment.attach(handle), kept)
            if kept:
                self._known[handle.nonce] = spill
        return spill

    def close(self) -> None:
        """Close all spills that were opened."""
        for spill in self._known.values():
            spill.segment.close()
        self._known.clear()
