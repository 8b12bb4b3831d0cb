"""The reading end of a ring: takes records out and assembles messages of any size.

- A message is returned once, whole; a cancelled message is not returned at all.
- The part of a message that has arrived is kept between calls.
- A reader that joins in the middle of a message skips to the next one.

Assumes: one reading thread at a time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, cast

from shm_broadcast import layout
from shm_broadcast._native import FastReader, RecyclingPool
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import (
    GroupTimeoutError,
    MessageDecodeError,
    SharedMemoryError,
    name_of,
)
from shm_broadcast.process import is_ending
from shm_broadcast.ring.buffers import BlockReader, new_pool
from shm_broadcast.segment import Segment, is_transient
from shm_broadcast.state.board import Board

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

_RECORD = struct.Struct(layout.RECORD_FORMAT)

_ENDING_SECONDS = 2.0
"""How long a writer that closes its descriptors, and its blocks, may take to exit."""


class Record(NamedTuple):
    """One record in the ring; `shm_broadcast.layout` draws its header.

    ``data`` is the offset of its payload in the segment, ``next_position`` the ring position of the
    record after it.
    """

    kind: int
    codec: int
    n_buffers: int
    size: int
    total: int
    sequence: int
    offset: int
    data: int
    next_position: int

    @property
    def is_whole_message(self) -> bool:
        """Return whether this record holds a complete message."""
        return self.kind == layout.KIND_MESSAGE and self.size == self.total


EncodedMessage: TypeAlias = "tuple[int, Buffer, Sequence[Buffer]]"
"""One encoded message in memory of its own: codec, main part, out-of-band buffers."""


class RingReader:
    """Reads records of ``segment`` as reader number ``reader`` and wakes the writer.

    Attributes:
        unfinished: the message whose records have not all been taken out, or that was not handed
            out; None if there is none.
        read_small: the next message, if it is of one record, as `try_read` takes it; False if it is
            of several, or None. Only while nothing is unfinished.
        look: whether an unread record is in the ring, or arrives within so many nanoseconds, for
            which others have the GIL. The extension's own function, likewise.
    """

    def __init__(
        self,
        segment: Segment,
        board: Board,
        member: int,
        reader: int,
        n_readers: int,
        writer: int,
    ) -> None:
        self._segment = segment
        self._words = segment.words
        self._board = board
        self._writer = writer
        self._line = layout.reader_line(reader)
        self._data = layout.data_offset(n_readers)
        self._capacity = self._words.load64(layout.RING_CAPACITY)
        self._pool = new_pool()
        self._blocks = BlockReader(reader)
        self.unfinished: _Assembly | None = None
        if self._position() == layout.LEFT:
            self._rejoin()
        else:
            self._words.store64(self._line + layout.READER_JOINED, self._position())
        self._fast = FastReader(
            self._words,
            board.words,
            self._data,
            board.slot_offset(member),
            board.history,
            (board.eventcount_offset(writer),),
            board.oversubscribed,
            self._line,
        )
        self.read_small: Callable[[int, bool], EncodedMessage | Literal[False] | None] = (
            self._fast.try_read
        )
        self.look: Callable[[int], bool] = self._fast.look

    @property
    def begun(self) -> int:
        """Which operation of this member the last ``dequeue`` was."""
        return self._fast.begun

    @property
    def readable(self) -> bool:
        """Return whether an unread record is in the ring."""
        return self._words.load64(layout.RING_PUBLISHED) != self._position()

    @property
    def writer_closed(self) -> bool:
        """Return whether the writer has closed its end: no more messages are published."""
        return self._words.load32(layout.RING_CLOSED) != 0

    def try_read(self, spin_ns: int, *, begins: bool = False) -> EncodedMessage | None:
        """Return the next message if it is complete within ``spin_ns``. Never sleeps.

        ``begins``: a ``dequeue`` begins with this call and is recorded on the board. Returns None
        if the message is not complete (its records so far are kept), or the board is aborted.
        """
        # Complete already: a signal handler raised before the last call could return it.
        if self.unfinished is not None and (finished := self.finished()) is not None:
            return finished
        small = self.read_small(spin_ns, begins)
        if small is None:
            return None
        if small is not False:
            # The rest of an unfinished message is lost: its writer exited, and a successor began
            # with this message.
            self.unfinished = None
            return small
        while (record := self.peek()) is not None:
            self._take(record, spin_ns)
            if (finished := self.finished()) is not None:
                return finished
        return None

    def finished(self) -> EncodedMessage | None:
        """Return the message under assembly if it is complete, and only once.

        Call it before any other read: `try_read` does not return a complete message if a signal
        handler raises after its last record.

        Raises:
            PeerLostError: a block of it is lost with its writer. The message is kept: no later one
                is returned, unless the writer has a successor.
            SharedMemoryError: a block of it cannot be mapped. The message is kept if the cause is
                transient.
        """
        unfinished = self.unfinished
        if unfinished is None:
            return None
        if self._fast.moved != unfinished.size:
            return None
        try:
            message = unfinished.message()
        except SharedMemoryError as error:
            if not is_transient(error):
                self._raise_writer_lost()
                # The writer may reuse earlier blocks that are not mapped here.
                self._words.store64(self._line + layout.READER_JOINED, self._position())
                self.unfinished = None
            raise
        self._board.record_end(self.begun, None, unfinished.size, unfinished.number)
        self.unfinished = None
        return message

    def peek(self) -> Record | None:
        """Return the next record, which stays in the ring, or None. Padding is skipped."""
        while self.readable:
            position = self._position()
            start = self._data + position % self._capacity
            size, kind, codec, n_buffers, total, sequence, offset = _RECORD.unpack_from(
                self._segment.memory, start
            )
            after = position + layout.record_stride(size)
            if kind != layout.KIND_PADDING:
                data = start + layout.RECORD_HEADER
                return Record(kind, codec, n_buffers, size, total, sequence, offset, data, after)
            self._consume(after)
        return None

    def view(self, record: Record) -> memoryview:
        """Return a whole message's payload in the ring, without a copy; valid until `advance`."""
        self.unfinished = None  # it may be a copy of this message, left by a signal handler
        return self._segment.memory[record.data : record.data + record.size]

    def advance(self, record: Record) -> None:
        """Mark a record as read, so that the writer may reuse its space."""
        if record.kind in (layout.KIND_MESSAGE, layout.KIND_CANCEL):
            self._words.store64(self._line + layout.READER_SEQUENCE, record.sequence)
        self._consume(record.next_position)

    def detach(self) -> None:
        """Stop reading; the writer no longer waits for this reader."""
        self.unfinished = None  # which also drops its blocks
        self._blocks.forget()
        self._consume(layout.LEFT)

    def _raise_writer_lost(self) -> None:
        ending = is_ending(self._board.member_status(self._writer).pid)
        deadline = Deadline.after(_ENDING_SECONDS if ending else 0.0)
        with suppress(GroupTimeoutError):
            self._board.wait(bool, deadline, "dequeue", lambda: (self._writer,), spin=0)

    def _rejoin(self) -> None:
        """Start at the next record; from then on the writer overwrites no record that is unread
        here.

        The writer caches the position up to which it may write (the gate), and computed it without
        this reader. So each side stores its own word, passes a full fence, then loads the other's
        word: this reader its position, then the gate; the writer the gate, then all positions (in
        `RingWriter.has_room`). With the fences at least one of them sees the other's store: the
        writer lowers its gate, or this reader finds the gate beyond its position and tries again.
        """
        words = self._words
        while True:
            position = words.load64(layout.RING_PUBLISHED)
            words.store64(self._line + layout.READER_JOINED, position)
            words.store64(self._line + layout.READER_CONSUMED, position)
            words.fence()
            if words.load64(layout.RING_GATE) <= position:
                break
        words.store64(self._line + layout.READER_SEQUENCE, words.load64(layout.RING_SEQUENCE))

    def _take(self, record: Record, spin_ns: int) -> None:
        """Take out ``record``, and the message's records that follow within ``spin_ns``.

        Raises:
            MessageDecodeError: the record does not fit the message; it was skipped.
        """
        try:
            if record.kind == layout.KIND_MESSAGE:
                self._fast.moved = 0
                self.unfinished = _Assembly(record, self._table(record), self._pool, self._blocks)
            elif record.kind == layout.KIND_CANCEL:
                self.unfinished = None
            unfinished = self.unfinished
            # None: a CANCEL, or fragments of a message that began before this reader joined.
            if unfinished is None or unfinished.size == 0:
                self.advance(record)
            else:
                self._fast.read_parts(unfinished.targets, spin_ns)
        except (ValueError, OverflowError, MemoryError, struct.error) as error:
            self.unfinished = None
            self.advance(record)
            writer = name_of(self._board.ranks[self._writer])
            why = f"{type(error).__name__}: {error}"
            raise MessageDecodeError(f"message {record.sequence} of {writer}: {why}") from error

    def _table(self, record: Record) -> tuple[int, ...]:
        return struct.unpack_from(f"<{record.n_buffers}Q", self._segment.memory, record.data)

    def _position(self) -> int:
        return self._words.load64(self._line + layout.READER_CONSUMED)

    def _consume(self, position: int) -> None:
        self._words.store64(self._line + layout.READER_CONSUMED, position)
        self._board.progress()
        self._board.notify(self._writer)


class _Assembly:
    """An incomplete message: its parts' final memory, filled record by record.

    Attributes:
        targets: the memory of the main part and of the out-of-band buffers, in this order.
        size: their bytes, all together.
        number: the message's, modulo 2**32.
    """

    def __init__(
        self,
        first: Record,
        entries: tuple[int, ...],
        pool: RecyclingPool,
        blocks: BlockReader,
    ) -> None:
        sizes = [entry & ~layout.PLACED for entry in entries]
        self._codec = first.codec
        self.number = first.sequence & 0xFFFFFFFF
        self.size = first.total - 8 * len(entries)
        main = self.size - sum(sizes)
        self._main = memoryview(pool.take(main))
        self._buffers = [memoryview(pool.take(size)) for size in sizes]
        self._placed = [index for index, entry in enumerate(entries) if entry & layout.PLACED]
        self._arrays: dict[int, NDArray[np.uint8]] = {}
        self._blocks = blocks
        self.targets = (self._main, *self._buffers)

    def message(self) -> EncodedMessage:
        """Return the complete message, with arrays over blocks instead of their descriptors.

        Blocks that a failed call mapped are kept: the writer reuses a block that is released.
        """
        for index in self._placed:
            if index not in self._arrays:
                self._arrays[index] = self._blocks.resolve(self._buffers[index].tobytes())
        buffers = [self._arrays.get(index, each) for index, each in enumerate(self._buffers)]
        return self._codec, self._main, cast("list[Buffer]", buffers)
