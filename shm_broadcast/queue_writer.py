"""The writing end of a message queue: encodes once, delivers to all readers or to none.

Readers on the writer's host read a ring, readers on other hosts a `RemoteWriter`. A message becomes
visible in the ring only when the remote readers have it for certain, so that one that times out
reaches nobody.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

from shm_broadcast.arena import PLACED_BYTES, BlockWriter, Placed
from shm_broadcast.deadline import NEVER, Deadline
from shm_broadcast.errors import GroupClosedError, name_of
from shm_broadcast.turn import Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer

    from shm_broadcast.board import Board
    from shm_broadcast.codec import Codec
    from shm_broadcast.remote_writer import RemoteWriter
    from shm_broadcast.ring_writer import RingWriter

REMOTE_HEADER: Final = struct.Struct("<BI")
"""The first part of a remote message: the codec, and how many parts make the main part."""


class QueueWriter:
    """Encodes and delivers; one call at a time, from any thread."""

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
        self._only_ring = ring if remote is None else None
        self._closed = False
        self._turn = Turn()

    def enqueue(self, message: Any, timeout: float | Deadline | None) -> None:
        """See `MessageQueue.enqueue`."""
        codec, ring = self._codec, self._only_ring
        if not self._turn.take_now():
            timeout = Deadline.after(timeout)
            self._turn.take(timeout, "enqueue", self._check)
        try:
            main, buffers = codec.encode(message)
            if (
                ring is not None
                and not buffers
                and len(main) == 1
                and not self._closed
                and ring.try_write(codec.code, main[0])
            ):
                return
            self._check("enqueue")
            self._board.stamp("enqueue")
            self._deliver(main, buffers, Deadline.after(timeout))
        finally:
            self._turn.give_back()

    def wait_until_ready(self, deadline: Deadline) -> None:
        """Wait until every reader has joined."""
        if self._ring is not None:
            self._board.wait_for_members(deadline, self._ring.readers)
        if self._remote is not None:
            self._remote.wait_ready(deadline, lambda: self._check("wait_until_ready"))

    def behind(self) -> dict[int, int]:
        """For each reader of the ring that has not left: the messages it has not read."""
        return {} if self._ring is None else self._ring.behind()

    def close(self) -> None:
        """Tell all readers that nothing more will come; wake a thread that waits here."""
        self._closed = True
        self._board.ring_own()
        if self._ring is not None:
            self._ring.close()
        if self._remote is not None:
            self._remote.close()
        if self._blocks is not None:
            self._turn.take(NEVER, "shutdown", lambda _: None)
            self._blocks.close()
            self._turn.give_back()

    def _deliver(
        self, main: Sequence[Buffer], buffers: Sequence[memoryview], deadline: Deadline
    ) -> None:
        code = self._codec.code

        def send_to(remote: RemoteWriter) -> None:
            header = REMOTE_HEADER.pack(code, len(main))
            remote.send([header, *main, *buffers], deadline, lambda: self._check("enqueue"))

        ring, remote = self._ring, self._remote
        if ring is None:
            if remote is not None:
                send_to(remote)
            return
        placed = self._place(buffers)
        if placed:
            buffers = [
                placed[i].descriptor if i in placed else each for i, each in enumerate(buffers)
            ]

        def withdraw() -> None:
            for each in placed.values():
                each.withdraw()

        ring.write(
            code,
            main,
            buffers,
            wait_for_room=lambda need: self._wait_for_room(ring, need, deadline),
            placed=placed,
            before_last=None if remote is None else lambda: send_to(remote),
            withdraw=withdraw,
        )

    def _place(self, buffers: Sequence[memoryview]) -> dict[int, Placed]:
        """Put the large ones of ``buffers`` into blocks, as far as there is room for blocks."""
        placed: dict[int, Placed] = {}
        if self._blocks is not None:
            for index, buffer in enumerate(buffers):
                block = self._blocks.place(buffer) if buffer.nbytes >= PLACED_BYTES else None
                if block is not None:
                    placed[index] = block
        return placed

    def _wait_for_room(self, ring: RingWriter, need: int, deadline: Deadline) -> None:
        self._board.wait(
            lambda: ring.has_room(need) or ring.deserted() or self._closed,
            deadline,
            "enqueue",
            lambda: ring.laggards(need),
            detail=lambda: _how_far(self._board, ring.behind()),
            watch=self._watch,
        )
        self._check("enqueue")
        if ring.deserted():
            raise GroupClosedError("enqueue: every reader has left")

    def _check(self, operation: str) -> None:
        if self._closed:
            raise GroupClosedError(f"{operation}: the queue has been shut down in this process")
        self._board.check(operation)
        if self._watch is not None:
            self._watch(operation)


def _how_far(board: Board, behind: dict[int, int]) -> str:
    return "; ".join(
        f"{name_of(board.ranks[member])} is {count} messages behind"
        for member, count in behind.items()
        if count
    )
