"""Carry messages from one rank to another: a ring of chunks, and overflow buffers.

A channel is a segment (`device_comm.shm.transfers` creates and maps it)::

    64   | posted u64: bytes of chunks written, by the sender |
    128  | taken u64: bytes of chunks read, by the receiver   |
    136  | reads u32 x 2, by the receiver: as in a rank's line, `device_comm.shm.layout` |
    192  | ring of RING_BYTES: chunks                         |

    Chunk, at a multiple of 64; its data may wrap at the end of the ring
     0   | kind u8 | dtype u8 | kept u8 | - | fd u32 | total u64 | offset u64 | used u64 |
     32  | overflow buffer: size u64, nonce 16 bytes | call u32 | -                      |
     64  | ``used`` bytes of data, padded to 64; none if an overflow buffer has them     |

A chunk carries bytes ``offset`` to ``offset + used`` of a transfer of ``total`` bytes; an empty
transfer is one chunk without data. ``call`` is the sender's call number
(`device_comm.call_number`). Transfers are split into chunks of `PIECE_BYTES`, so that both ends
copy at the same time. The last `RESERVED_BYTES` of the ring are only for overflow chunks, and for
data chunks with the last `SMALL_BYTES` of a transfer.

The sender writes a chunk, then stores ``posted`` with release. The receiver loads ``posted`` with
acquire, reads the chunk, then stores ``taken`` with release. The sender loads ``taken`` with
acquire before it reuses the room. After its store, each end notifies the other's eventcount.

An overflow buffer is a segment: ``taken`` u32 at 64, data from 128 on. The sender sets ``taken``,
writes the data and posts a chunk; the receiver copies the data, then clears ``taken``. A few
overflow buffers are kept for reuse, as mapping new pages costs four times the copy. If all of these
are taken, a transfer uses temporary ones, each twice as large as the one before.
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
"""Most bytes in overflow buffers that are not received, besides one tensor of any size."""

_TAKEN = 64
_DATA = 128


class OverflowBuffer:
    """An overflow buffer, at either end."""

    def __init__(self, segment: Segment, kept: bool) -> None:
        self.segment = segment
        self.kept = kept
        self.room = segment.size - _DATA
        self.address = address_of(segment) + _DATA

    @property
    def taken(self) -> bool:
        """Return True while it holds data that the receiver has not copied."""
        return self.segment.words.load32(_TAKEN) != 0

    def mark(self, *, taken: bool) -> None:
        """Set ``taken`` (the sender) or clear it (the receiver)."""
        self.segment.words.store32(_TAKEN, int(taken))


class SentOverflow(OverflowBuffer):
    """An overflow buffer at its sender, which owns the memory."""

    def __init__(self, room: int, kept: bool) -> None:
        super().__init__(Segment.create(room + _DATA, "group-spill"), kept)
        self.handle = self.segment.handle()


class OverflowPool:
    """The overflow buffers of one sending rank. Thread-safe."""

    def __init__(self) -> None:
        self._overflows: list[SentOverflow] = []
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Return the bytes of all overflow buffers, in use or kept."""
        with self._lock:
            return sum(overflow.segment.size for overflow in self._overflows)

    @property
    def waiting(self) -> int:
        """Return the bytes of the overflow buffers that are taken."""
        with self._lock:
            return sum(overflow.room for overflow in self._overflows if overflow.taken)

    def allow(self, wanted: int) -> bool:
        """Return True if another transfer may put ``wanted`` bytes into overflow buffers."""
        waiting = self.waiting
        return waiting == 0 or waiting + wanted <= EAGER_BYTES

    def take(self, wanted: int, spare: int) -> SentOverflow:
        """Take an overflow buffer with room for ``wanted`` bytes, or for a part of them.

        A temporary one has room for ``spare`` bytes at least, unless fewer are wanted.

        Raises:
            SharedMemoryError: too little memory is free.
        """
        self.forget()
        with self._lock:
            overflow = self._free_or_new(wanted, spare)
            overflow.mark(taken=True)
            return overflow

    def forget(self) -> None:
        """Close the temporary overflow buffers that are not taken."""
        with self._lock:
            for overflow in [each for each in self._overflows if not each.kept and not each.taken]:
                overflow.segment.close()
                self._overflows.remove(overflow)

    def close(self) -> None:
        """Close all overflow buffers. Receivers that have mapped one can still read it."""
        with self._lock:
            for overflow in self._overflows:
                overflow.segment.close()
            self._overflows.clear()

    def _free_or_new(self, wanted: int, spare: int) -> SentOverflow:
        room = min(align(wanted, SMALLEST_ROOM), KEPT_ROOM)
        overflow = self._free(room)
        if overflow is None and self._kept() + room <= OVERFLOW_KEPT_BYTES:
            return self._make(room, kept=True)
        return overflow or self._make(min(wanted, max(spare, 2 * KEPT_ROOM)), kept=False)

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
    """The overflow buffers of one sender that the receiver has mapped."""

    def __init__(self) -> None:
        self._known: dict[bytes, OverflowBuffer] = {}

    def find(self, handle: SegmentHandle, kept: bool) -> OverflowBuffer:
        """Return the overflow buffer of ``handle``; map it first, if necessary.

        Raises:
            SharedMemoryError: the sender has exited, or the buffer cannot be mapped.
        """
        overflow = self._known.get(handle.nonce)
        if overflow is None:
            overflow = OverflowBuffer(Segment.attach(handle), kept)
            if kept:
                self._known[handle.nonce] = overflow
        return overflow

    def close(self) -> None:
        """Unmap all overflow buffers."""
        for overflow in self._known.values():
            overflow.segment.close()
        self._known.clear()


POSTED: Final = 64
TAKEN: Final = 128
READS: Final = 136
RING: Final = 192
RING_BYTES: Final = 1 << 20
"""As long as a group's rings, for the same reason: see `device_comm.shm.layout`."""
PIECE_BYTES: Final = 64 << 10
RESERVED_BYTES: Final = 16 << 10
SMALL_BYTES: Final = 192
HEADER_BYTES: Final = 64
AT_ONCE_BYTES: Final = 16 << 20
"""Bytes after which ``Pipe.push`` and ``Pipe.pull`` return, to check deadlines, aborts, signals."""

INSIDE: Final = 1
OVERFLOW: Final = 2

_CHUNK = struct.Struct("<BBBxIQQQQ16sI4x")


class Chunk(NamedTuple):
    """The header of a chunk, as drawn above; ``kind`` is `INSIDE` or `OVERFLOW`.

    ``fd``, ``size``, ``nonce`` and ``kept`` describe the overflow buffer.
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
        """Return the bytes that it occupies in the ring, header included."""
        return HEADER_BYTES + (align(self.used, HEADER_BYTES) if self.kind == INSIDE else 0)

    def continues(self, total: int, dtype: int, call: int, offset: int) -> bool:
        """Return True if it carries the bytes of the transfer from ``offset`` on."""
        transfer = (self.total, self.dtype, self.call, self.offset)
        fits = 0 < self.used <= total - offset or self.used == total == 0
        return fits and transfer == (total, dtype, call, offset)


def wanted_room(left: int) -> int:
    """Return the free bytes that a data chunk requires; ``left``: bytes still to be sent."""
    reserved = 0 if left <= SMALL_BYTES else RESERVED_BYTES
    return HEADER_BYTES + align(min(left, PIECE_BYTES), HEADER_BYTES) + reserved


def post(words: Words, chunk: Chunk) -> None:
    """Post a chunk, whose data is in place. The caller has checked the room."""
    posted = words.load64(POSTED)
    words.write(RING + posted % RING_BYTES, _CHUNK.pack(*chunk))
    words.store64(POSTED, posted + chunk.size_in_ring)


def has_chunk(segment: Segment) -> bool:
    """Return True if a posted chunk is not taken."""
    return segment.words.load64(POSTED) != segment.words.load64(TAKEN)


def peek(segment: Segment) -> Chunk | None:
    """Return the next chunk without taking it; None if no chunk is posted."""
    if not has_chunk(segment):
        return None
    taken = segment.words.load64(TAKEN)
    return Chunk(*_CHUNK.unpack_from(segment.memory, RING + taken % RING_BYTES))


def take(words: Words, chunk: Chunk) -> None:
    """Free the room of ``chunk``, the next one."""
    words.store64(TAKEN, words.load64(TAKEN) + chunk.size_in_ring)
