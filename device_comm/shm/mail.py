"""Messages between two ranks, as tasks: sending and receiving one tensor.

Small tensors travel in letters, others in parcels, filled and emptied piece by piece, so that both
ends copy at the same time. A sender needs no receiver as long as its box has room for letters; a
tensor takes a few of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from device_comm.shm.mailbox import DATA_BYTES, INSIDE, PARCEL, Inbox, Letter, Outbox
from device_comm.shm.memory import copy
from device_comm.shm.parcels import ParcelPool, ReceivedParcels
from device_comm.shm.signature import DTYPE_CODES
from shm_broadcast.errors import (
    DivergenceError,
    GroupClosedError,
    PeerLostError,
    SharedMemoryError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from device_comm.shm.layout import GroupLayout
    from shm_broadcast.board import Board
    from shm_broadcast.segment import Segment


class Mail:
    """All boxes of one rank. Boxes are made when they are first used.

    Attributes:
        parcels: what this rank sends large messages in.
    """

    def __init__(
        self, board: Board, members: Sequence[int], rank: int, group: Segment, layout: GroupLayout
    ) -> None:
        self._board = board
        self._members = members
        self._rank = rank
        self._group = group
        self._layout = layout
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self.parcels = ParcelPool()
        self._received: dict[int, ReceivedParcels] = {}

    def sending(self, tensor: Tensor, peer: int, operation: str) -> Sending:
        """A task that sends ``tensor``, contiguous, to rank ``peer``."""
        box = self._outboxes.get(peer)
        if box is None:
            member = self._members[peer]
            box = self._outboxes[peer] = Outbox(
                self._group, self._layout, self._rank, peer, lambda: self._board.ring(member)
            )
            self._board.ring(member)
        return Sending(box, self.parcels, tensor, self._members[peer], operation)

    def receiving(self, tensor: Tensor, peer: int, operation: str) -> Receiving:
        """A task that fills ``tensor``, contiguous, with what rank ``peer`` sends next."""
        box = self._inboxes.get(peer)
        if box is None:
            member = self._members[peer]
            box = self._inboxes[peer] = Inbox(
                self._group, self._layout, self._rank, peer, lambda: self._board.ring(member)
            )
            self._received[peer] = ReceivedParcels()
        return Receiving(
            self._board, box, self._received[peer], tensor, peer, self._members[peer], operation
        )

    def undelivered(self) -> list[int]:
        """The ranks that have not received all that was sent to them."""
        if self.parcels.waiting:
            return list(self._outboxes)
        return [rank for rank, box in self._outboxes.items() if not box.empty]

    def close(self) -> None:
        """Let go of everything."""
        for outbox in self._outboxes.values():
            outbox.close()
        for inbox in self._inboxes.values():
            inbox.close()
        for received in self._received.values():
            received.close()
        self.parcels.close()


class Sending:
    """One tensor on its way out; a `shm_broadcast.progress.Task`."""

    def __init__(
        self, box: Outbox, parcels: ParcelPool, tensor: Tensor, member: int, operation: str
    ) -> None:
        self.operation = operation
        self._box = box
        self._parcels = parcels
        self._tensor = tensor
        self._address = tensor.data_ptr()
        self._total = tensor.nbytes
        self._dtype = DTYPE_CODES.get(tensor.dtype, 0)
        self._member = member
        self._sent = 0

    def advance(self, spin_ns: int) -> bool:  # noqa: ARG002 - room comes late or at once
        """Send what there is room for; whether all is sent."""
        spare = 0
        while self._sent < self._total:
            if not self._box.has_room():
                return False
            left = self._total - self._sent
            if left <= DATA_BYTES:
                copy(self._box.data_address(), self._address + self._sent, left)
                letter = self._letter(INSIDE, left)
            else:
                parcel = self._parcels.take(left, spare)
                used = min(left, parcel.room)
                copy(parcel.address, self._address + self._sent, used)
                parcel.mark(taken=True)
                handle = parcel.handle
                letter = self._letter(PARCEL, used)._replace(
                    kept=parcel.kept, fd=handle.fd, size=handle.size, nonce=handle.nonce
                )
                spare = spare if parcel.kept else 2 * used
            self._box.post(letter)
            self._sent += letter.used
        return True

    def ready(self) -> bool:
        """Whether there is room."""
        return self._box.has_room()

    def missing(self) -> tuple[int, ...]:
        """The receiver."""
        return (self._member,)

    def _letter(self, kind: int, used: int) -> Letter:
        return Letter(kind, self._dtype, False, 0, self._total, self._sent, used)


class Receiving:
    """One tensor on its way in; a `shm_broadcast.progress.Task`."""

    def __init__(
        self,
        board: Board,
        box: Inbox,
        parcels: ReceivedParcels,
        tensor: Tensor,
        peer: int,
        member: int,
        operation: str,
    ) -> None:
        self.operation = operation
        self._board = board
        self._box = box
        self._parcels = parcels
        self._tensor = tensor
        self._address = tensor.data_ptr()
        self._total = tensor.nbytes
        self._peer = peer
        self._member = member
        self._received = 0

    def advance(self, spin_ns: int) -> bool:  # noqa: ARG002 - senders wake whoever sleeps
        """Take what has come; whether that is all.

        Raises:
            DivergenceError: the sender sent another dtype or size.
            GroupClosedError: the sender has closed its communicator.
            PeerLostError: the sender ended before its message could be found.
        """
        try:
            while self._received < self._total:
                letter = self._box.peek()
                if letter is None:
                    if not self._box.ended:
                        return False
                    self._board.check(self.operation)  # why it has, if the group was aborted
                    raise GroupClosedError(f"{self.operation}: rank {self._peer} has closed")
                self._check(letter)
                self._open(letter)
                self._box.take()
                self._received += letter.used
        except SharedMemoryError as error:
            raise PeerLostError(self.operation, self._board.member_status(self._member)) from error
        return True

    def ready(self) -> bool:
        """Whether something has come, or nothing will."""
        try:
            return self._box.readable()
        except SharedMemoryError:  # `advance` tells
            return True

    def missing(self) -> tuple[int, ...]:
        """The sender."""
        return (self._member,)

    def _check(self, letter: Letter) -> None:
        ours = (DTYPE_CODES.get(self._tensor.dtype, 0), self._total, self._received)
        if (letter.dtype, letter.total, letter.offset) != ours:
            names = {code: str(dtype) for dtype, code in DTYPE_CODES.items()}
            raise DivergenceError(
                self._peer,
                f"{self.operation} of {self._total} bytes of {self._tensor.dtype}",
                f"send of {letter.total} bytes of {names.get(letter.dtype, 'another dtype')}",
            )

    def _open(self, letter: Letter) -> None:
        target = self._address + self._received
        if letter.kind == INSIDE:
            copy(target, self._box.data_address(), letter.used)
            return
        parcel = self._parcels.find(self._box.parcel(letter), letter.kept)
        copy(target, parcel.address, letter.used)
        parcel.mark(taken=False)
        if not letter.kept:
            parcel.segment.close()
