"""Messages between two ranks, as tasks: sending and receiving one tensor.

Tensors travel through the box between the two. A sender needs no receiver: where the box is full,
and the receiver does not empty it, the rest of a tensor goes into parcels, as long as the box has
room for letters about them, and parcels of no more than `AHEAD_BYTES` wait to be received.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, TypeVar

from device_comm.shm.boxes import Inbox, Outbox
from device_comm.shm.mailbox import (
    LETTER_BYTES,
    PARCEL,
    PIECE_BYTES,
    RING_BYTES,
    SMALL_BYTES,
    Letter,
    wanted_room,
)
from device_comm.shm.memory import copy
from device_comm.shm.parcels import ParcelPool, ReceivedParcels, SentParcel
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
    from device_comm.shm.mailbox import MakeMover
    from shm_broadcast.board import Board
    from shm_broadcast.segment import Segment


LETTERS_FOR_PARCELS: Final = 32
"""More than any message takes: four kept ones, and then of twice the size each time."""

Box = TypeVar("Box", Outbox, Inbox)

PATIENCE_NS: Final = 300_000
"""What a receiver that keeps up needs to empty a box, several times over."""


class Mail:
    """All boxes of one rank. Boxes are made when they are first used.

    Attributes:
        parcels: what this rank sends large messages in.
    """

    def __init__(
        self,
        board: Board,
        members: Sequence[int],
        rank: int,
        group: Segment,
        layout: GroupLayout,
        make_mover: MakeMover,
    ) -> None:
        self._board = board
        self._members = members
        self._rank = rank
        self._group = group
        self._layout = layout
        self._make_mover = make_mover
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self.parcels = ParcelPool()
        self._received: dict[int, ReceivedParcels] = {}

    def outbox(self, peer: int) -> Outbox:
        """The box to rank ``peer``."""
        box = self._outboxes.get(peer)
        return self._outboxes.setdefault(peer, self._box(Outbox, peer)) if box is None else box

    def inbox(self, peer: int) -> Inbox:
        """The box from rank ``peer``."""
        box = self._inboxes.get(peer)
        return self._inboxes.setdefault(peer, self._box(Inbox, peer)) if box is None else box

    def sending(self, tensor: Tensor, peer: int, operation: str, sent: int = 0) -> Sending:
        """A task that sends ``tensor``, contiguous, to rank ``peer``, from byte ``sent`` on."""
        member = self._members[peer]
        return Sending(self.outbox(peer), self.parcels, tensor, member, operation, sent)

    def receiving(self, tensor: Tensor, peer: int, operation: str, received: int = 0) -> Receiving:
        """A task that fills ``tensor``, contiguous, with what rank ``peer`` sends next, from byte
        ``received`` on.
        """
        return Receiving(
            self._board,
            self.inbox(peer),
            self._received.setdefault(peer, ReceivedParcels()),
            tensor,
            peer,
            self._members[peer],
            operation,
            received,
        )

    def _box(self, kind: type[Box], peer: int) -> Box:
        member = self._members[peer]
        return kind(
            self._group,
            self._layout,
            self._rank,
            peer,
            self._make_mover,
            lambda: self._board.ring(member),
        )

    def goes_ahead(self, peer: int, size: int) -> bool:
        """Whether a message of ``size`` bytes to rank ``peer`` can be sent now, if none waits."""
        box = self._outboxes.get(peer)
        room = RING_BYTES if box is None else box.room
        if size <= PIECE_BYTES and room >= wanted_room(size):
            return True
        letters = room >= LETTERS_FOR_PARCELS * LETTER_BYTES
        return size > SMALL_BYTES and letters and self.parcels.allow(size)

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
        self,
        box: Outbox,
        parcels: ParcelPool,
        tensor: Tensor,
        member: int,
        operation: str,
        sent: int,
    ) -> None:
        self.operation = operation
        self._box = box
        self._parcels = parcels
        self._tensor = tensor
        self._address = tensor.data_ptr()
        self._total = tensor.nbytes
        self._dtype = DTYPE_CODES.get(tensor.dtype, 0)
        self._member = member
        self._sent = sent
        self._ahead = False

    def advance(self, spin_ns: int) -> bool:
        """Send what there is room for; whether all is sent."""
        patience, spare = PATIENCE_NS if self._left > SMALL_BYTES else spin_ns, 0
        while True:
            self._sent = self._box.mover.push(
                self._address, self._total, self._dtype, self._sent, patience
            )
            if self._sent == self._total:
                return True
            if self._may_use_parcels():
                self._ahead = True
                parcel = self._parcels.take(self._left, spare)
                self._post(parcel)
                patience, spare = 0, 0 if parcel.kept else 2 * parcel.room
            elif not self._box.takes_inside(self._left):
                return False

    def ready(self) -> bool:
        """Whether there is room."""
        return self._box.takes_inside(self._left) or self._may_use_parcels()

    def missing(self) -> tuple[int, ...]:
        """The receiver."""
        return (self._member,)

    @property
    def _left(self) -> int:
        return self._total - self._sent

    def _may_use_parcels(self) -> bool:
        """Whether more may go into parcels: of a message, all or nothing."""
        if self._left <= SMALL_BYTES or self._box.room < LETTER_BYTES:
            return False
        return self._ahead or self._parcels.allow(self._left)

    def _post(self, parcel: SentParcel) -> None:
        """Send in ``parcel`` what goes into it."""
        used = min(self._left, parcel.room)
        copy(parcel.address, self._address + self._sent, used)
        fd, size, nonce = parcel.handle.fd, parcel.handle.size, parcel.handle.nonce
        self._box.post(
            Letter(PARCEL, self._dtype, parcel.kept, fd, self._total, self._sent, used, size, nonce)
        )
        self._sent += used


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
        received: int,
    ) -> None:
        self.operation = operation
        self._board = board
        self._box = box
        self._parcels = parcels
        self._tensor = tensor
        self._address = tensor.data_ptr()
        self._total = tensor.nbytes
        self._dtype = DTYPE_CODES.get(tensor.dtype, 0)
        self._peer = peer
        self._member = member
        self._received = received

    def advance(self, spin_ns: int) -> bool:
        """Take what has come; whether that is all.

        Raises:
            DivergenceError: the sender sent another dtype or size.
            GroupClosedError: the sender has closed its communicator.
            PeerLostError: the sender ended before its message could be found.
        """
        try:
            while not self._pull(spin_ns):
                letter = self._box.peek()
                if letter is None:
                    if not self._box.ended:
                        return False
                    self._board.check(self.operation)  # why it has, if the group was aborted
                    raise GroupClosedError(f"{self.operation}: rank {self._peer} has closed")
                self._check(letter)
                if letter.kind == PARCEL:
                    self._open(letter)
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

    def _pull(self, spin_ns: int) -> bool:
        """Take what has come inside letters; whether that is all."""
        mover = self._box.find_mover()
        if mover is not None:
            self._received = mover.pull(
                self._address, self._total, self._dtype, self._received, spin_ns
            )
        return self._received == self._total

    def _check(self, letter: Letter) -> None:
        if not letter.continues(self._total, self._dtype, self._received):
            names = {code: str(dtype) for dtype, code in DTYPE_CODES.items()}
            raise DivergenceError(
                self._peer,
                f"{self.operation} of {self._total} bytes of {self._tensor.dtype}",
                f"send of {letter.total} bytes of {names.get(letter.dtype, 'another dtype')}",
            )

    def _open(self, letter: Letter) -> None:
        """Take a letter's parcel."""
        parcel = self._parcels.find(self._box.parcel(letter), letter.kept)
        copy(self._address + self._received, parcel.address, letter.used)
        parcel.mark(taken=False)
        if not letter.kept:
            parcel.segment.close()
        self._box.take(letter)
        self._received += letter.used
