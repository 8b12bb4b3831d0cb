"""Memory of its own for data that does not fit a box, used again and again.

A parcel is a segment: its sender marks it as taken and fills it, posts a letter about it, and does
not touch it before the receiver has copied it out and freed the mark::

    64   | taken u32 |
    128  | data ...  |

The pages of parcels that are used again are mapped already, in both processes, which is worth four
times the copy. So a few parcels are kept. Where these are all taken, a message takes parcels that
are not kept, of twice the size each time, so that a few hold it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from device_comm.shm.memory import address_of
from shm_broadcast.layout import align
from shm_broadcast.segment import Segment

if TYPE_CHECKING:
    from shm_broadcast.segment import SegmentHandle

SMALLEST_ROOM: Final = 64 << 10
KEPT_ROOM: Final = 1 << 20
KEPT_BYTES: Final = 4 << 20
AHEAD_BYTES: Final = 64 << 20
"""What may wait for its receivers in parcels, besides one message of any size."""

_TAKEN = 64
_DATA = 128


class Parcel:
    """One parcel, at either end."""

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


class SentParcel(Parcel):
    """One at its sender's."""

    def __init__(self, room: int, kept: bool) -> None:
        super().__init__(Segment.create(room + _DATA, "group-parcel"), kept)
        self.handle = self.segment.handle()


class ParcelPool:
    """The parcels that one rank sends. Thread-safe: lanes to several ranks go on at once."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        """Keep parcels with room for ``kept_bytes``."""
        self._kept_limit = kept_bytes
        self._parcels: list[SentParcel] = []
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of all parcels, in use and kept."""
        with self._lock:
            return sum(parcel.segment.size for parcel in self._parcels)

    @property
    def waiting(self) -> int:
        """Bytes of the parcels that have not been emptied."""
        with self._lock:
            return sum(parcel.room for parcel in self._parcels if parcel.taken)

    def allow(self, wanted: int) -> bool:
        """Whether ``wanted`` bytes of one more message may wait in parcels."""
        waiting = self.waiting
        return waiting == 0 or waiting + wanted <= AHEAD_BYTES

    def take(self, wanted: int, spare: int) -> SentParcel:
        """A parcel with room for ``wanted`` bytes, or for a good part of them, marked as taken.

        Args:
            wanted: bytes still to be sent.
            spare: the least room of a parcel that is not kept, unless less is wanted.

        Raises:
            SharedMemoryError: too little memory is free.
        """
        with self._lock:
            self._forget()
            parcel = self._free_or_new(wanted, spare)
            parcel.mark(taken=True)
            return parcel

    def close(self) -> None:
        """Let go of all. What receivers have found already, they can still copy out."""
        with self._lock:
            for parcel in self._parcels:
                parcel.segment.close()
            self._parcels.clear()

    def _free_or_new(self, wanted: int, spare: int) -> SentParcel:
        room = min(align(wanted, SMALLEST_ROOM), KEPT_ROOM)
        found = self._free(room)
        if found is None and self._kept() + room <= self._kept_limit:
            return self._make(room, kept=True)
        return found or self._make(min(wanted, max(spare, 2 * KEPT_ROOM)), kept=False)

    def _free(self, room: int) -> SentParcel | None:
        for parcel in self._parcels:
            if parcel.kept and parcel.room >= room and not parcel.taken:
                return parcel
        return None

    def _make(self, room: int, *, kept: bool) -> SentParcel:
        parcel = SentParcel(room, kept)
        self._parcels.append(parcel)
        return parcel

    def _kept(self) -> int:
        return sum(parcel.room & -SMALLEST_ROOM for parcel in self._parcels if parcel.kept)

    def _forget(self) -> None:
        for parcel in [each for each in self._parcels if not each.kept and not each.taken]:
            parcel.segment.close()
            self._parcels.remove(parcel)


class ReceivedParcels:
    """The parcels of one sender, as their receiver sees them."""

    def __init__(self) -> None:
        self._known: dict[bytes, Parcel] = {}

    def find(self, handle: SegmentHandle, kept: bool) -> Parcel:
        """The parcel that ``handle`` names.

        Raises:
            SharedMemoryError: the sender has ended.
        """
        parcel = self._known.get(handle.nonce)
        if parcel is None:
            parcel = Parcel(Segment.attach(handle), kept)
            if kept:
                self._known[handle.nonce] = parcel
        return parcel

    def close(self) -> None:
        """Let go of all."""
        for parcel in self._known.values():
            parcel.segment.close()
        self._known.clear()
