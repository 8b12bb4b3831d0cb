"""The reading end of a ring: the next record, and putting a message of any size together.

Guarantees
- A message is handed out once, whole; one that its writer cancelled is not handed out at all.
- What has arrived of an unfinished message is kept between calls.
- A reader that joins in the middle of a message skips to the next one.

Assumes: one reading thread at a time.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast

from shm_broadcast import layout
from shm_broadcast.arena import BlockReader
from shm_broadcast.atomics import native
from shm_broadcast.errors import MessageDecodeError, name_of
from shm_broadcast.recycling import RECYCLED_BYTES, RecyclingPool, memory_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Buffer

    from shm_broadcast._native import FastReader
    from shm_broadcast.board import Board
    from shm_broadcast.segment import Segment

_RECORD = struct.Struct(layout.RECORD_FORMAT)


class Record(NamedTuple):
    """One record, still in the ring; ``data`` is where its payload lies in the segment."""

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
        """Whether a message is in this record alone."""
        return self.kind == layout.KIND_MESSAGE and self.size == self.total


Message: TypeAlias = "tuple[int, Buffer, Sequence[Buffer]]"
"""One encoded message in memory of its own: codec, main part, out-of-band buffers."""


class RingReader:
    """Reads records of ``segment`` as reader number ``reader`` and wakes the writer."""

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
        self._pool = RecyclingPool()
        self._blocks = BlockReader(reader)
        self._unfinished: _Assembly | None = None
        if self._position() == layout.LEFT:
            self._join_again()
        self._fast: FastReader | None = None
        if native is not None:
            self._fast = native.FastReader(
                self._words,
                board.words,
                self._data,
                board.slot_offset(member),
                (board.doorbell_offset(writer),),
                self._line,
            )

    @property
    def readable(self) -> bool:
        """Whether a record is there."""
        return self._words.load64(layout.RING_PUBLISHED) != self._position()

    def look(self, spin_ns: int) -> bool:
        """Whether a record is there, or comes in ``spin_ns``; looks without Python's lock."""
        return self._words.spin64(layout.RING_PUBLISHED, self._position(), spin_ns)

    @property
    def writer_closed(self) -> bool:
        """Whether the writer has said that nothing more will come."""
        return self._words.load32(layout.RING_CLOSED) != 0

    def try_read(self, spin_ns: int, *, begins: bool = False) -> Message | None:
        """The next message if it is there within ``spin_ns``, or as much of it as there is.

        Args:
            spin_ns: how long to look.
            begins: whether this is the first look of an operation, which is stamped then.

        Returns:
            None if the message is not complete yet (what there is of it is kept), or the board is
            aborted.
        """
        if self._unfinished is not None and (finished := self.finished()) is not None:
            return finished
        if self._fast is not None:
            small = self._fast.try_read(spin_ns, begins)
            if small is None:
                return None
            if small is not False:
                self._unfinished = None
                message: Message = small
                return message
        elif not self._look(spin_ns, begins):
            return None
        while (record := self.peek()) is not None:
            self._take(record, spin_ns)
            if (finished := self.finished()) is not None:
                return finished
        return None

    def finished(self) -> Message | None:
        """The message that is put together, if nothing is missing; it is handed out only once.

        One may be left over where a signal's handler raised when its last record had come.
        """
        unfinished = self._unfinished
        if unfinished is None:
            return None
        received = unfinished.received if self._fast is None else self._fast.moved
        if received != unfinished.size:
            return None
        self._unfinished = None
        return unfinished.message()

    def peek(self) -> Record | None:
        """The next record but padding, left in the ring; None if there is none."""
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
        """The payload of a record in the ring, valid until `advance`."""
        return self._segment.memory[record.data : record.data + record.size]

    def advance(self, record: Record) -> None:
        """Give a record's space back to the writer."""
        if record.kind in (layout.KIND_MESSAGE, layout.KIND_CANCEL):
            self._words.store64(self._line + layout.READER_SEQUENCE, record.sequence)
        self._consume(record.next_position)

    def leave(self) -> None:
        """Read no more, and gate the writer no more."""
        self._blocks.forget()
        self._consume(layout.LEFT)

    def _look(self, spin_ns: int, begins: bool) -> bool:
        if begins:
            self._board.stamp("dequeue")
        if self._board.aborted:
            return False
        return self._words.spin64(layout.RING_PUBLISHED, self._position(), spin_ns)

    def _join_again(self) -> None:
        """Begin with the next message, and gate the writer again.

        A writer that has not seen the new gate yet may go on up to the one it knows. Each end makes
        its own known, passes a full fence and looks at the other's, so that one of them notices.
        """
        words = self._words
        while True:
            position = words.load64(layout.RING_PUBLISHED)
            words.store64(self._line + layout.READER_CONSUMED, position)
            words.fence()
            if words.load64(layout.RING_GATE) <= position:
                break
        words.store64(self._line + layout.READER_SEQUENCE, words.load64(layout.RING_SEQUENCE))

    def _take(self, record: Record, spin_ns: int) -> None:
        """Consume ``record``, and with C also what of the same message follows within ``spin_ns``.

        Raises:
            MessageDecodeError: it does not belong where it lies; it was skipped.
        """
        if record.kind == layout.KIND_MESSAGE:
            if self._fast is not None:
                self._fast.moved = 0
            self._unfinished = _Assembly(record, self._table(record), self._pool, self._blocks)
        elif record.kind == layout.KIND_CANCEL:
            self._unfinished = None
        unfinished = self._unfinished
        try:
            if unfinished is None or unfinished.size == 0:
                self.advance(record)
            elif self._fast is not None:
                self._fast.read_parts(unfinished.targets, spin_ns)
            else:
                unfinished.fill(self._segment, record)
                self.advance(record)
        except ValueError as error:
            self._unfinished = None
            self.advance(record)
            writer = name_of(self._board.ranks[self._writer])
            raise MessageDecodeError(f"message {record.sequence} of {writer}: {error}") from error

    def _table(self, record: Record) -> tuple[int, ...]:
        return struct.unpack_from(f"<{record.n_buffers}Q", self._segment.memory, record.data)

    def _position(self) -> int:
        return self._words.load64(self._line + layout.READER_CONSUMED)

    def _consume(self, position: int) -> None:
        self._words.store64(self._line + layout.READER_CONSUMED, position)
        self._board.progress()
        self._board.ring(self._writer)


class _Assembly:
    """A message on its way: final memory for each part, filled record by record.

    Attributes:
        targets: the memory of its parts, in order.
        size: their bytes.
        received: how many of these `fill` has brought.
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
        self.size = first.total - 8 * len(entries)
        main = self.size - sum(sizes)
        self._main: Buffer = (
            bytearray(main) if main < RECYCLED_BYTES else memory_of(pool.take(main))
        )
        self._buffers = [pool.take(size) for size in sizes]
        self._placed = [index for index, entry in enumerate(entries) if entry & layout.PLACED]
        self._blocks = blocks
        self.targets = cast("tuple[Buffer, ...]", (self._main, *self._buffers))
        self.received = 0

    def fill(self, segment: Segment, record: Record) -> None:
        """Copy a record's payload, but for the table of sizes that the first one begins with."""
        table = 8 * record.n_buffers if record.kind == layout.KIND_MESSAGE else 0
        source, left, before = record.data + table, record.size - table, self.received
        self.received += left
        for target in self.targets:
            with memoryview(target) as memory:
                part = memory[before : before + left]
                segment.words.read_into(source, part)
                source += part.nbytes
                left -= part.nbytes
                before = max(before - memory.nbytes, 0)

    def message(self) -> Message:
        for index in self._placed:
            self._buffers[index] = self._blocks.resolve(self._buffers[index].tobytes())
        return self._codec, self._main, cast("list[Buffer]", self._buffers)
