"""The writing end of a message queue: encodes once, delivers to all readers or to none.

Readers on the writer's host read the ring, readers on other hosts get the message from a
`RemoteWriter`. The ring's last record is published only after the message has been sent to all
remote readers: a message that times out there is cancelled in the ring, and reaches no reader.

The ring is no longer written once all its readers are closed, even in the middle of a message;
likewise the sockets. When all readers of both are closed, `enqueue` raises GroupClosedError.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from shm_broadcast import layout
from shm_broadcast.deadline import NEVER, Deadline
from shm_broadcast.errors import (
    GroupClosedError,
    GroupTimeoutError,
    MemberStatus,
    PeerLostError,
    counted,
    name_of,
)
from shm_broadcast.eventcount import TimedLock
from shm_broadcast.ring.buffers import PLACED_BYTES, BlockWriter, PlacedBuffer
from shm_broadcast.state.board import Board

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from shm_broadcast.codec import Codec
    from shm_broadcast.net.writer import RemoteWriter
    from shm_broadcast.ring.writer import RingWriter

_log = logging.getLogger(__name__)

REMOTE_HEADER: Final = struct.Struct("<BI")
"""The first part of a remote message: the codec, and the number of parts of the main part."""


class _NoReadersError(Exception):
    """Every reader of the ring is closed."""


class QueueWriter:
    """Encodes and delivers messages. Any thread may call; calls run one at a time."""

    def __init__(
        self,
        board: Board,
        codec: Codec,
        ring: RingWriter | None,
        remote: RemoteWriter | None,
        blocks: BlockWriter | None = None,
        watch: Callable[[str], None] | None = None,
    ) -> None:
        self._board = board
        self._codec = codec
        self._ring = ring
        self._remote = remote
        self._blocks = blocks
        self._watch = watch
        # Set if all readers are on this host: one C call may then send a small message.
        self._try_write = ring.try_write if ring is not None and remote is None else None
        self._encode_whole = codec.encode_whole
        self._closed = False
        self._lock = TimedLock()

    def enqueue(
        self,
        message: Any,
        timeout: float | Deadline | None,
        begins: Callable[[], object] | None = None,
    ) -> None:
        """See `MessageQueue.enqueue`."""
        with self._lock.owner_lock as acquired:
            if not acquired:
                timeout = Deadline.within(timeout)
                self._lock.acquire(timeout, "enqueue", self._check)
            codec, encode, try_write = self._codec, self._encode_whole, self._try_write
            main, buffers = codec.encode(message) if encode is None else ((encode(message),), ())
            if begins is not None:
                begins()
            if (
                try_write is not None
                and not buffers
                and len(main) == 1
                and not self._closed
                and try_write(codec.code, main[0])
            ):
                return
            self._check("enqueue")
            self._deliver(main, buffers, Deadline.within(timeout))

    def enqueue_encoded(self, data: Buffer, timeout: float | Deadline | None) -> None:
        """See `MessageQueue.enqueue_encoded`."""
        deadline = Deadline.within(timeout)
        with self._lock.owner_lock as acquired:
            if not acquired:
                self._lock.acquire(deadline, "enqueue", self._check)
            self._check("enqueue")
            self._deliver((data,), (), deadline)

    def wait_until_ready(self, deadline: Deadline) -> None:
        """Wait until every reader has joined."""
        operation, remote = "wait_until_ready", self._remote
        late = self._wait_for_local_readers(operation, deadline)
        if remote is not None:
            try:
                remote.wait_ready(deadline, lambda: self._check(operation))
            except GroupTimeoutError as error:
                late += error.waiting_for
        if late:
            raise GroupTimeoutError(f"{self._board.name} {operation}", deadline.timeout, late)

    def remove_reader(self, rank: int) -> None:
        """See `MessageQueue.remove_reader`."""
        operation, ring, remote = "remove_reader", self._ring, self._remote
        with self._lock.owner_lock as acquired:
            if not acquired:
                self._lock.acquire(NEVER, operation, self._check)
            self._check(operation)
            for member in () if ring is None else ring.readers:
                if ring is not None and self._board.ranks[member] == rank:
                    with self._board.lost_slot(member):
                        ring.remove(member)
                    return
            if remote is None or rank not in remote.handle.readers:
                raise ValueError(f"rank {rank} is no reader of this queue")
            remote.remove(rank)

    def behind(self) -> dict[int, int]:
        """See `MessageQueue.behind`."""
        return {} if self._ring is None else self._ring.behind()

    def close(self) -> None:
        """Close this end for all readers; a thread that waits in `enqueue` raises."""
        self._closed = True
        self._board.notify_self()
        if self._ring is not None:
            self._ring.close()
        if self._remote is not None:
            self._remote.close()
        if self._blocks is not None and not self._lock.owner_lock.is_owned():
            # Under the lock: another thread may still copy into a block.
            with self._lock.owner_lock as acquired:
                if not acquired:
                    self._lock.acquire(NEVER, "shutdown", lambda _: None)
                self._blocks.close()

    def _deliver(
        self, main: Sequence[Buffer], buffers: Sequence[memoryview], deadline: Deadline
    ) -> None:
        size = sum(memoryview(part).nbytes for part in (*main, *buffers))
        number = 0 if self._ring is None else (self._ring.sequence + 1) & 0xFFFFFFFF
        begun = self._board.record_begin("enqueue", "", layout.DID_ENQUEUE, size, number)
        try:
            self._deliver_to_all(main, buffers, deadline)
        except BaseException as error:
            self._board.record_end(begun, error)
            if isinstance(error, PeerLostError):
                reader = {"rank": error.rank, "group": self._board.name}
                _log.info("a reader of a queue was lost: %s", error, extra=reader)
            raise
        finally:
            if self._closed and self._blocks is not None:  # a signal handler of this thread closed
                self._blocks.close()
        self._board.record_end(begun)

    def _deliver_to_all(
        self, main: Sequence[Buffer], buffers: Sequence[memoryview], deadline: Deadline
    ) -> None:
        ring, remote = self._ring, self._remote

        def send() -> bool:
            if remote is None:
                return False
            parts = [REMOTE_HEADER.pack(self._codec.code, len(main)), *main, *buffers]
            return remote.send(parts, deadline, lambda: self._check("enqueue"))

        if ring is not None and not ring.has_no_readers():
            before_last = None if remote is None or remote.has_no_readers() else send
            with suppress(_NoReadersError):
                self._write(ring, main, buffers, deadline, before_last)
                return
        if not send() and (ring is not None or remote is not None):
            raise GroupClosedError("enqueue: every reader has closed the queue")

    def _write(
        self,
        ring: RingWriter,
        main: Sequence[Buffer],
        buffers: Sequence[memoryview],
        deadline: Deadline,
        before_last: Callable[[], object] | None,
    ) -> None:
        """Write a message to the ring; raise _NoReadersError if its last reader closes."""
        placed = self._place(buffers)

        def withdraw() -> None:
            for each in placed.values():
                each.withdraw()

        ring.write(
            self._codec.code,
            main,
            [placed[i].descriptor if i in placed else each for i, each in enumerate(buffers)],
            wait_for_room=lambda need: self._wait_for_room(ring, need, deadline),
            placed=placed,
            before_last=before_last,
            withdraw=withdraw,
        )

    def _place(self, buffers: Sequence[memoryview]) -> dict[int, PlacedBuffer]:
        """Copy large ``buffers`` into free blocks; return the copies by index."""
        placed: dict[int, PlacedBuffer] = {}
        if self._blocks is None:
            return placed
        try:
            for index, buffer in enumerate(buffers):
                block = self._blocks.place(buffer) if buffer.nbytes >= PLACED_BYTES else None
                if block is not None:
                    placed[index] = block
        except BaseException:
            for each in placed.values():
                each.withdraw()
            raise
        return placed

    def _wait_for_room(self, ring: RingWriter, need: int, deadline: Deadline) -> None:
        self._board.wait(
            lambda: ring.has_room(need) or ring.has_no_readers() or self._closed,
            deadline,
            "enqueue",
            lambda: ring.slow_readers(need),
            detail=lambda: _backlog(self._board, ring.behind()),
            watch=self._watch,
        )
        self._check("enqueue")
        if ring.has_no_readers():
            raise _NoReadersError

    def _wait_for_local_readers(
        self, operation: str, deadline: Deadline
    ) -> tuple[MemberStatus, ...]:
        """Return the readers of the ring that have not joined by the deadline.

        Serves the remote readers meanwhile, which would otherwise be admitted only after the last
        local one.
        """
        ring, remote, board = self._ring, self._remote, self._board
        if ring is None:
            return ()

        def absent() -> list[int]:
            return [member for member in ring.readers if not board.joined(member)]

        def check(_: str) -> None:
            self._check(operation)
            if remote is not None:
                remote.poll()

        try:
            board.wait(
                lambda: self._closed or not absent(), deadline, operation, absent, watch=check
            )
        except GroupTimeoutError as error:
            return error.waiting_for
        self._check(operation)
        return ()

    def _check(self, operation: str) -> None:
        if self._closed:
            raise GroupClosedError(f"{operation}: the queue has been shut down in this process")
        self._board.check(operation)
        if self._watch is not None:
            self._watch(operation)


def _backlog(board: Board, behind: dict[int, int]) -> str:
    return "; ".join(
        f"{name_of(board.ranks[member])} is {counted(count, 'message')} behind"
        for member, count in behind.items()
        if count
    )
