"""Tensors between two ranks, as tasks: sending one, and receiving one or a series.

They travel through the pipe between the two. A sender does not depend on its receiver: if the pipe
is full, and the receiver does not empty it, the rest of a tensor goes into spills, as long as the
pipe has room for chunks about them, and at most `AHEAD_BYTES` of spills wait to be received.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from device_comm.call_number import naming_call
from device_comm.shm.pipes.pipe import (
    AT_ONCE_BYTES,
    HEADER_BYTES,
    INSIDE,
    SMALL_BYTES,
    SPILL,
    Chunk,
)
from device_comm.shm.signature import DTYPE_CODES
from device_comm.span import copy_bytes
from shm_broadcast.errors import DivergenceError, PeerLostError, SharedMemoryError
from shm_broadcast.segment import is_refused, may_pass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from device_comm.shm.pipes.peer_pipes import PeerPipes
    from device_comm.shm.pipes.spills import SentSpill

PATIENCE_NS: Final = 300_000
"""How long a sender waits for room before it spills; a receiver that keeps up empties a pipe
several times in it."""


class SendTask:
    """One tensor on its way out; a `shm_broadcast.progress.Task`."""

    def __init__(
        self, pipes: PeerPipes, peer: int, operation: str, tensor: Tensor, sent: int = 0
    ) -> None:
        """Send ``tensor``, contiguous, to rank ``peer``, from byte ``sent`` on."""
        self.operation = operation
        self._end = pipes.to(peer)
        self._attendance = pipes.attendance
        self._peer = peer
        self._spills = pipes.spills
        self._tensor = tensor
        self._address = tensor.data_ptr()
        self._total = tensor.nbytes
        self._dtype = DTYPE_CODES.get(tensor.dtype, 0)
        self._member = pipes.attendance.members[peer]
        self._sent = sent
        self._call = pipes.call()
        self._ahead = False

    def advance(self, spin_ns: int) -> bool:
        """Send what there is room for, about `AT_ONCE_BYTES` at most; whether all is sent.

        Raises:
            GroupClosedError: there is no room, and the receiver has closed the group.
        """
        if not self._total:
            return self._send_empty() or self._waits()
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
            if self._may_spill():
                self._ahead = True
                spill = self._spills.take(self._left, spare)
                self._post(spill)
                patience, spare = 0, 0 if spill.kept else 2 * spill.room
            elif not self._end.takes_inside(self._left):
                return self._waits()

    def ready(self) -> bool:
        """Whether more of the tensor can be sent now, or it never can."""
        room = self._end.takes_inside(self._left) or self._may_spill()
        return room or self._attendance.has_left(self._peer)

    def missing(self) -> tuple[int, ...]:
        """The receiver's member number."""
        return (self._member,)

    @property
    def _left(self) -> int:
        return self._total - self._sent

    def _waits(self) -> bool:
        """False: it has to wait for room, which the receiver may still make."""
        if self._attendance.has_left(self._peer):
            raise self._attendance.error(self.operation, self._peer)
        return False

    def _send_empty(self) -> bool:
        """Say that a tensor without elements comes, if there is room; whether it was said."""
        room = self._end.takes_inside(0)
        if room:
            self._end.post(Chunk(INSIDE, self._dtype, False, 0, 0, 0, 0, call=self._call))
        return room

    def _may_spill(self) -> bool:
        """Whether more may go into spills: of a tensor, all or nothing."""
        if self._left <= SMALL_BYTES or self._end.room < HEADER_BYTES:
            return False
        return self._ahead or self._spills.allow(self._left)

    def _post(self, spill: SentSpill) -> None:
        """Fill ``spill`` with what comes next of the tensor, and post a chunk about it."""
        used = min(self._left, spill.room)
        copy_bytes(spill.address, self._address + self._sent, used)
        fd, size, nonce = spill.handle.fd, spill.handle.size, spill.handle.nonce
        about = self._dtype, spill.kept, fd, self._total, self._sent, used
        self._end.post(Chunk(SPILL, *about, size, nonce, self._call))
        self._sent += used


class ReceiveTask:
    """Tensors on their way in; a `shm_broadcast.progress.Task`."""

    def __init__(
        self,
        pipes: PeerPipes,
        peer: int,
        operation: str,
        tensors: Sequence[Tensor],
        following: Callable[[], Sequence[Tensor]] | None = None,
        received: int = 0,
    ) -> None:
        """Fill tensors, contiguous, with what rank ``peer`` sends next.

        Args:
            pipes: this rank's.
            peer: the sender.
            operation: for messages.
            tensors: at least one, or none where there is ``following``.
            following: gives those that come next, once these are filled; none: that was all.
            received: bytes of the first tensor that are there already.
        """
        self.operation = operation
        self._board = pipes.board
        self._end = pipes.from_(peer)
        self._attendance = pipes.attendance
        self._peer = peer
        self._member = pipes.attendance.members[peer]
        self._call = pipes.call()
        self._following = following
        self._tensors: Iterator[Tensor] = iter(tensors)
        self._total = self._received = 0
        self._filled = True
        if tensors:
            self._take_next()
            self._received = received

    def advance(self, spin_ns: int) -> bool:
        """Take what has come, about `AT_ONCE_BYTES` at most; whether that is all.

        Raises:
            DivergenceError: the sender sent another dtype or size, or in another call.
            GroupClosedError: the sender has closed the group.
            PeerLostError: the sender ended before what it has sent could be found.
            SharedMemoryError: this process has no descriptor left to map that, or may not map it:
                one of the two has changed its user.
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
                    raise self._attendance.error(self.operation, self._peer)
                self._check(chunk)
                if chunk.kind == SPILL:
                    self._take_from_spill(chunk)
                elif not self._total:
                    self._end.take(chunk)
                    self._filled = True
        except SharedMemoryError as error:
            if may_pass(error) or is_refused(error):
                raise
            if self._attendance.has_left(self._peer):
                raise self._attendance.end(self.operation, self._peer) from error
            raise PeerLostError(self.operation, self._board.member_status(self._member)) from error
        return True

    def ready(self) -> bool:
        """Whether something has come, or nothing will come any more."""
        try:
            return self._end.readable()
        except SharedMemoryError:  # `advance` tells
            return True

    def missing(self) -> tuple[int, ...]:
        """The sender's member number."""
        return (self._member,)

    def _take_next(self) -> bool:
        """Turn to the next tensor; whether there is one."""
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
        """Take what has come inside chunks; whether the tensor is filled."""
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

    def _take_from_spill(self, chunk: Chunk) -> None:
        spill = self._end.spill(chunk)
        copy_bytes(self._address + self._received, spill.address, chunk.used)
        spill.mark(taken=False)
        if not chunk.kept:
            spill.segment.close()
        self._end.take(chunk)
        self._received += chunk.used
        self._filled = self._received == self._total
