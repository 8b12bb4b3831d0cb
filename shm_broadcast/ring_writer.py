"""The writing end of a ring: where records go, and how a message of any size streams through.

Guarantees
- A record becomes visible whole or not at all.
- Nothing that a reader has not consumed is overwritten.
- A message that cannot be finished is ended by a CANCEL record; there is always room for it.

Assumes: one writing thread at a time.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from shm_broadcast import layout
from shm_broadcast.atomics import native
from shm_broadcast.records import Body, Place, place_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from typing_extensions import Buffer

    from shm_broadcast._native import FastWriter
    from shm_broadcast.board import Board
    from shm_broadcast.segment import Segment

_RECORD = struct.Struct(layout.RECORD_FORMAT)
_LARGEST_RECORD = 128 << 10
_PATIENCE_NS = 50_000
"""How long to look for room between two records before sleeping."""


class RingWriter:
    """Writes records into ``segment`` and wakes the readers, members of ``board``."""

    def __init__(self, segment: Segment, board: Board, member: int, readers: Sequence[int]) -> None:
        self._words = segment.words
        self._board = board
        self.readers = tuple(readers)
        self.capacity = self._words.load64(layout.RING_CAPACITY)
        self._words.store32(layout.RING_CLOSED, 0)  # a predecessor may have closed it
        self._data = layout.data_offset(len(readers))
        self._last_end = 0
        self._largest_payload = min(self.capacity // 8, _LARGEST_RECORD) - layout.RECORD_HEADER
        doorbells = tuple(board.doorbell_offset(reader) for reader in readers)
        self._fast: FastWriter | None = None
        if native is not None:
            self._fast = native.FastWriter(
                self._words, board.words, self._data, board.slot_offset(member), doorbells
            )

    @property
    def sequence(self) -> int:
        """How many messages were begun."""
        return self._words.load64(layout.RING_SEQUENCE)

    def try_write(self, codec: int, body: Buffer) -> bool:
        """Publish a message without out-of-band buffers in one record, if there is room now.

        Stamps the operation if it does.

        Returns:
            False if there is no room, the message is larger than a quarter of the ring, or the
            board is aborted.
        """
        if self._fast is not None:
            return self._fast.try_write(codec, body)
        size = memoryview(body).nbytes
        if 4 * layout.record_stride(size) > self.capacity or self._board.aborted:
            return False
        place = place_whole(size, self._to_end())
        if not self.has_room(place.need):
            return False
        self._board.stamp("enqueue")
        self._begin_message()
        self._write_record(place, layout.KIND_MESSAGE, codec, 0, size, 0, [memoryview(body)])
        return True

    def write(
        self,
        codec: int,
        main: Sequence[Buffer],
        buffers: Sequence[memoryview],
        wait_for_room: Callable[[int], None],
        *,
        placed: Collection[int] = (),
        before_last: Callable[[], None] | None = None,
        withdraw: Callable[[], None] = lambda: None,
    ) -> None:
        """Stream one message through the ring; returns when its last record is published.

        Args:
            codec: goes into the header.
            main: the main part, in pieces.
            buffers: out-of-band buffers of contiguous bytes; their sizes, 8 bytes each, must fit
                one record.
            wait_for_room: waits until so many bytes are free; what it raises cancels the message.
            placed: the indexes in ``buffers`` of descriptors of blocks.
            before_last: called when nothing but publishing the last record is left to do; what it
                raises cancels the message.
            withdraw: called if the message reaches nobody.
        """
        begun, self._last_end = self.sequence, 0
        fast: FastWriter | None = None
        try:
            body = Body(main, buffers, placed)
            if 8 * body.n_buffers > self._largest_payload:
                raise ValueError(
                    f"{body.n_buffers} buffers are too many for a ring of {self.capacity} bytes"
                )
            if before_last is None and body.total:
                fast = self._fast
            if fast is not None:
                self._write_natively(fast, codec, body, wait_for_room)
            else:
                self._write_records(codec, body, wait_for_room, before_last)
        except BaseException:
            # What a signal's handler raises may come when all is published already.
            end = self._words.load64(layout.RING_PUBLISHED)
            whole = end == self._last_end if fast is None else fast.moved == body.total
            if self.sequence == begun:
                withdraw()
            elif not whole:
                self._cancel()
                withdraw()
            raise

    def has_room(self, need: int) -> bool:
        """Whether ``need`` bytes are free behind the slowest reader."""
        words = self._words
        position = words.load64(layout.RING_PUBLISHED)
        if position + need - words.load64(layout.RING_GATE) <= self.capacity:
            return True
        gate = self._slowest()
        if gate == layout.LEFT:
            return False
        words.store64(layout.RING_GATE, gate)
        words.fence()  # a reader that joins again sees this gate, or is seen now
        gate = min(gate, self._slowest())
        words.store64(layout.RING_GATE, gate)
        return position + need - gate <= self.capacity

    def has_left(self, reader: int) -> bool:
        """Whether reader number ``reader`` has left."""
        return self._consumed(reader) == layout.LEFT

    def runs(self, reader: int, pid: int) -> bool:
        """Whether process ``pid`` is reader number ``reader``, and has not ended."""
        return self._board.runs(self.readers[reader], pid)

    def deserted(self) -> bool:
        """Whether every reader has left."""
        return all(self.has_left(reader) for reader in range(len(self.readers)))

    def behind(self) -> dict[int, int]:
        """For each reader (as member of the board) that has not left: messages it has not read."""
        sequence = self.sequence
        return {
            member: sequence
            - self._words.load64(layout.reader_line(reader) + layout.READER_SEQUENCE)
            for reader, member in enumerate(self.readers)
            if not self.has_left(reader)
        }

    def laggards(self, need: int) -> list[int]:
        """The readers (as members of the board) that keep ``need`` bytes from being free."""
        free_from = self._words.load64(layout.RING_PUBLISHED) + need - self.capacity
        return [
            member
            for reader, member in enumerate(self.readers)
            if self._consumed(reader) < free_from
        ]

    def close(self) -> None:
        """Tell the readers that nothing more will come."""
        self._words.store32(layout.RING_CLOSED, 1)
        self._ring_readers()

    def _write_natively(
        self, fast: FastWriter, codec: int, body: Body, wait_for_room: Callable[[int], None]
    ) -> None:
        largest = self._largest_payload
        fast.moved = 0
        while True:
            fast.write_parts(codec, largest, body.parts, _PATIENCE_NS)
            if fast.moved == body.total:
                return
            wait_for_room(body.place(fast.moved, largest, self._to_end()).need)

    def _write_records(
        self,
        codec: int,
        body: Body,
        wait_for_room: Callable[[int], None],
        before_last: Callable[[], None] | None,
    ) -> None:
        offset = 0
        while True:
            place = body.place(offset, self._largest_payload, self._to_end())
            if not self.has_room(place.need):
                wait_for_room(place.need)
            end = offset + place.size
            if end == body.total:
                if before_last is not None:
                    before_last()
                self._last_end = self._words.load64(layout.RING_PUBLISHED) + place.taken
            if offset == 0:
                self._begin_message()
            kind = layout.KIND_FRAGMENT if offset else layout.KIND_MESSAGE
            pieces = body.between(offset, end)
            self._write_record(place, kind, codec, body.n_buffers, body.total, offset, pieces)
            if end == body.total:
                return
            offset = end

    def _to_end(self) -> int:
        return self.capacity - self._words.load64(layout.RING_PUBLISHED) % self.capacity

    def _slowest(self) -> int:
        return min(self._consumed(reader) for reader in range(len(self.readers)))

    def _consumed(self, reader: int) -> int:
        return self._words.load64(layout.reader_line(reader) + layout.READER_CONSUMED)

    def _begin_message(self) -> None:
        self._words.store64(layout.RING_SEQUENCE, self.sequence + 1)

    def _cancel(self) -> None:
        self._write_record(Place(0, 0), layout.KIND_CANCEL, 0, 0, 0, 0, [])

    def _write_record(
        self,
        place: Place,
        kind: int,
        codec: int,
        n_buffers: int,
        total: int,
        offset: int,
        pieces: Sequence[memoryview],
    ) -> None:
        words = self._words
        position = words.load64(layout.RING_PUBLISHED)
        if place.padding:
            padding = place.padding - layout.RECORD_HEADER
            words.write(
                self._data + position % self.capacity,
                _RECORD.pack(padding, layout.KIND_PADDING, 0, 0, 0, 0, 0),
            )
            position += place.padding
        record = self._data + position % self.capacity
        header = _RECORD.pack(place.size, kind, codec, n_buffers, total, self.sequence, offset)
        words.write(record, header)
        target = record + layout.RECORD_HEADER
        for piece in pieces:
            words.write(target, piece)
            target += piece.nbytes
        words.store64(layout.RING_PUBLISHED, position + layout.record_stride(place.size))
        self._ring_readers()

    def _ring_readers(self) -> None:
        self._board.progress()
        for reader in self.readers:
            self._board.ring(reader)
