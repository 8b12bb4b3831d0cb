"""One-way boxes of letters between two ranks.

A box is a segment of its own, made by the sender at the first letter; the receiver finds it through
the group's segment (see `device_comm.shm.layout`). It holds `LETTERS` letters of 256 bytes::

    64   | posted u64: letters written, by the sender         |
    72   | closed u32: the sender will post no more           |
    128  | taken u64: letters read, by the receiver           |
    192  | letter 0, letter 1, ...                            |

    Letter
     0   | kind u8 | dtype u8 | kept u8 | - | fd u32 | total u64 | offset u64 | used u64 |
     32  | parcel: size u64, nonce 16 bytes                                              |
     64  | 192 bytes of data, unless they are in a parcel                                |

A letter holds ``used`` bytes of a message of ``total`` bytes, from ``offset`` on: inside, or in a
parcel (`device_comm.shm.parcels`).

The sender writes a letter, then stores ``posted`` with release; the receiver loads it with acquire,
reads the letter, and stores ``taken`` with release, which the sender loads with acquire before it
writes there again. Both then ring the other's doorbell.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from device_comm.shm.layout import MAILBOX_HANDLE, MAILBOX_OPEN, GroupLayout
from device_comm.shm.memory import address_of
from shm_broadcast.segment import Segment, SegmentHandle

if TYPE_CHECKING:
    from collections.abc import Callable

LETTERS: Final = 256
LETTER_BYTES: Final = 256
DATA: Final = 64
DATA_BYTES: Final = LETTER_BYTES - DATA

INSIDE: Final = 1
PARCEL: Final = 2

_POSTED = 64
_CLOSED = 72
_TAKEN = 128
_LETTERS = 192
_LETTER = struct.Struct("<BBBxIQQQQ16s")
_HANDLE = struct.Struct("<IIxxxxQQ16s")


class Letter(NamedTuple):
    """One letter.

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


class Outbox:
    """The sender's end."""

    def __init__(
        self, group: Segment, layout: GroupLayout, rank: int, peer: int, ring: Callable[[], None]
    ) -> None:
        """Make the box and tell where it is; ``ring`` wakes the receiver. Collective: no."""
        self._box = Segment.create(_LETTERS + LETTERS * LETTER_BYTES, "group-mailbox")
        self._address = address_of(self._box)
        self._words = self._box.words
        self._ring = ring
        handle, place = self._box.handle(), layout.mailbox(rank, peer)
        group.words.write(
            place + MAILBOX_HANDLE,
            _HANDLE.pack(handle.fd, handle.pid, handle.start_time, handle.size, handle.nonce),
        )
        group.words.store32(place + MAILBOX_OPEN, 1)

    def has_room(self) -> bool:
        """Whether a letter can be posted."""
        return self._posted() - self._words.load64(_TAKEN) < LETTERS

    @property
    def empty(self) -> bool:
        """Whether all letters have been taken."""
        return self._posted() == self._words.load64(_TAKEN)

    def data_address(self) -> int:
        """Where the data of the next letter goes."""
        return self._address + self._place(self._posted()) + DATA

    def post(self, letter: Letter) -> None:
        """Post a letter whose data is in place. There is room."""
        posted = self._posted()
        self._words.write(self._place(posted), _LETTER.pack(*letter))
        self._words.store64(_POSTED, posted + 1)
        self._ring()

    def close(self) -> None:
        """Post no more."""
        self._words.store32(_CLOSED, 1)
        self._ring()
        self._box.close()

    def _posted(self) -> int:
        return self._words.load64(_POSTED)

    def _place(self, number: int) -> int:
        return _LETTERS + number % LETTERS * LETTER_BYTES


class Inbox:
    """The receiver's end."""

    def __init__(
        self, group: Segment, layout: GroupLayout, rank: int, peer: int, ring: Callable[[], None]
    ) -> None:
        """Look for the box when asked; ``ring`` wakes the sender. Collective: no."""
        self._group = group
        self._place = layout.mailbox(peer, rank)
        self._ring = ring
        self._box: Segment | None = None
        self._address = 0
        self._sender: SegmentHandle

    def readable(self) -> bool:
        """Whether a letter is there, or will never be.

        Raises:
            SharedMemoryError: the sender had ended before the box was found.
        """
        box = self._open()
        if box is None:
            return False
        return box.words.load32(_CLOSED) != 0 or self._waiting(box)

    def peek(self) -> Letter | None:
        """The next letter, left in the box; None if there is none.

        Raises:
            SharedMemoryError: the sender had ended before the box was found.
        """
        box = self._open()
        if box is None or not self._waiting(box):
            return None
        return Letter(*_LETTER.unpack_from(box.memory, self._letter(box.words.load64(_TAKEN))))

    @property
    def ended(self) -> bool:
        """Whether nothing will come any more."""
        box = self._box
        return box is not None and box.words.load32(_CLOSED) != 0 and not self._waiting(box)

    def data_address(self) -> int:
        """Where the data of the next letter is."""
        box = self._open()
        taken = 0 if box is None else box.words.load64(_TAKEN)
        return self._address + self._letter(taken) + DATA

    def take(self) -> None:
        """Give the next letter's place back."""
        if self._box is not None:
            self._box.words.store64(_TAKEN, self._box.words.load64(_TAKEN) + 1)
            self._ring()

    def parcel(self, letter: Letter) -> SegmentHandle:
        """The handle of a letter's parcel."""
        sender = self._sender
        return SegmentHandle(sender.pid, sender.start_time, letter.fd, letter.nonce, letter.size)

    def close(self) -> None:
        """Let go of the box."""
        if self._box is not None:
            self._box.close()

    def _open(self) -> Segment | None:
        if self._box is None and self._group.words.load32(self._place + MAILBOX_OPEN):
            fd, pid, start, size, nonce = _HANDLE.unpack_from(
                self._group.memory, self._place + MAILBOX_HANDLE
            )
            self._sender = SegmentHandle(pid, start, fd, nonce, size)
            self._box = Segment.attach(self._sender)
            self._address = address_of(self._box)
        return self._box

    def _waiting(self, box: Segment) -> bool:
        return box.words.load64(_POSTED) != box.words.load64(_TAKEN)

    def _letter(self, number: int) -> int:
        return _LETTERS + number % LETTERS * LETTER_BYTES
