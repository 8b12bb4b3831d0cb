"""One-way boxes of letters between two ranks: a ring of bytes that one writes and the other reads.

A box is a segment of its own (`device_comm.shm.boxes` makes and finds it)::

    64   | posted u64: bytes of letters written, by the sender | closed u32: no more will be |
    128  | taken u64: bytes of letters read, by the receiver                                 |
    192  | ring of RING_BYTES: letters in a row                                              |

    Letter, at a multiple of 64; where the ring ends, its data goes on at the beginning
     0   | kind u8 | dtype u8 | kept u8 | - | fd u32 | total u64 | offset u64 | used u64 |
     32  | parcel: size u64, nonce 16 bytes | -                                          |
     64  | ``used`` bytes of data and what fills up 64, unless they are in a parcel      |

A letter brings ``used`` bytes of a message of ``total`` bytes, from ``offset`` on: inside, or in a
parcel (`device_comm.shm.parcels`). Large messages are cut into letters of `PIECE_BYTES`, so that
both ends copy at the same time. The last `RESERVED_BYTES` of room are for letters about parcels and
for the ends of messages up to `SMALL_BYTES`: however large messages are, some never lack room.

The sender writes a letter, then stores ``posted`` with release; the receiver loads it with acquire,
reads the letter, and stores ``taken`` with release, which the sender loads with acquire before it
writes there again. Both then ring the other's doorbell.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from device_comm.shm.memory import address_of, copy
from shm_broadcast.layout import align

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shm_broadcast.atomics import WordsLike
    from shm_broadcast.segment import Segment

    MakeMover = Callable[[Segment, int], "Mover"]
    """Makes what moves bytes through a box, from the box and the rank at the other end."""

POSTED: Final = 64
CLOSED: Final = 72
TAKEN: Final = 128
RING: Final = 192
RING_BYTES: Final = 256 << 10
PIECE_BYTES: Final = 64 << 10
RESERVED_BYTES: Final = 16 << 10
SMALL_BYTES: Final = 192
LETTER_BYTES: Final = 64

INSIDE: Final = 1
PARCEL: Final = 2

_LETTER = struct.Struct("<BBBxIQQQQ16s")


class Letter(NamedTuple):
    """What a letter says.

    Attributes:
        kind: `INSIDE` or `PARCEL`.
        dtype: the code of the message's elements.
        kept: the parcel will be used again.
        fd: the parcel's descriptor in the sender.
        total: bytes of the message.
        offset: where in the message these bytes belong.
        used: how many they are.
        size: of the parcel's segment.
        nonce: the parcel's.
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

    @property
    def size_in_ring(self) -> int:
        """Bytes that it takes in a box."""
        return LETTER_BYTES + (align(self.used, LETTER_BYTES) if self.kind == INSIDE else 0)

    def continues(self, total: int, dtype: int, offset: int) -> bool:
        """Whether it brings what comes next of a message."""
        about = (self.total, self.dtype, self.offset)
        return about == (total, dtype, offset) and 0 < self.used <= total - offset


class Mover(Protocol):
    """What moves bytes through one box: the C extension's ``Mailbox``, or `PythonMover`."""

    def push(self, address: int, total: int, dtype: int, sent: int, patience_ns: int, /) -> int:
        """Sender: post what is at ``address`` of a message, from byte ``sent`` on.

        Returns:
            How many of ``total`` bytes are sent: all, or what there was room for; then the receiver
            has taken nothing for ``patience_ns``.
        """

    def pull(self, address: int, total: int, dtype: int, received: int, spin_ns: int, /) -> int:
        """Receiver: put what has come of a message to ``address``, from byte ``received`` on.

        Returns:
            How many of ``total`` bytes are received: all, or what came before nothing did for
            ``spin_ns``, or before a letter of another message or about a parcel.
        """


class PythonMover:
    """`Mover` in Python."""

    def __init__(self, box: Segment, ring: Callable[[], None]) -> None:
        """Work on ``box``; ``ring`` wakes the other end."""
        self._box = box
        self._words = box.words
        self._data = address_of(box) + RING
        self._ring = ring

    def push(self, address: int, total: int, dtype: int, sent: int, patience_ns: int, /) -> int:
        """As `Mover.push`."""
        while sent < total:
            posted, taken = self._words.load64(POSTED), self._words.load64(TAKEN)
            used = min(total - sent, PIECE_BYTES)
            if RING_BYTES - (posted - taken) < wanted_room(total - sent):
                if not self._words.spin64(TAKEN, taken, patience_ns):
                    break
                continue
            for place, at, size in _stretches(posted + LETTER_BYTES, used):
                copy(self._data + place, address + sent + at, size)
            post(self._words, Letter(INSIDE, dtype, False, 0, total, sent, used))
            self._ring()
            sent += used
        return sent

    def pull(self, address: int, total: int, dtype: int, received: int, spin_ns: int, /) -> int:
        """As `Mover.pull`."""
        while received < total:
            taken = self._words.load64(TAKEN)
            letter = peek(self._box)
            if letter is None:
                if not self._words.spin64(POSTED, taken, spin_ns):
                    break
                continue
            if letter.kind != INSIDE or not letter.continues(total, dtype, received):
                break
            for place, at, size in _stretches(taken + LETTER_BYTES, letter.used):
                copy(address + received + at, self._data + place, size)
            take(self._words, letter)
            self._ring()
            received += letter.used
        return received


def wanted_room(left: int) -> int:
    """The room that a letter needs with the next of ``left`` bytes in it, and leaves reserved."""
    reserved = 0 if left <= SMALL_BYTES else RESERVED_BYTES
    return LETTER_BYTES + align(min(left, PIECE_BYTES), LETTER_BYTES) + reserved


def post(words: WordsLike, letter: Letter) -> None:
    """Post a letter whose data, if any, is in place. There is room."""
    posted = words.load64(POSTED)
    words.write(RING + posted % RING_BYTES, _LETTER.pack(*letter))
    words.store64(POSTED, posted + letter.size_in_ring)


def has_letter(box: Segment) -> bool:
    """Whether one has come that has not been taken."""
    return box.words.load64(POSTED) != box.words.load64(TAKEN)


def peek(box: Segment) -> Letter | None:
    """The next letter, left in the box; None if there is none."""
    if not has_letter(box):
        return None
    taken = box.words.load64(TAKEN)
    return Letter(*_LETTER.unpack_from(box.memory, RING + taken % RING_BYTES))


def take(words: WordsLike, letter: Letter) -> None:
    """Give the room of the next letter back, which is ``letter``."""
    words.store64(TAKEN, words.load64(TAKEN) + letter.size_in_ring)


def _stretches(begin: int, size: int) -> Iterator[tuple[int, int, int]]:
    """The one or two stretches of ``size`` bytes from byte ``begin`` on: place, offset, size."""
    place = begin % RING_BYTES
    first = min(size, RING_BYTES - place)
    yield place, 0, first
    if first < size:
        yield 0, first, size - first
