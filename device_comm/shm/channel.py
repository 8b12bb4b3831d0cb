"""One-way channels between two ranks: a ring of bytes, and overflow memory beside it.

A spill is a segment: its sender marks it as taken and fills it, posts a chunk about it, and does
not touch it before the receiver has copied it out and freed the mark::

    64   | taken u32 |
    128  | data ...  |

Reused spills have their pages mapped already, in both processes, which saves four times the cost of
the copy. So a few spills are kept. If all of these are taken, a transfer uses spills that are not
kept, each twice as large as the one before, so that a few suffice.

A pipe is a segment of its own (`device_comm.shm.transfers` makes and finds it)::

    64   | posted u64: bytes of chunks written, by the sender |
    128  | taken u64: bytes of chunks read, by the receiver   |
    136  | reads u32 x 2, by the receiver: as of a rank of a group, in `device_comm.shm.layout` |
    192  | ring of RING_BYTES: chunks in a row                |

    Chunk, at a multiple of 64; where the ring ends, its data goes on at the beginning
     0   | kind u8 | dtype u8 | kept u8 | - | fd u32 | total u64 | offset u64 | used u64 |
     32  | spill: size u64, nonce 16 bytes | call u32 | -                                |
     64  | ``used`` bytes of data and what fills up 64, unless they are in the spill         |

A chunk brings ``used`` bytes of a transfer of ``total`` bytes, from ``offset`` on: inside, or in a
spill (`device_comm.shm.channel`). A transfer of no bytes is one chunk, without data. Its call
is the sender's (`device_comm.call_number`). Large transfers are cut into chunks of `PIECE_BYTES`,
so that both ends copy at the same time. The last `RESERVED_BYTES` of room are for chunks about
spills and for the ends of transfers up to `SMALL_BYTES`: however large transfers are, some
never lack room.

The sender writes a chunk, then stores ``posted`` with release; the receiver loads it with acquire,
reads the chunk, and stores ``taken`` with release, which the sender loads with acquire before it
writes there again. Both then ring the other's doorbell.
"""

from __future__ import annotations

import struct
import threading
from typing import Final, NamedTuple

from device_comm.span import address_of
from shm_broadcast._native import Words
from shm_broadcast.layout import align
from shm_broadcast.segment import Segment, SegmentHandle

SMALLEST_ROOM: Final = 64 << 10
KEPT_ROOM: Final = 1 << 20
OVERFLOW_KEPT_BYTES: Final = 4 << 20
EAGER_BYTES: Final = 64 << 20
"""What may wait for its receivers in spills, besides one tensor of any size."""

_TAKEN = 64
_DATA = 128


class OverflowBuffer:
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


class SentOverflow(OverflowBuffer):
    """A spill at its sender, which owns the memory."""

    def __init__(self, room: int, kept: bool) -> None:
        super().__init__(Segment.create(room + _DATA, "group-spill"), kept)
        self.handle = self.segment.handle()


class OverflowPool:
    """The spills that one rank sends. Thread-safe: transfers to several ranks go on at once."""

    def __init__(self) -> None:
        self._overflows: list[SentOverflow] = []
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of all spills, in use and kept."""
        with self._lock:
            return sum(overflow.segment.size for overflow in self._overflows)

    @property
    def waiting(self) -> int:
        """Bytes of the spills that have not been emptied."""
        with self._lock:
            return sum(overflow.room for overflow in self._overflows if overflow.taken)

    def allow(self, wanted: int) -> bool:
        """Whether ``wanted`` bytes of one more transfer may wait in spills."""
        waiting = self.waiting
        return waiting == 0 or waiting + wanted <= EAGER_BYTES

    def take(self, wanted: int, spare: int) -> SentOverflow:
        """A spill with room for ``wanted`` bytes, or for a good part of them, marked as taken.

        Args:
            wanted: bytes still to be sent.
            spare: the least room of a spill that is not kept, unless less is wanted.

        Raises:
            SharedMemoryError: too little memory is free.
        """
        self.forget()
        with self._lock:
            overflow = self._free_or_new(wanted, spare)
            overflow.mark(taken=True)
            return overflow

    def forget(self) -> None:
        """Close the spills that have been emptied and are not kept."""
        with self._lock:
            for overflow in [each for each in self._overflows if not each.kept and not each.taken]:
                overflow.segment.close()
                self._overflows.remove(overflow)

    def close(self) -> None:
        """Close all spills. Receivers can still copy out of those that they have opened."""
        with self._lock:
            for overflow in self._overflows:
                overflow.segment.close()
            self._overflows.clear()

    def _free_or_new(self, wanted: int, spare: int) -> SentOverflow:
        room = min(align(wanted, SMALLEST_ROOM), KEPT_ROOM)
        found = self._free(room)
        if found is None and self._kept() + room <= OVERFLOW_KEPT_BYTES:
            return self._make(room, kept=True)
        return found or self._make(min(wanted, max(spare, 2 * KEPT_ROOM)), kept=False)

    def _free(self, room: int) -> SentOverflow | None:
        for overflow in self._overflows:
            if overflow.kept and overflow.room >= room and not overflow.taken:
                return overflow
        return None

    def _make(self, room: int, *, kept: bool) -> SentOverflow:
        overflow = SentOverflow(room, kept)
        self._overflows.append(overflow)
        return overflow

    def _kept(self) -> int:
        return sum(overflow.room & -SMALLEST_ROOM for overflow in self._overflows if overflow.kept)


class ReceivedOverflow:
    """The spills of one sender, as their receiver sees them."""

    def __init__(self) -> None:
        self._known: dict[bytes, OverflowBuffer] = {}

    def find(self, handle: SegmentHandle, kept: bool) -> OverflowBuffer:
        """The spill that ``handle`` names.

        Raises:
            SharedMemoryError: the sender has ended.
        """
        overflow = self._known.get(handle.nonce)
        if overflow is None:
            overflow = OverflowBuffer(Segment.attach(handle), kept)
            if kept:
                self._known[handle.nonce] = overflow
        return overflow

    def close(self) -> None:
        """Close all spills that were opened."""
        for overflow in self._known.values():
            overflow.segment.close()
        self._known.clear()


POSTED: Final = 64
TAKEN: Final = 128
READS: Final = 136
RING: Final = 192
RING_BYTES: Final = 1 << 20
"""For the same reason as the rings of a group are long: see `device_comm.shm.layout`."""
PIECE_BYTES: Final = 64 << 10
RESERVED_BYTES: Final = 16 << 10
SMALL_BYTES: Final = 192
HEADER_BYTES: Final = 64
AT_ONCE_BYTES: Final = 16 << 20
"""After so many, ``Pipe.push`` and ``Pipe.pull`` return: for deadlines, aborts and handlers."""

INSIDE: Final = 1
OVERFLOW: Final = 2

_CHUNK = struct.Struct("<BBBxIQQQQ16sI4x")


class Chunk(NamedTuple):
    """What a chunk says.

    Attributes:
        kind: `INSIDE` or `OVERFLOW`.
        dtype: the code of the transfer's elements.
        kept: the spill will be used again.
        fd: the descriptor of the spill's segment in the sender.
        total: bytes of the transfer.
        offset: where in the transfer these bytes belong.
        used: how many they are.
        size: of the spill's segment.
        nonce: of that segment.
        call: the number of the sender's call.
    """

    kind: int
    dtype: int
    kept: bool
    fd: int
    total: int
    offset: int
    used: int
    size: int = 0
    nonce: bytes = b""
    call: int = 0

    @property
    def size_in_ring(self) -> int:
        """Bytes that it takes in a pipe."""
        return HEADER_BYTES + (align(self.used, HEADER_BYTES) if self.kind == INSIDE else 0)

    def continues(self, total: int, dtype: int, call: int, offset: int) -> bool:
        """Whether it brings what comes next of a transfer."""
        about = (self.total, self.dtype, self.call, self.offset)
        some = 0 < self.used <= total - offset or self.used == total == 0
        return some and about == (total, dtype, call, offset)


def wanted_room(left: int) -> int:
    """The room that a chunk needs with the next of ``left`` bytes in it, and leaves reserved."""
    reserved = 0 if left <= SMALL_BYTES else RESERVED_BYTES
    return HEADER_BYTES + align(min(left, PIECE_BYTES), HEADER_BYTES) + reserved


def post(words: Words, chunk: Chunk) -> None:
    """Post a chunk whose data, if any, is in place. There is room."""
    posted = words.load64(POSTED)
    words.write(RING + posted % RING_BYTES, _CHUNK.pack(*chunk))
    words.store64(POSTED, posted + chunk.size_in_ring)


def has_chunk(segment: Segment) -> bool:
    """Whether one has come that has not been taken."""
    return segment.words.load64(POSTED) != segment.words.load64(TAKEN)


def peek(segment: Segment) -> Chunk | None:
    """The next chunk, left in the pipe; None if there is none."""
    if not has_chunk(segment):
        return None
    taken = segment.words.load64(TAKEN)
    return Chunk(*_CHUNK.unpack_from(segment.memory, RING + taken % RING_BYTES))


def take(words: Words, chunk: Chunk) -> None:
    """Give the room of the next chunk back, which is ``chunk``."""
    words.store64(TAKEN, words.load64(TAKEN) + chunk.size_in_ring)
