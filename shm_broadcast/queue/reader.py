"""The reading ends of a message queue: from a ring, and from a writer on another host."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shm_broadcast import layout
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import GroupClosedError, MessageDecodeError
from shm_broadcast.eventcount import AdaptiveSpin, TimedLock
from shm_broadcast.queue.writer import REMOTE_HEADER
from shm_broadcast.state.board import Board

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from shm_broadcast.codec import Codec
    from shm_broadcast.net.reader import RemoteReader
    from shm_broadcast.ring.reader import EncodedMessage, RingReader


_CLOSE_SECONDS = 0.4
"""How long `close` waits for another thread's call to end."""


class QueueReader(ABC):
    """Receives and decodes messages. Any thread may call; calls run one at a time."""

    def __init__(self, codec: Codec, watch: Callable[[str], None] | None) -> None:
        self._codec = codec
        self._watch = watch
        self._closed = False
        self._lock = TimedLock()

    def dequeue(self, timeout: float | Deadline | None) -> Any:
        """See `MessageQueue.dequeue`."""
        with self._lock.owner_lock as acquired:
            if not acquired:
                timeout = Deadline.within(timeout)
                self._lock.acquire(timeout, "dequeue", self._check)
            try:
                code, main, buffers = self._take(timeout)
            finally:
                if self._closed:
                    self._detach()
        if code != self._codec.code:
            raise MessageDecodeError(
                f"the writer used codec {code}, this reader {self._codec.code}: "
                "one end was made with type= and the other without"
            )
        return self._codec.decode(main, buffers)

    @contextmanager
    def acquire_read(self, timeout: float | Deadline | None) -> Iterator[memoryview]:
        """See `MessageQueue.acquire_read`."""
        deadline = Deadline.within(timeout)
        with self._lock.owner_lock as acquired:
            if not acquired:
                self._lock.acquire(deadline, "acquire_read", self._check)
            _, main, _ = self._take(deadline)
        with memoryview(main) as view:
            yield view

    @abstractmethod
    def readable(self, within: float) -> bool:
        """Return whether part of a message has arrived, or arrives ``within`` seconds."""

    def fileno(self) -> int:
        """See `MessageQueue.fileno`."""
        raise ValueError("a reader on the writer's host waits on an eventcount")

    @abstractmethod
    def wait_until_ready(self, deadline: Deadline) -> None:
        """Wait until the writer has joined."""

    def close(self) -> None:
        """Close this end; a thread that waits in the queue raises GroupClosedError."""
        self._closed = True

    @abstractmethod
    def _take(self, timeout: float | Deadline | None) -> EncodedMessage:
        """Wait for the next message and return it, still encoded."""

    def _check(self, operation: str) -> None:
        if self._closed:
            raise GroupClosedError(f"{operation}: the queue has been shut down in this process")
        if self._watch is not None:
            self._watch(operation)

    @abstractmethod
    def _detach(self) -> None:
        """Detach, at the end of the call that held the lock when this end was closed."""


class LocalReader(QueueReader):
    """Reads a ring."""

    def __init__(
        self,
        board: Board,
        codec: Codec,
        ring: RingReader,
        writer: int,
        spin: AdaptiveSpin,
        watch: Callable[[str], None] | None,
    ) -> None:
        super().__init__(codec, watch)
        self._board = board
        self._ring = ring
        self._writer = writer
        self._spin = spin
        self._detached = False

    @contextmanager
    def acquire_read(self, timeout: float | Deadline | None) -> Iterator[memoryview]:
        """See `MessageQueue.acquire_read`."""
        ring, deadline = self._ring, Deadline.within(timeout)
        with self._lock.owner_lock as acquired:
            if not acquired:
                self._lock.acquire(deadline, "acquire_read", self._check)
            begun = 0
            try:
                self._check("acquire_read")
                begun = self._board.record_begin("acquire_read", "", layout.DID_ACQUIRE_READ)
                # A message that an interrupted `dequeue` removed from the ring but did not return.
                left_over = ring.finished()
                if left_over is None and ring.peek() is None:
                    self._wait("acquire_read", deadline)
                record = ring.peek() if left_over is None else None
                if record is not None and record.is_whole_message and not record.n_buffers:
                    with ring.view(record) as view:
                        try:
                            yield view
                        finally:
                            self._lock.owner_lock.adopt()  # the block may end in another thread
                            ring.advance(record)
                    number = record.sequence & 0xFFFFFFFF
                    self._board.record_end(begun, None, record.total, number)
                    return
                _, main, _ = left_over or self._finish(deadline)
                self._board.record_end(begun)
            except BaseException as error:
                self._board.record_end(begun, error)
                raise
            finally:
                if self._closed:
                    self._detach()
        with memoryview(main) as view:
            yield view

    def readable(self, within: float) -> bool:
        """Return whether a record is in the ring, or arrives ``within`` seconds."""
        return self._ring.look(int(within * 1e9))

    def wait_until_ready(self, deadline: Deadline) -> None:
        """Wait until the writer has joined the board."""
        operation, board, writer = "wait_until_ready", self._board, self._writer
        board.wait(
            lambda: self._closed or board.joined(writer),
            deadline,
            operation,
            lambda: (writer,),
            watch=self._watch,
        )
        self._check(operation)

    def close(self) -> None:
        """Detach from the ring once no call is in progress.

        A call of this thread, or one that lasts longer than `_CLOSE_SECONDS`, detaches at its own
        end.
        """
        super().close()
        self._board.notify_self()
        lock = self._lock.owner_lock
        if not lock.is_owned():
            with lock as acquired:
                if acquired or lock.take_within(_CLOSE_SECONDS):
                    self._detach()

    def _take(self, timeout: float | Deadline | None) -> EncodedMessage:
        # The common case, a message in the ring, makes no Deadline and no check in Python: the C
        # call reads the board's abort word itself.
        try:
            if not self._closed:
                ring, spin_ns = self._ring, self._spin.window_ns
                if ring.unfinished is not None:
                    message = ring.try_read(spin_ns, begins=True)
                elif (small := ring.read_small(spin_ns, True)) is not False:
                    message = small
                else:
                    message = ring.try_read(spin_ns)
                if message is not None:
                    return message
            self._check("dequeue")
            return self._finish(Deadline.within(timeout))
        except BaseException as error:
            self._board.record_end(self._ring.begun, error)
            raise

    def _finish(self, deadline: Deadline) -> EncodedMessage:
        while True:
            self._wait("dequeue", deadline)
            message = self._ring.try_read(self._spin.window_ns)
            if message is not None:
                return message

    def _wait(self, operation: str, deadline: Deadline) -> None:
        ring = self._ring
        started = time.monotonic_ns()
        self._board.wait(
            lambda: ring.readable or ring.writer_closed or self._closed,
            deadline,
            operation,
            lambda: (self._writer,),
            spin=0,
            watch=self._watch,
            lookout=self._spin.lookout(started, self.readable),
        )
        self._spin.observe(time.monotonic_ns() - started)
        self._check(operation)
        # Messages that were published before the writer closed are still returned.
        if ring.writer_closed and not ring.readable:
            raise GroupClosedError(f"{operation}: the writer has shut the queue down")

    def _check(self, operation: str) -> None:
        super()._check(operation)
        self._board.check(operation)

    def _detach(self) -> None:
        # Only with the lock: an open `acquire_read` block still shows bytes of the ring.
        if not self._detached:
            self._detached = True
            self._ring.detach()


class RemoteQueueReader(QueueReader):
    """Reads from a writer on another host."""

    def __init__(
        self, codec: Codec, remote: RemoteReader, watch: Callable[[str], None] | None
    ) -> None:
        super().__init__(codec, watch)
        self._remote = remote

    def readable(self, within: float) -> bool:  # noqa: ARG002 - zmq cannot be spun on
        """Return whether a message has arrived, or `dequeue` has an error to raise."""
        return self._remote.readable()

    def fileno(self) -> int:
        """See `MessageQueue.fileno`."""
        return self._remote.fileno()

    def wait_until_ready(self, deadline: Deadline) -> None:
        """Wait until the writer has admitted this reader."""
        self._remote.wait_ready(deadline, lambda: self._check("wait_until_ready"))

    def close(self) -> None:
        """Send the end to the writer, and close the socket."""
        super().close()
        self._remote.close()

    def _detach(self) -> None:
        """Do nothing: `close` has sent the end."""

    def _take(self, timeout: float | Deadline | None) -> EncodedMessage:
        deadline = Deadline.within(timeout)
        header, *parts = self._remote.recv(deadline, lambda: self._check("dequeue"))
        code, n_main = REMOTE_HEADER.unpack(header)
        main = parts[0] if n_main == 1 else b"".join(parts[:n_main])
        return code, main, [_writable(part) for part in parts[n_main:]]


def _writable(part: Buffer) -> Buffer:
    return bytearray(part) if memoryview(part).readonly else part
