"""The pipes of one rank to and from its peers: making them, and finding them.

The sender makes a pipe at its first transfer, and says in the group's segment where it is (see
`device_comm.shm.layout`); the receiver looks there.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from device_comm.call_number import call_number
from device_comm.shm.layout import PIPE_HANDLE, PIPE_OPEN, GroupLayout
from device_comm.shm.pipes.pipe import (
    HEADER_BYTES,
    PIECE_BYTES,
    POSTED,
    RING,
    RING_BYTES,
    SMALL_BYTES,
    TAKEN,
    Chunk,
    has_chunk,
    peek,
    post,
    take,
    wanted_room,
)
from device_comm.shm.pipes.spills import ReceivedSpills, SpillPool
from shm_broadcast.segment import Segment, SegmentHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from device_comm.shm.attendance import Attendance
    from device_comm.shm.pipes.pipe import MakeMover, Mover
    from device_comm.shm.pipes.spills import Spill
    from shm_broadcast.board.board import Board

CHUNKS_ABOUT_SPILLS: Final = 32
"""More than one transfer posts: four about kept spills, then each spill doubles the last one."""

_HANDLE = struct.Struct("<IIxxxxQQ16s")


class PeerPipes:
    """All pipes of one rank. They are made when they are first used.

    Attributes:
        board: this node's board.
        attendance: who the members are, and which ranks have closed the group.
        rank: this process's rank.
        group: the segment of the group.
        layout: the layout of that segment.
        make_mover: makes what moves bytes through a pipe's segment, for the rank at its other end.
        call: the number of the call that the next transfer is part of; 0: none.
        spills: where this rank puts what does not fit into its pipes.
        outgoing: the ends of the pipes to ranks, as far as they were made.
        coming: the ends of the pipes from ranks, likewise.
    """

    def __init__(
        self,
        board: Board,
        attendance: Attendance,
        rank: int,
        group: Segment,
        layout: GroupLayout,
        make_mover: MakeMover,
        call: Callable[[], int] = call_number,
    ) -> None:
        self.board = board
        self.attendance = attendance
        self.rank = rank
        self.group = group
        self.layout = layout
        self.make_mover = make_mover
        self.call = call
        self.spills = SpillPool()
        self.outgoing: dict[int, SendingEnd] = {}
        self.coming: dict[int, ReceivingEnd] = {}

    def to(self, peer: int) -> SendingEnd:
        """The end of the pipe to rank ``peer``."""
        end = self.outgoing.get(peer)
        if end is None:
            end = self.outgoing[peer] = SendingEnd(self, peer)
        return end

    def from_(self, peer: int) -> ReceivingEnd:
        """The end of the pipe from rank ``peer``."""
        end = self.coming.get(peer)
        if end is None:
            end = self.coming[peer] = ReceivingEnd(self, peer)
        return end

    def goes_ahead(self, peer: int, size: int) -> bool:
        """Whether ``size`` bytes to rank ``peer`` can be sent now, if none wait."""
        end = self.outgoing.get(peer)
        room = RING_BYTES if end is None else end.room
        if size <= PIECE_BYTES and room >= wanted_room(size):
            return True
        spills = room >= CHUNKS_ABOUT_SPILLS * HEADER_BYTES
        return size > SMALL_BYTES and spills and self.spills.allow(size)

    def undelivered(self) -> list[int]:
        """The ranks that have not received all that was sent to them, and still may."""
        has_left = self.attendance.has_left
        return [rank for rank, end in self.outgoing.items() if not end.empty and not has_left(rank)]

    def close(self) -> None:
        """Close all pipes and spills."""
        for sending in self.outgoing.values():
            sending.close()
        for receiving in self.coming.values():
            receiving.close()
        self.spills.close()


class SendingEnd:
    """The sender's end of a pipe.

    Attributes:
        mover: moves bytes into it.
    """

    def __init__(self, pipes: PeerPipes, peer: int) -> None:
        """Make the pipe and tell where it is. Collective: no."""
        self._segment = Segment.create(RING + RING_BYTES, "group-pipe")
        self._words = self._segment.words
        self._board, self._member = pipes.board, pipes.attendance.members[peer]
        self.mover = pipes.make_mover(self._segment, peer)
        handle, place = self._segment.handle(), pipes.layout.pipe(pipes.rank, peer)
        pipes.group.words.write(
            place + PIPE_HANDLE,
            _HANDLE.pack(handle.fd, handle.pid, handle.start_time, handle.size, handle.nonce),
        )
        pipes.group.words.store32(place + PIPE_OPEN, 1)
        self._board.ring(self._member)

    @property
    def room(self) -> int:
        """Bytes that are free, reserved ones included."""
        return RING_BYTES - (self._words.load64(POSTED) - self._words.load64(TAKEN))

    def takes_inside(self, left: int) -> bool:
        """Whether a chunk can be posted with the next of ``left`` bytes in it."""
        return self.room >= wanted_room(left)

    @property
    def empty(self) -> bool:
        """Whether all chunks have been taken."""
        return self.room == RING_BYTES

    def post(self, chunk: Chunk) -> None:
        """Post a chunk about a spill. There is room."""
        post(self._words, chunk)
        self._board.ring(self._member)

    def close(self) -> None:
        """Close the pipe."""
        self._segment.close()


class ReceivingEnd:
    """The receiver's end of a pipe.

    Attributes:
        mover: moves bytes out of it; None before it was found.

    Its methods raise `SharedMemoryError` if the sender had ended before the pipe was found.
    """

    def __init__(self, pipes: PeerPipes, peer: int) -> None:
        """Look for the pipe when asked. Collective: no."""
        self._group, self._board, self._attendance = pipes.group, pipes.board, pipes.attendance
        self._make_mover, self._peer = pipes.make_mover, peer
        self._member = pipes.attendance.members[peer]
        self._place = pipes.layout.pipe(peer, pipes.rank)
        self._segment: Segment | None = None
        self.mover: Mover | None = None
        self._sender: SegmentHandle
        self._spills = ReceivedSpills()

    def find_mover(self) -> Mover | None:
        """The mover; looks for the pipe. None before the sender has made it."""
        self._find()
        return self.mover

    def readable(self) -> bool:
        """Whether a chunk has come, or none will come any more."""
        return self._attendance.has_left(self._peer) or self._has_chunk()

    def peek(self) -> Chunk | None:
        """The next chunk, left in the pipe; None if there is none."""
        segment = self._find()
        return None if segment is None else peek(segment)

    @property
    def ended(self) -> bool:
        """Whether nothing will come any more."""
        return self._attendance.has_left(self._peer) and not self._has_chunk()

    def take(self, chunk: Chunk) -> None:
        """Give the room of the next chunk back, which is ``chunk``."""
        if self._segment is not None:
            take(self._segment.words, chunk)
            self._board.ring(self._member)

    def spill(self, chunk: Chunk) -> Spill:
        """The spill that a chunk is about."""
        pid, start = self._sender.pid, self._sender.start_time
        handle = SegmentHandle(pid, start, chunk.fd, chunk.nonce, chunk.size)
        return self._spills.find(handle, chunk.kept)

    def close(self) -> None:
        """Close the pipe, and the spills that were opened."""
        if self._segment is not None:
            self._segment.close()
        self._spills.close()

    def _has_chunk(self) -> bool:
        segment = self._find()
        return segment is not None and has_chunk(segment)

    def _find(self) -> Segment | None:
        group = self._group
        if self._segment is None and group.words.load32(self._place + PIPE_OPEN):
            fd, pid, start, size, nonce = _HANDLE.unpack_from(
                group.memory, self._place + PIPE_HANDLE
            )
            self._sender = SegmentHandle(pid, start, fd, nonce, size)
            self._segment = Segment.attach(self._sender)
            self.mover = self._make_mover(self._segment, self._peer)
        return self._segment
