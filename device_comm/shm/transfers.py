"""Send and receive tensors over the channels between one rank and its peers.

The sender creates a channel at its first transfer, and publishes the handle in the group's segment
(`device_comm.shm.layout`). Sends are eager: if the receiver does not drain a full channel, the rest
of a tensor goes into overflow buffers, up to `EAGER_BYTES` of unreceived data, while the ring has
room for their chunks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from torch import Tensor

from device_comm._native import Pipe
from device_comm.call_number import call_number, naming_call
from device_comm.shm.channel import (
    AT_ONCE_BYTES,
    HEADER_BYTES,
    INSIDE,
    OVERFLOW,
    PIECE_BYTES,
    POSTED,
    RING,
    RING_BYTES,
    SMALL_BYTES,
    TAKEN,
    Chunk,
    OverflowBuffer,
    OverflowPool,
    ReceivedOverflow,
    SentOverflow,
    has_chunk,
    peek,
    post,
    take,
    wanted_room,
)
from device_comm.shm.layout import PIPE_HANDLE, PIPE_OPEN, GroupLayout
from device_comm.shm.signature import DTYPE_CODES
from device_comm.span import copy_bytes
from shm_broadcast.errors import DivergenceError, PeerLostError, SharedMemoryError
from shm_broadcast.segment import Segment, SegmentHandle, is_permission_denied, is_transient
from shm_broadcast.state.board import Board

if TYPE_CHECKING:
    from device_comm.shm.collectives import GroupMembership


CHUNKS_ABOUT_OVERFLOW: Final = 32
"""More than a transfer posts: four for kept overflow buffers, then each twice as large."""

_HANDLE = struct.Struct("<IIxxxxQQ16s")


class PeerPipes:
    """The channels of one rank: ``outgoing`` by receiver, ``coming`` by sender; made on first use.

    ``call`` returns the call number of the next transfer; 0: none.
    """

    def __init__(
        self,
        board: Board,
        membership: GroupMembership,
        rank: int,
        group: Segment,
        layout: GroupLayout,
        call: Callable[[], int] = call_number,
    ) -> None:
        self.board = board
        self.membership = membership
        self.rank = rank
        self.group = group
        self.layout = layout
        self.call = call
        self.overflows = OverflowPool()
        self.outgoing: dict[int, SendingEnd] = {}
        self.coming: dict[int, ReceivingEnd] = {}

    def to(self, peer: int) -> SendingEnd:
        """Return the end of the channel to rank ``peer``; make it if necessary."""
        end = self.outgoing.get(peer)
        if end is None:
            end = self.outgoing[peer] = SendingEnd(self, peer)
        return end

    def from_(self, peer: int) -> ReceivingEnd:
        """Return the end of the channel from rank ``peer``; make it if necessary."""
        end = self.coming.get(peer)
        if end is None:
            end = self.coming[peer] = ReceivingEnd(self, peer)
        return end

    def sends_eagerly(self, peer: int, size: int) -> bool:
        """Return True if ``size`` bytes to ``peer`` fit into channel and overflow buffers now."""
        end = self.outgoing.get(peer)
        room = RING_BYTES if end is None else end.room
        if size <= PIECE_BYTES and room >= wanted_room(size):
            return True
        overflows = room >= CHUNKS_ABOUT_OVERFLOW * HEADER_BYTES
        return size > SMALL_BYTES and overflows and self.overflows.allow(size)

    def undelivered(self) -> list[int]:
        """Return the ranks with unreceived messages that have not closed the group."""
        has_left = self.membership.has_left
        return [rank for rank, end in self.outgoing.items() if not end.empty and not has_left(rank)]

    def close(self) -> None:
        """Close all channels and overflow buffers."""
        for sending in self.outgoing.values():
            sending.close()
        for receiving in self.coming.values():
            receiving.close()
        self.overflows.close()


def _mover(segment: Segment, board: Board, member: int) -> Pipe:
    return Pipe(segment.memory, board.memory, board.eventcount_offset(member))


class SendingEnd:
    """The sender's end of a channel, which creates it and publishes its handle."""

    def __init__(self, pipes: PeerPipes, peer: int) -> None:
        self._segment = Segment.create(RING + RING_BYTES, "group-pipe")
        self._words = self._segment.words
        self._board, self._member = pipes.board, pipes.membership.members[peer]
        self.mover = _mover(self._segment, self._board, self._member)
        handle, place = self._segment.handle(), pipes.layout.pipe(pipes.rank, peer)
        pipes.group.words.write(
            place + PIPE_HANDLE,
            _HANDLE.pack(handle.fd, handle.pid, handle.start_time, handle.size, handle.nonce),
        )
        pipes.group.words.store32(place + PIPE_OPEN, 1)
        self._board.notify(self._member)

    @property
    def room(self) -> int:
        """Return the free bytes, including reserved ones."""
        return RING_BYTES - (self._words.load64(POSTED) - self._words.load64(TAKEN))

    def takes_inside(self, left: int) -> bool:
        """Return True if a data chunk can be posted; ``left``: bytes still to be sent."""
        return self.room >= wanted_room(left)

    @property
    def empty(self) -> bool:
        """Return True if all chunks are taken."""
        return self.room == RING_BYTES

    def post(self, chunk: Chunk) -> None:
        """Post a chunk without inline data. The caller has checked the room."""
        post(self._words, chunk)
        self._board.notify(self._member)

    def close(self) -> None:
        """Close the channel."""
        self._segment.close()


class ReceivingEnd:
    """The receiver's end of a channel, which is mapped once the sender has published it.

    Methods raise `SharedMemoryError` if the channel cannot be mapped, as the sender has exited.
    """

    def __init__(self, pipes: PeerPipes, peer: int) -> None:
        self._group, self._board, self._membership = pipes.group, pipes.board, pipes.membership
        self._peer = peer
        self._member = pipes.membership.members[peer]
        self._place = pipes.layout.pipe(peer, pipes.rank)
        self._segment: Segment | None = None
        self.mover: Pipe | None = None
        self._sender: SegmentHandle
        self._overflows = ReceivedOverflow()

    def find_mover(self) -> Pipe | None:
        """Return the mover; None before the sender has published the channel."""
        self._map()
        return self.mover

    def readable(self) -> bool:
        """Return True if a chunk is posted, or the sender has closed the group."""
        return self._membership.has_left(self._peer) or self._has_chunk()

    def peek(self) -> Chunk | None:
        """Return the next chunk without taking it; None if no chunk is posted."""
        segment = self._map()
        return None if segment is None else peek(segment)

    @property
    def ended(self) -> bool:
        """Return True if the sender has closed the group and no chunk is posted."""
        return self._membership.has_left(self._peer) and not self._has_chunk()

    def take(self, chunk: Chunk) -> None:
        """Free the room of ``chunk``, the next one."""
        if self._segment is not None:
            take(self._segment.words, chunk)
            self._board.notify(self._member)

    def overflow(self, chunk: Chunk) -> OverflowBuffer:
        """Return the overflow buffer with the data of ``chunk``."""
        pid, start = self._sender.pid, self._sender.start_time
        handle = SegmentHandle(pid, start, chunk.fd, chunk.nonce, chunk.size)
        return self._overflows.find(handle, chunk.kept)

    def close(self) -> None:
        """Unmap the channel and its overflow buffers."""
        if self._segment is not None:
            self._segment.close()
        self._overflows.close()

    def _has_chunk(self) -> bool:
        segment = self._map()
        return segment is not None and has_chunk(segment)

    def _map(self) -> Segment | None:
        group = self._group
        if self._segment is None and group.words.load32(self._place + PIPE_OPEN):
            fd, pid, start, size, nonce = _HANDLE.unpack_from(
                group.memory, self._place + PIPE_HANDLE
            )
            self._sender = SegmentHandle(pid, start, fd, nonce, size)
            self._segment = Segment.attach(self._sender)
            self.mover = _mover(self._segment, self._board, self._member)
        return self._segment


PATIENCE_NS: Final = 300_000
"""Nanoseconds without room after which a sender uses overflow buffers; a receiver that keeps up
drains a channel several times in it."""


class SendTask:
    """The send of one tensor; a `shm_broadcast.executor.Task`."""

    def __init__(
        self, pipes: PeerPipes, peer: int, operation: str, tensor: Tensor, sent: int = 0
    ) -> None:
        self.operation = operation
        self._end = pipes.to(peer)
        self._membership = pipes.membership
        self._peer = peer
        self._overflows = pipes.overflows
        self._tensor = tensor
        self._address = tensor.data_ptr()
        self._total = tensor.nbytes
        self._dtype = DTYPE_CODES.get(tensor.dtype, 0)
        self._member = pipes.membership.members[peer]
        self._sent = sent
        self._call = pipes.call()
        self._ahead = False

    def advance(self, spin_ns: int) -> bool:
        """Send while there is room, about `AT_ONCE_BYTES` at most; return True when all is sent.

        Raises:
            GroupClosedError: there is no room, and the receiver has closed the group.
        """
        if not self._total:
            return self._send_empty() or self._await_room()
        patience, spare = PATIENCE_NS if self._left > SMALL_BYTES else spin_ns, 0
        while True:
            before = self._sent
            self._sent = self._end.mover.push(
                self._address, self._total, self._dtype, self._call, self._sent, patience
            )
            if self._sent == self._total:
                return True
            if self._sent - before >= AT_ONCE_BYTES:
                return False
            if self._may_overflow():
                self._ahead = True
                overflow = self._overflows.take(self._left, spare)
                self._post(overflow)
                patience, spare = 0, 0 if overflow.kept else 2 * overflow.room
            elif not self._end.takes_inside(self._left):
                return self._await_room()

    def ready(self) -> bool:
        """Return True if `advance` can send more, or raises."""
        room = self._end.takes_inside(self._left) or self._may_overflow()
        return room or self._membership.has_left(self._peer)

    def missing(self) -> tuple[int, ...]:
        """Return the receiver's member number."""
        return (self._member,)

    @property
    def _left(self) -> int:
        return self._total - self._sent

    def _await_room(self) -> bool:
        """Return False; raise if the receiver has closed the group."""
        if self._membership.has_left(self._peer):
            raise self._membership.error(self.operation, self._peer)
        return False

    def _send_empty(self) -> bool:
        room = self._end.takes_inside(0)
        if room:
            self._end.post(Chunk(INSIDE, self._dtype, False, 0, 0, 0, 0, call=self._call))
        return room

    def _may_overflow(self) -> bool:
        """Return True if the rest of the tensor may go into overflow buffers."""
        if self._left <= SMALL_BYTES or self._end.room < HEADER_BYTES:
            return False
        return self._ahead or self._overflows.allow(self._left)

    def _post(self, overflow: SentOverflow) -> None:
        used = min(self._left, overflow.room)
        copy_bytes(overflow.address, self._address + self._sent, used)
        fd, size, nonce = overflow.handle.fd, overflow.handle.size, overflow.handle.nonce
        head = self._dtype, overflow.kept, fd, self._total, self._sent, used
        self._end.post(Chunk(OVERFLOW, *head, size, nonce, self._call))
        self._sent += used


class ReceiveTask:
    """The receipt of tensors from one peer; a `shm_broadcast.executor.Task`."""

    def __init__(
        self,
        pipes: PeerPipes,
        peer: int,
        operation: str,
        tensors: Sequence[Tensor],
        following: Callable[[], Sequence[Tensor]] | None = None,
        received: int = 0,
    ) -> None:
        """Fill contiguous ``tensors``, from byte ``received`` of the first one on.

        Then fill the tensors that ``following`` returns, until it returns none.
        """
        self.operation = operation
        self._board = pipes.board
        self._end = pipes.from_(peer)
        self._membership = pipes.membership
        self._peer = peer
        self._member = pipes.membership.members[peer]
        self._call = pipes.call()
        self._following = following
        self._tensors: Iterator[Tensor] = iter(tensors)
        self._total = self._received = 0
        self._filled = True
        if tensors:
            self._take_next()
            self._received = received

    def advance(self, spin_ns: int) -> bool:
        """Take chunks, about `AT_ONCE_BYTES` at most; return True when all tensors are filled.

        Raises:
            DivergenceError: the sender sent another dtype or size, or in another call.
            GroupClosedError: the sender has closed the group.
            PeerLostError: the sender exited before its memory was mapped.
            SharedMemoryError: this process has no file descriptor left to map that memory, or no
                permission: one of the two has changed its user.
        """
        moved = 0
        try:
            while not self._filled or self._take_next():
                before = self._received
                if self._pull(spin_ns):
                    continue
                moved += self._received - before
                if moved >= AT_ONCE_BYTES:
                    return False
                chunk = self._end.peek()
                if chunk is None:
                    if not self._end.ended:
                        return False
                    raise self._membership.error(self.operation, self._peer)
                self._check(chunk)
                if chunk.kind == OVERFLOW:
                    self._take_from_overflow(chunk)
                elif not self._total:
                    self._end.take(chunk)
                    self._filled = True
        except SharedMemoryError as error:
            if is_transient(error) or is_permission_denied(error):
                raise
            if self._membership.has_left(self._peer):
                raise self._membership.abort_left(self.operation, self._peer) from error
            raise PeerLostError(self.operation, self._board.member_status(self._member)) from error
        return True

    def ready(self) -> bool:
        """Return True if `advance` can take a chunk, or raises."""
        try:
            return self._end.readable()
        except SharedMemoryError:  # `advance` raises it
            return True

    def missing(self) -> tuple[int, ...]:
        """Return the sender's member number."""
        return (self._member,)

    def _take_next(self) -> bool:
        tensor = next(self._tensors, None)
        if tensor is None and self._following is not None:
            self._tensors = iter(self._following())
            tensor = next(self._tensors, None)
        if tensor is None:
            return False
        self._tensor = tensor
        self._address = tensor.data_ptr()
        self._total, self._received, self._filled = tensor.nbytes, 0, False
        self._dtype = DTYPE_CODES.get(tensor.dtype, 0)
        return True

    def _pull(self, spin_ns: int) -> bool:
        mover = self._end.find_mover() if self._total else None
        if mover is not None:
            self._received = mover.pull(
                self._address, self._total, self._dtype, self._call, self._received, spin_ns
            )
            self._filled = self._received == self._total
        return self._filled

    def _check(self, chunk: Chunk) -> None:
        if not chunk.continues(self._total, self._dtype, self._call, self._received):
            names = {code: str(dtype) for dtype, code in DTYPE_CODES.items()}
            ours = f"{self.operation} of {self._total} bytes of {self._tensor.dtype}"
            dtype = names.get(chunk.dtype, "another dtype")
            raise DivergenceError(
                self._peer,
                naming_call(ours, self._call),
                naming_call(f"send of {chunk.total} bytes of {dtype}", chunk.call),
            )

    def _take_from_overflow(self, chunk: Chunk) -> None:
        overflow = self._end.overflow(chunk)
        copy_bytes(self._address + self._received, overflow.address, chunk.used)
        overflow.mark(taken=False)
        if not chunk.kept:
            overflow.segment.close()
        self._end.take(chunk)
        self._received += chunk.used
        self._filled = self._received == self._total
