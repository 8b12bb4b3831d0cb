"""The message queue: one writer, many readers, any object, any size.

Guarantees
- Every reader gets every message, once, in order; nothing is dropped for a slow one: the writer
  waits for it.
- The caller may change whatever it enqueued once `MessageQueue.enqueue` returns.
- A `MessageQueue.dequeue` that timed out has consumed nothing; the next one returns that message.
- A message that cannot be decoded raises at its reader and is consumed; nobody else notices.
- A dead peer is named within a wait slice (40 ms), a slow one at the deadline.

A message larger than an eighth of the ring streams through it while the readers drain it, so its
``enqueue`` returns only when they have nearly all of it.

Assumes: the members share the trust domain that `shm_broadcast.codec` describes.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from shm_broadcast import layout
from shm_broadcast.codec import codec_for
from shm_broadcast.deadline import Deadline
from shm_broadcast.doorbell import DEFAULT_SPIN_SECONDS, AdaptiveSpin
from shm_broadcast.errors import GroupClosedError, MessageDecodeError
from shm_broadcast.ring_reader import Message, RingReader
from shm_broadcast.ring_writer import RingWriter
from shm_broadcast.segment import Segment, SegmentHandle

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shm_broadcast.board import Board, BoardHandle

DEFAULT_CAPACITY: Final = 4 << 20
"""Bytes of a ring unless asked otherwise; also the most that ``max_chunk_bytes`` gets."""

SMALLEST_CAPACITY: Final = 64 << 10


class QueueHandle(msgspec.Struct, frozen=True):
    """Names a queue to its other members: processes of the same user on the same host.

    Attributes:
        board: the board that the queue waits on.
        ring: the segment that holds the records.
        writer: the board's member that writes.
        readers: the board's members that read, in reader order.
    """

    board: BoardHandle
    ring: SegmentHandle
    writer: int
    readers: tuple[int, ...]


class MessageQueue:
    """One member's end of a queue. Threads may share it; each end does one call at a time."""

    def __init__(
        self,
        board: Board,
        ring: Segment,
        writer: int,
        readers: Sequence[int],
        *,
        message_type: Any | None = None,
        spin_seconds: float = DEFAULT_SPIN_SECONDS,
        owns_board: bool = False,
    ) -> None:
        """Use `on_board` and `attach`."""
        member = board.member
        if member is None or member not in (writer, *readers):
            raise ValueError(f"member {member} of {board.name} neither writes nor reads this queue")
        self.board = board
        self.writer = writer
        self.readers = tuple(readers)
        self._ring = ring
        self._owns_board = owns_board
        self._closed = False
        self._codec = codec_for(message_type)
        self._spin = AdaptiveSpin(spin_seconds)
        self._lock = threading.Lock()
        self._writing = RingWriter(ring, board, writer, readers) if member == writer else None
        self._reading = (
            RingReader(ring, board, member, self.readers.index(member), len(readers), writer)
            if member in readers
            else None
        )

    @classmethod
    def on_board(
        cls,
        board: Board,
        writer: int,
        readers: Sequence[int],
        capacity: int = DEFAULT_CAPACITY,
        *,
        type: Any | None = None,  # noqa: A002  (the field's name for it, as in msgspec)
        spin_seconds: float = DEFAULT_SPIN_SECONDS,
    ) -> MessageQueue:
        """A new queue between members of ``board``; this process owns its memory.

        Collective: no. The others `attach` by `export_handle`. The shared memory is ``capacity``
        bytes plus 64 per reader and 192, rounded up to whole pages.

        Args:
            board: its member need not be the writer, but must take part.
            writer: the member that writes.
            readers: the members that read; one or more, without the writer.
            capacity: bytes, rounded up to a multiple of 64 KiB.
            type: a type that msgspec can validate; ``None`` carries any picklable object.
            spin_seconds: the longest time to look for a message without sleeping.

        Raises:
            ValueError: the members are not distinct members of the board.
            SharedMemoryError: too little memory is free.
        """
        members = [writer, *readers]
        if not readers or len(set(members)) != len(members):
            raise ValueError(f"a queue needs one writer and other readers; got {writer}, {readers}")
        for member in members:
            board.slot_offset(member)
        capacity = layout.align(max(capacity, 1), SMALLEST_CAPACITY)
        ring = Segment.create(layout.ring_size(len(readers), capacity), "group-queue")
        ring.words.store64(layout.RING_CAPACITY, capacity)
        ring.words.store32(layout.RING_READER_COUNT, len(readers))
        return cls(board, ring, writer, readers, message_type=type, spin_seconds=spin_seconds)

    @classmethod
    def attach(
        cls,
        handle: QueueHandle,
        board: Board,
        *,
        type: Any | None = None,  # noqa: A002
        spin_seconds: float = DEFAULT_SPIN_SECONDS,
    ) -> MessageQueue:
        """Join the queue that ``handle`` names; ``board.member`` decides whether to write or read.

        Collective: no. A reader that attaches late gets every message from the first on; one that
        replaces a dead reader goes on where that one stopped.

        Raises:
            ValueError: ``board.member`` takes no part in the queue.
            SharedMemoryError: the queue is on another host, or its owner has ended.
        """
        ring = Segment.attach(handle.ring)
        return cls(
            board,
            ring,
            handle.writer,
            handle.readers,
            message_type=type,
            spin_seconds=spin_seconds,
        )

    def export_handle(self) -> QueueHandle:
        """What `attach` needs; valid while this process keeps the queue open."""
        return QueueHandle(self.board.handle(), self._ring.handle(), self.writer, self.readers)

    @property
    def is_writer(self) -> bool:
        """Whether this end writes."""
        return self._writing is not None

    def wait_until_ready(self, timeout: float | Deadline | None = None) -> None:
        """Wait until the writer and all readers have joined the board.

        Raises:
            GroupTimeoutError: names those that have not.
        """
        self.board.wait_for_members(Deadline.after(timeout), [self.writer, *self.readers])

    def enqueue(self, message: Any, timeout: float | Deadline | None = None) -> None:
        """Send ``message`` to every reader.

        Waits only for room: back-pressure from the slowest reader. ``message`` may be changed
        once this returns.

        Args:
            message: any picklable object, or one of the queue's type.
            timeout: seconds; ``None`` waits for ever. A message cut short by it is not delivered.

        Raises:
            GroupTimeoutError: no room in time; names the readers that are behind, and by how much.
            PeerLostError: a reader that room is waited for has ended.
            GroupAbortedError: a member aborted the board.
            GroupClosedError: this end was shut down, or every reader has left.
            TypeError: this end reads.
        """
        writing = self._writing
        if writing is None:
            raise TypeError("enqueue: this end of the queue reads")
        codec = self._codec
        with self._lock:
            main, buffers = codec.encode(message)
            small = len(main) == 1 and not buffers and not self._closed
            if small and writing.try_write(codec.code, main[0]):
                return
            self._check("enqueue")
            deadline = Deadline.after(timeout)
            self.board.stamp("enqueue")
            writing.write(
                codec.code,
                main,
                buffers,
                lambda need: self._wait_for_room(writing, need, deadline),
            )

    def dequeue(
        self,
        timeout: float | Deadline | None = None,
        indefinite: bool = False,
    ) -> Any:
        """The next message.

        Args:
            timeout: seconds; ``None`` waits for ever.
            indefinite: wait for ever whatever ``timeout`` says.

        Returns:
            The message, in memory of its own. Tensors and arrays of 1 MiB and more lie in recycled
            memory, which stays theirs until the last reference goes.

        Raises:
            GroupTimeoutError: no message in time; nothing was consumed.
            MessageDecodeError: a message came that is not of the queue's type; it was consumed.
            PeerLostError: the writer has ended and all its messages were read.
            GroupAbortedError: a member aborted the board.
            GroupClosedError: this end was shut down, or the writer was and all messages were read.
            TypeError: this end writes.
        """
        reading = self._require_reader("dequeue")
        with self._lock:
            message = None if self._closed else reading.try_read(self._spin.window_ns)
            if message is None:
                self._check("dequeue")
                message = self._wait_for_message(reading, None if indefinite else timeout)
        code, main, buffers = message
        if code != self._codec.code:
            raise MessageDecodeError(
                f"the writer used codec {code}, this reader {self._codec.code}: "
                "one end was made with type= and the other without"
            )
        return self._codec.decode(main, buffers)

    @contextmanager
    def acquire_read(self, timeout: float | Deadline | None = None) -> Iterator[memoryview]:
        """The next message's encoded body in place, without a copy or decoding.

        The view is valid inside the ``with`` block only; its space goes back to the writer at the
        end of the block, also when the block raises. A message that was streamed in several
        records, or has out-of-band buffers, is put together in private memory first; then the view
        shows its main part.

        Raises:
            What `dequeue` raises, `MessageDecodeError` excepted.
        """
        reading = self._require_reader("acquire_read")
        with self._lock:
            self._check("acquire_read")
            record = reading.peek()
            if record is None:
                self._wait(reading, lambda: reading.readable, "acquire_read", timeout)
                record = reading.peek()
            if record is not None and record.is_whole_message and not record.n_buffers:
                with reading.view(record) as view:
                    try:
                        yield view
                    finally:
                        reading.advance(record)
                return
            message = reading.try_read(0) or self._wait_for_message(reading, timeout)
        with memoryview(message[1]) as view:
            yield view

    def readable(self) -> bool:
        """Whether a message is at least partly there; cheap, for waiting on several queues."""
        return self._require_reader("readable").readable

    def behind(self) -> dict[int, int]:
        """At the writer: for each reader that has not left, the messages it has not read yet."""
        if self._writing is None:
            raise TypeError("behind: this end of the queue reads")
        return self._writing.behind()

    def broadcast_object(self, message: Any = None, timeout: float | Deadline | None = None) -> Any:
        """At the writer: `enqueue` and return ``message``. At a reader: `dequeue`."""
        if self._writing is None:
            return self.dequeue(timeout)
        self.enqueue(message, timeout)
        return message

    def shutdown(self) -> None:
        """Close this end in good order. Idempotent; any thread may, also while another waits.

        A waiting thread of this process gets GroupClosedError. Readers of a writer that shut down
        get what is still in the queue first. A reader that shut down is waited for no more.
        """
        if self._closed:
            return
        self._closed = True
        if self._writing is not None:
            self._writing.close()
        self.board.ring(self.board.member or 0)
        with self._lock:
            if self._reading is not None:
                self._reading.leave()
        self._ring.close()
        if self._owns_board:
            self.board.close()

    close = shutdown

    def __enter__(self) -> Self:
        """Give the queue itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Shut this end down."""
        self.shutdown()

    def __repr__(self) -> str:
        role = "writer" if self.is_writer else "reader"
        state = ", closed" if self._closed else ""
        return f"MessageQueue({self.board.name!r}, {role}, member {self.board.member}{state})"

    def _require_reader(self, operation: str) -> RingReader:
        if self._reading is None:
            raise TypeError(f"{operation}: this end of the queue writes")
        return self._reading

    def _check(self, operation: str) -> None:
        if self._closed:
            raise GroupClosedError(f"{operation}: the queue has been shut down in this process")
        self.board.check(operation)

    def _wait_for_message(self, reading: RingReader, timeout: float | Deadline | None) -> Message:
        deadline = Deadline.after(timeout)
        while True:
            self._wait(reading, lambda: reading.readable, "dequeue", deadline)
            message = reading.try_read(self._spin.window_ns)
            if message is not None:
                return message

    def _wait(
        self,
        reading: RingReader,
        there: Any,
        operation: str,
        timeout: float | Deadline | None,
    ) -> None:
        started = time.monotonic_ns()
        self.board.stamp(operation)
        self.board.wait(
            lambda: there() or reading.writer_closed or self._closed,
            Deadline.after(timeout),
            operation,
            lambda: (self.writer,),
            spin=0,
        )
        self._spin.observe(time.monotonic_ns() - started)
        self._check(operation)
        if not there() and reading.writer_closed and not there():
            raise GroupClosedError(f"{operation}: the writer has shut the queue down")

    def _wait_for_room(self, writing: RingWriter, need: int, deadline: Deadline) -> None:
        self.board.wait(
            lambda: writing.has_room(need) or writing.deserted() or self._closed,
            deadline,
            "enqueue",
            lambda: writing.laggards(need),
            detail=lambda: "; ".join(
                f"rank {member} is {count} messages behind"
                for member, count in writing.behind().items()
                if count
            ),
        )
        self._check("enqueue")
        if writing.deserted():
            raise GroupClosedError("enqueue: every reader has left")
