"""The writing end of a ring: a small message is one record, a longer one a stream of records.

- A record becomes visible whole or not at all.
- Records that a reader has not consumed are not overwritten.
- A message that cannot be finished is ended by a CANCEL record; there is always room for it.

`RecordPlace` and `Body` are pure arithmetic; ``next_record`` in native/long_messages.c computes the
same. Assumes: one writing thread at a time.
"""

from __future__ import annotations

import bisect
import itertools
import struct
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from shm_broadcast import layout
from shm_broadcast._native import FastWriter
from shm_broadcast.segment import Segment
from shm_broadcast.state.board import Board

if TYPE_CHECKING:
    from typing_extensions import Buffer


RESERVED_FOR_CANCEL: Final = layout.RECORD_ALIGN
"""Free bytes behind every record, so that a writer can always cancel at once."""


class RecordPlace(NamedTuple):
    """The place of a record: ``padding`` skipped bytes, then ``size`` bytes of payload."""

    padding: int
    size: int

    @property
    def taken(self) -> int:
        """Return the ring's bytes for the padding, the record's header and its payload."""
        return self.padding + layout.record_stride(self.size)

    @property
    def need(self) -> int:
        """Return how many bytes must be free before the write: `taken`, and a CANCEL."""
        return self.taken + RESERVED_FOR_CANCEL


def place_whole(size: int, to_end: int) -> RecordPlace:
    """Return the place of an unsplit record of ``size`` payload bytes.

    ``to_end`` is the number of bytes to the ring's end, where positions wrap. A record that does
    not fit before the end is put at the ring's start, behind padding.
    """
    return RecordPlace(0 if layout.record_stride(size) <= to_end else to_end, size)


class Body:
    """A message as one run of bytes: the table of its buffers' sizes, the main part, the buffers.

    Attributes:
        parts: the table, the main part's pieces and the buffers, in this order.
        total: the bytes of all parts.
        n_buffers: the number of out-of-band buffers.
    """

    def __init__(
        self, main: Sequence[Buffer], buffers: Sequence[memoryview], placed: Collection[int]
    ) -> None:
        """Refer to the caller's memory; nothing is copied.

        Args:
            main: the main part, in contiguous pieces.
            buffers: out-of-band buffers of contiguous bytes.
            placed: the indexes of ``buffers`` that are descriptors of blocks.
        """
        sizes = (
            buffer.nbytes | layout.PLACED * (index in placed)
            for index, buffer in enumerate(buffers)
        )
        self.n_buffers = len(buffers)
        self.parts = (struct.pack(f"<{len(buffers)}Q", *sizes), *main, *buffers)
        self._views = [memoryview(part) for part in self.parts]
        ends = itertools.accumulate(view.nbytes for view in self._views)
        self._starts = [0, *ends]
        self.total = self._starts.pop()

    def place(self, offset: int, largest: int, to_end: int) -> RecordPlace:
        """Return the place of the record whose payload begins at byte ``offset`` of this body.

        Args:
            offset: 0 for the first record, which must hold the whole table of sizes.
            largest: the most payload bytes of a record; a larger body is split into several.
            to_end: bytes to the ring's end. A record of a split body is cut short there rather than
                moved behind padding.
        """
        left = self.total - offset
        if self.total <= largest:
            return place_whole(left, to_end)
        place = place_whole(min(left, largest), to_end)
        first = 1 if offset else 8 * self.n_buffers
        if place.padding and to_end - layout.RECORD_HEADER >= first:
            return RecordPlace(0, to_end - layout.RECORD_HEADER)
        return place

    def between(self, start: int, end: int) -> list[memoryview]:
        """Return views of the body's bytes from ``start`` up to ``end``, in order."""
        pieces: list[memoryview] = []
        for index in range(bisect.bisect_right(self._starts, start) - 1, len(self._views)):
            view, before = self._views[index], self._starts[index]
            if before >= end:
                break
            if view.nbytes:
                pieces.append(view.cast("B")[max(start - before, 0) : end - before])
        return pieces


_RECORD = struct.Struct(layout.RECORD_FORMAT)
_LARGEST_RECORD = 128 << 10
"""The most bytes of a streamed record, header included.

Small against the ring, so that readers copy one record out while the next is copied in.
"""
_PATIENCE_NS = 50_000
"""How long to poll for room between two records before sleeping.

Readers that are copying make room within microseconds; a sleep and a wake cost 35 µs and more.
"""


class RingWriter:
    """Writes records into ``segment`` and wakes the readers.

    Args:
        board: where the writer and the readers are members.
        member: the writer's member number.
        readers: the readers' member numbers, in reader order.

    Attributes:
        capacity: bytes of the ring.
        try_write: publish a message without out-of-band buffers, given its codec's number and
            bytes, as one record, and record it on the board as an ``enqueue``. Returns False, with
            nothing written, if there is no room, the record exceeds a quarter of the ring, or the
            board is aborted. With the extension it is a C function: one call less on the hot path.
    """

    def __init__(self, segment: Segment, board: Board, member: int, readers: Sequence[int]) -> None:
        self._words = segment.words
        self._board = board
        self.readers = tuple(readers)
        self.capacity = self._words.load64(layout.RING_CAPACITY)
        self._words.store32(layout.RING_CLOSED, 0)  # a predecessor may have closed it
        self._data = layout.data_offset(len(readers))
        # The published position behind the message's last record; None before it is known.
        self._last_end: int | None = None
        # An eighth, so that a small ring, too, holds several records of a message at once.
        self._largest_payload = min(self.capacity // 8, _LARGEST_RECORD) - layout.RECORD_HEADER
        eventcounts = tuple(board.eventcount_offset(reader) for reader in readers)
        self._fast = FastWriter(
            self._words,
            board.words,
            self._data,
            board.slot_offset(member),
            board.history,
            eventcounts,
            board.oversubscribed,
        )
        self.try_write: Callable[[int, Buffer], bool] = self._fast.try_write

    @property
    def sequence(self) -> int:
        """Return how many messages have been begun, cancelled ones included."""
        return self._words.load64(layout.RING_SEQUENCE)

    def write(
        self,
        codec: int,
        main: Sequence[Buffer],
        buffers: Sequence[memoryview],
        wait_for_room: Callable[[int], None],
        *,
        placed: Collection[int] = (),
        before_last: Callable[[], object] | None = None,
        withdraw: Callable[[], None] = lambda: None,
    ) -> None:
        """Stream one message through the ring; return when its last record is published.

        If an exception is raised, by this method or a callback, the message is cancelled, unless
        its last record is published.

        Args:
            main: the main part, in contiguous pieces.
            buffers: out-of-band buffers of contiguous bytes; their sizes, 8 bytes each, must fit
                into one record.
            wait_for_room: called with a number of bytes; returns once so many are free.
            placed: the indexes of ``buffers`` that are descriptors of blocks.
            before_last: called once, right before the last record is written.
            withdraw: called if no reader gets the message.

        Raises:
            ValueError: too many buffers for this ring.
        """
        begun, self._last_end = self.sequence, None
        fast: FastWriter | None = None
        try:
            body = Body(main, buffers, placed)
            if 8 * body.n_buffers > self._largest_payload:
                raise ValueError(
                    f"{body.n_buffers} buffers are too many for a ring of {self.capacity} bytes"
                )
            # The C loop publishes the last record itself, so it cannot call `before_last`.
            if before_last is None and body.total:
                fast = self._fast
            if fast is not None:
                self._write_natively(fast, codec, body, wait_for_room)
            else:
                self._write_records(codec, body, wait_for_room, before_last)
        except BaseException:
            # A signal handler may raise after the last record was published. Readers then have the
            # message and release its blocks.
            end = self._words.load64(layout.RING_PUBLISHED)
            whole = end == self._last_end if fast is None else fast.moved == body.total
            if self.sequence == begun:
                withdraw()
            elif not whole:
                self._cancel()
                withdraw()
            raise

    def has_room(self, need: int) -> bool:
        """Return whether ``need`` bytes may be written without overwriting an unread record.

        Also False if every reader is closed; see `has_no_readers`.
        """
        words = self._words
        position = words.load64(layout.RING_PUBLISHED)
        # The gate caches the slowest reader's position. Each reader keeps writing the cache line of
        # its own position, so those are loaded only when the cached value is not enough.
        if position + need - words.load64(layout.RING_GATE) <= self.capacity:
            return True
        gate = self._slowest()
        if gate == layout.LEFT:
            return False
        words.store64(layout.RING_GATE, gate)
        # A reader may rejoin at this moment. With a fence on both sides it sees this gate, or the
        # second load sees its position; see `RingReader._rejoin`.
        words.fence()
        gate = min(gate, self._slowest())
        words.store64(layout.RING_GATE, gate)
        return position + need - gate <= self.capacity

    @property
    def published(self) -> int:
        """Return the position of the next record."""
        return self._words.load64(layout.RING_PUBLISHED)

    def joined_at(self, reader: int) -> int:
        """Return the position of the first record for reader number ``reader``."""
        return self._words.load64(layout.reader_line(reader) + layout.READER_JOINED)

    def has_left(self, reader: int) -> bool:
        """Return whether reader number ``reader`` has closed the queue."""
        return self._consumed(reader) == layout.LEFT

    def is_attached(self, reader: int) -> bool:
        """Return whether reader number ``reader`` has joined, and neither exited nor closed its
        board.
        """
        return self._board.member_status(self.readers[reader]).state in ("idle", "busy")

    def is_running(self, reader: int, pid: int) -> bool:
        """Return whether process ``pid`` is reader number ``reader`` and still runs."""
        return self._board.is_running(self.readers[reader], pid)

    def has_no_readers(self) -> bool:
        """Return whether every reader has closed the queue."""
        return all(self.has_left(reader) for reader in range(len(self.readers)))

    def behind(self) -> dict[int, int]:
        """Return how many messages each open reader has not read, by member number."""
        sequence = self.sequence
        return {
            member: sequence
            - self._words.load64(layout.reader_line(reader) + layout.READER_SEQUENCE)
            for reader, member in enumerate(self.readers)
            if not self.has_left(reader)
        }

    def slow_readers(self, need: int) -> list[int]:
        """Return the members whose unread records keep ``need`` bytes from being free."""
        free_from = self._words.load64(layout.RING_PUBLISHED) + need - self.capacity
        return [
            member
            for reader, member in enumerate(self.readers)
            if self._consumed(reader) < free_from
        ]

    def remove(self, member: int) -> None:
        """Stop waiting for the reader ``member`` of the board; its process has exited."""
        line = layout.reader_line(self.readers.index(member))
        self._words.store64(line + layout.READER_CONSUMED, layout.LEFT)

    def close(self) -> None:
        """Mark the ring as closed, and wake the readers."""
        self._words.store32(layout.RING_CLOSED, 1)
        self._notify_readers()

    def _write_natively(
        self, fast: FastWriter, codec: int, body: Body, wait_for_room: Callable[[int], None]
    ) -> None:
        largest = self._largest_payload
        fast.moved = 0
        while True:  # returns early: no room for `_PATIENCE_NS`, an abort, or 64 MiB in one call
            fast.write_parts(codec, largest, body.parts, _PATIENCE_NS)
            if fast.moved == body.total:
                return
            wait_for_room(body.place(fast.moved, largest, self._to_end()).need)

    def _write_records(
        self,
        codec: int,
        body: Body,
        wait_for_room: Callable[[int], None],
        before_last: Callable[[], object] | None,
    ) -> None:
        offset = 0
        while True:
            place = body.place(offset, self._largest_payload, self._to_end())
            if not self.has_room(place.need):
                wait_for_room(place.need)
            end = offset + place.size
            if end == body.total:
                # There is room: after `before_last` nothing can fail.
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
        self._write_record(RecordPlace(0, 0), layout.KIND_CANCEL, 0, 0, 0, 0, [])

    def _write_record(
        self,
        place: RecordPlace,
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
        self._notify_readers()

    def _notify_readers(self) -> None:
        self._board.progress()
        for reader in self.readers:
            self._board.notify(reader)
