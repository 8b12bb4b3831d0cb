"""Memory of its own for data that does not fit a letter, used again and again.

A parcel is a segment: its sender fills it and marks it as taken, posts a letter about it, and does
not touch it before the receiver has copied it out and freed the mark::

    64   | taken u32 |
    128  | data ...  |

The pages of parcels that are used again are mapped already, in both processes, which is worth four
times the copy. A receiver that keeps up needs a few of them, whatever the size of the message;
where nobody receives, a message takes parcels of twice the size each time, so that a few hold it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from device_comm.shm.memory import address_of
from shm_broadcast.layout import align
from shm_broadcast.segment import Segment

if TYPE_CHECKING:
    from shm_broadcast.segment import SegmentHandle

SMALLEST_PARCEL: Final = 64 << 10
FIRST_PARCEL: Final = 1 << 20
KEPT_BYTES: Final = 4 << 20

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


class ParcelPool:
    """The parcels that one rank sends."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        """Keep at most ``kept_bytes`` of parcels that nobody uses."""
        self._kept_limit = kept_bytes
        self._parcels: list[Parcel] = []

    @property
    def size(self) -> int:
        """Bytes of all parcels, in use and kept."""
        return sum(parcel.segment.size for parcel in self._parcels)

    @property
    def waiting(self) -> bool:
        """Whether a parcel has not been emptied."""
        return any(parcel.taken for parcel in self._parcels)

    def take(self, wanted: int, largest: int) -> Parcel:
        """A free parcel with room for ``wanted`` bytes, or for a good part of them.

        Args:
            wanted: bytes still to be sent.
            largest: bytes of the largest parcel to make.

        Raises:
            SharedMemoryError: too little memory is free.
        """
        self._forget()
        enough = min(wanted, FIRST_PARCEL - _DATA)
        for parcel in self._parcels:
            if parcel.kept and parcel.room >= enough and not parcel.taken:
                return parcel
        room = align(max(min(wanted + _DATA, largest), SMALLEST_PARCEL), SMALLEST_PARCEL)
        kept = room <= FIRST_PARCEL and room + self._kept() <= self._kept_limit
        parcel = Parcel(Segment.create(room, "group-parcel"), kept)
        self._parcels.append(parcel)
        return parcel

    def close(self) -> None:
        """Let go of all. What receivers have found already, they can still copy out."""
        for parcel in self._parcels:
            parcel.segment.close()
        self._parcels.clear()

    def _kept(self) -> int:
        return sum(parcel.segment.size for parcel in self._parcels if parcel.kept)

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
