"""A ring whose writer and readers are all in this process: tests set its state by hand."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from shm_broadcast import layout
from shm_broadcast.queue.handle import create_ring
from shm_broadcast.ring.reader import RingReader
from shm_broadcast.ring.writer import RingWriter
from shm_broadcast.state.board import Board

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Buffer

    from shm_broadcast.ring.reader import EncodedMessage

CODEC = 1
CAPACITY = 64 << 10


class NoRoomError(Exception):
    """What `Ring.write` raises when the ring is full: it never waits."""


class Ring:
    """Member 0 writes, members 1, 2, ... read."""

    def __init__(self, boards: Sequence[Board], capacity: int) -> None:
        self.boards = boards
        self.n_readers = len(boards) - 1
        self.segment = create_ring(boards[0], 0, range(1, len(boards)), capacity)
        self.words = self.segment.words
        self.capacity = self.words.load64(layout.RING_CAPACITY)
        self.writer = self.attach_writer()
        self.readers = [self.attach_reader(reader) for reader in range(self.n_readers)]

    def attach_writer(self) -> RingWriter:
        return RingWriter(self.segment, self.boards[0], 0, range(1, len(self.boards)))

    def attach_reader(self, reader: int) -> RingReader:
        board = self.boards[reader + 1]
        return RingReader(self.segment, board, reader + 1, reader, self.n_readers, 0)

    @property
    def published(self) -> int:
        return self.words.load64(layout.RING_PUBLISHED)

    def consumed(self, reader: int = 0) -> int:
        return self.words.load64(layout.reader_line(reader) + layout.READER_CONSUMED)

    def begin_at(self, position: int) -> None:
        """Put everyone at ``position``, as if so many bytes had gone through."""
        self.words.store64(layout.RING_PUBLISHED, position)
        self.words.store64(layout.RING_GATE, position)
        for reader in range(self.n_readers):
            self.words.store64(layout.reader_line(reader) + layout.READER_CONSUMED, position)

    def write(self, *main: Buffer, buffers: Sequence[Buffer] = ()) -> None:
        """Write a message by the general path, or raise `NoRoomError`."""

        def refuse(need: int) -> None:
            raise NoRoomError

        self.writer.write(CODEC, main, [memoryview(each).cast("B") for each in buffers], refuse)

    def read(self, reader: int = 0) -> tuple[bytes, list[bytes]] | None:
        """The next message's main part and buffers, if it is there."""
        message = self.readers[reader].try_read(0)
        return None if message is None else plain(message)


def plain(message: EncodedMessage) -> tuple[bytes, list[bytes]]:
    code, main, buffers = message
    assert code == CODEC
    return bytes(main), [bytes(each) for each in buffers]


@contextmanager
def ring(n_readers: int = 1, capacity: int = CAPACITY) -> Iterator[Ring]:
    first = Board.create(1 + n_readers, member=0)
    boards = [first, *(Board.attach(first.handle(), 1 + each) for each in range(n_readers))]
    made = Ring(boards, capacity)
    try:
        yield made
    finally:
        made.segment.close()
        for board in boards:
            board.close()
