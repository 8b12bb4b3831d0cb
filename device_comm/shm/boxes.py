"""The two ends of a box (`device_comm.shm.mailbox`): making it, and finding it.

The sender makes the box at its first message, and says in the group's segment where it is (see
`device_comm.shm.layout`); the receiver looks there.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from device_comm.shm.layout import MAILBOX_HANDLE, MAILBOX_OPEN, GroupLayout
from device_comm.shm.mailbox import (
    CLOSED,
    POSTED,
    RING,
    RING_BYTES,
    TAKEN,
    Letter,
    has_letter,
    peek,
    post,
    take,
    wanted_room,
)
from shm_broadcast.segment import Segment, SegmentHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from device_comm.shm.mailbox import MakeMover, Mover

_HANDLE = struct.Struct("<IIxxxxQQ16s")


class Outbox:
    """The sender's end.

    Attributes:
        mover: moves messages into it.
    """

    def __init__(
        self,
        group: Segment,
        layout: GroupLayout,
        rank: int,
        peer: int,
        make_mover: MakeMover,
        ring: Callable[[], None],
    ) -> None:
        """Make the box and tell where it is; ``ring`` wakes the receiver. Collective: no."""
        self._box = Segment.create(RING + RING_BYTES, "group-mailbox")
        self._words = self._box.words
        self._ring = ring
        self.mover = make_mover(self._box, peer)
        handle, place = self._box.handle(), layout.mailbox(rank, peer)
        group.words.write(
            place + MAILBOX_HANDLE,
            _HANDLE.pack(handle.fd, handle.pid, handle.start_time, handle.size, handle.nonce),
        )
        group.words.store32(place + MAILBOX_OPEN, 1)
        ring()

    @property
    def room(self) -> int:
        """Bytes that are free, reserved ones included."""
        return RING_BYTES - (self._words.load64(POSTED) - self._words.load64(TAKEN))

    def takes_inside(self, left: int) -> bool:
        """Whether a letter can be posted with the next of ``left`` bytes in it."""
        return self.room >= wanted_room(left)

    @property
    def empty(self) -> bool:
        """Whether all letters have been taken."""
        return self._words.load64(POSTED) == self._words.load64(TAKEN)

    def post(self, letter: Letter) -> None:
        """Post a letter about a parcel. There is room."""
        post(self._words, letter)
        self._ring()

    def close(self) -> None:
        """Post no more."""
        self._words.store32(CLOSED, 1)
        self._ring()
        self._box.close()


class Inbox:
    """The receiver's end.

    Attributes:
        mover: moves messages out of the box; None before the box was found.
    """

    def __init__(
        self,
        group: Segment,
        layout: GroupLayout,
        rank: int,
        peer: int,
        make_mover: MakeMover,
        ring: Callable[[], None],
    ) -> None:
        """Look for the box when asked; ``ring`` wakes the sender. Collective: no."""
        self._group = group
        self._place = layout.mailbox(peer, rank)
        self._peer = peer
        self._make_mover = make_mover
        self._ring = ring
        self._box: Segment | None = None
        self.mover: Mover | None = None
        self._sender: SegmentHandle

    def find_mover(self) -> Mover | None:
        """The mover; looks for the box. None before the sender has made it.

        Raises:
            SharedMemoryError: the sender had ended before the box was found.
        """
        self._open()
        return self.mover

    def readable(self) -> bool:
        """Whether a letter is there, or will never be.

        Raises:
            SharedMemoryError: the sender had ended before the box was found.
        """
        box = self._open()
        return box is not None and (box.words.load32(CLOSED) != 0 or has_letter(box))

    def peek(self) -> Letter | None:
        """The next letter, left in the box; None if there is none.

        Raises:
            SharedMemoryError: the sender had ended before the box was found.
        """
        box = self._open()
        return None if box is None else peek(box)

    @property
    def ended(self) -> bool:
        """Whether nothing will come any more."""
        box = self._box
        return box is not None and box.words.load32(CLOSED) != 0 and not has_letter(box)

    def take(self, letter: Letter) -> None:
        """Give the room of the next letter back, which is ``letter``."""
        if self._box is not None:
            take(self._box.words, letter)
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
            self.mover = self._make_mover(self._box, self._peer)
        return self._box
