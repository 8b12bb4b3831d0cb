"""What one member does with its end of a message queue.

How queues are made and joined stands in `shm_broadcast.queue`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from shm_broadcast.deadline import Deadline
from shm_broadcast.queue_reader import QueueReader
from shm_broadcast.queue_writer import QueueWriter

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from shm_broadcast.board import Board
    from shm_broadcast.queue_handle import QueueHandle
    from shm_broadcast.segment import Segment


class QueueEnd:
    """The verbs of either end; `MessageQueue` says how one comes by it.

    Threads may share it; one call at a time goes on, the others wait for their turn.
    """

    def __init__(
        self,
        handle: QueueHandle,
        *,
        board: Board | None,
        ring: Segment | None,
        end: QueueWriter | QueueReader,
        owns_board: bool,
    ) -> None:
        """Put an end together.

        Args:
            handle: what others join with.
            board: the members' on this host; None at a reader of another host.
            ring: the members' on this host, if some of them read there.
            end: what writes, or reads.
            owns_board: close the board with this end.
        """
        self._handle = handle
        self._board = board
        self._ring = ring
        self._end = end
        self._owns_board = owns_board

    def export_handle(self) -> QueueHandle:
        """What the other members join with; valid while this process keeps the queue open."""
        return self._handle

    @property
    def is_writer(self) -> bool:
        """Whether this end writes."""
        return isinstance(self._end, QueueWriter)

    def wait_until_ready(self, timeout: float | Deadline | None = None) -> None:
        """Wait until the writer, or at the writer all readers, have joined.

        Raises:
            GroupTimeoutError: names those that have not.
        """
        self._end.wait_until_ready(Deadline.after(timeout))

    def enqueue(self, message: Any, timeout: float | Deadline | None = None) -> None:
        """Send ``message`` to every reader.

        Waits only for room: back-pressure from the slowest reader. ``message`` may be changed
        once this returns.

        Args:
            message: any picklable object, or one of the queue's type.
            timeout: seconds; ``None`` waits for ever. A message cut short by it reaches nobody.

        Raises:
            GroupTimeoutError: no room in time; names the readers that are behind, and by how much.
            PeerLostError: a reader that room is waited for has ended.
            GroupAbortedError: a member aborted the board.
            GroupClosedError: this end was shut down, or every reader has left.
            PeerProtocolError: a reader on another host sent nonsense.
            MessageTooLargeError: with readers on other hosts, more buffers than a header can list.
            TypeError: this end reads, or ``message`` cannot be encoded.
        """
        self._writer("enqueue").enqueue(message, timeout)

    def dequeue(self, timeout: float | Deadline | None = None, indefinite: bool = False) -> Any:
        """The next message.

        Args:
            timeout: seconds; ``None`` waits for ever.
            indefinite: wait for ever whatever ``timeout`` says.

        Returns:
            The message, in memory of its own. Tensors and arrays of 1 MiB and more lie in recycled
            memory, which stays theirs until the last reference goes. If the writer was made with
            ``zero_copy``, they lie in shared memory that the readers have in common: do not write
            to them, and do not keep more than needed, as they count towards the writer's limit of
            512 MiB, beyond which messages are copied after all.

        Raises:
            GroupTimeoutError: no message in time; nothing was consumed.
            MessageDecodeError: a message came that is not of the queue's type; it was consumed.
            PeerLostError: the writer has ended and all its messages were read.
            GroupAbortedError: a member aborted the board.
            GroupClosedError: this end was shut down, or the writer was and all messages were read.
            TypeError: this end writes.
        """
        return self._reader("dequeue").dequeue(None if indefinite else timeout)

    def acquire_read(
        self, timeout: float | Deadline | None = None
    ) -> AbstractContextManager[memoryview]:
        """The next message's encoded main part, in place where possible, not decoded.

        The view is valid inside the ``with`` block only. A message that lies in one record is shown
        where it is, and its space goes back to the writer at the end of the block, also when the
        block raises. One that was streamed, or has out-of-band buffers, or came from another host,
        is put together in private memory first.

        Raises:
            What `dequeue` raises, `MessageDecodeError` excepted.
        """
        return self._reader("acquire_read").acquire_read(timeout)

    def readable(self, within: float = 0.0) -> bool:
        """Whether a message is at least partly there; cheap, for waiting on several queues.

        Args:
            within: seconds to look for one without sleeping and without Python's lock, where it
                comes from this host.
        """
        return self._reader("readable").readable(within)

    def behind(self) -> dict[int, int]:
        """For each reader on this host, as member of the board: the messages it has not read."""
        return self._writer("behind").behind()

    def broadcast_object(self, message: Any = None, timeout: float | Deadline | None = None) -> Any:
        """At the writer: `enqueue` and return ``message``. At a reader: `dequeue`."""
        if not self.is_writer:
            return self.dequeue(timeout)
        self.enqueue(message, timeout)
        return message

    def shutdown(self) -> None:
        """Close this end in good order. Idempotent; any thread may, also while another waits.

        A waiting thread of this process gets GroupClosedError. Readers of a writer that shut down
        get what is still in the queue first. A reader that shut down is waited for no more.
        """
        self._end.close()
        if self._ring is not None:
            self._ring.close()
        if self._owns_board and self._board is not None:
            self._board.close()

    close = shutdown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        where = "from another host" if self._board is None else repr(self._board)
        return f"MessageQueue({'writer' if self.is_writer else 'reader'}, {where})"

    def _writer(self, operation: str) -> QueueWriter:
        if isinstance(self._end, QueueWriter):
            return self._end
        raise TypeError(f"{operation}: this end of the queue reads")

    def _reader(self, operation: str) -> QueueReader:
        if isinstance(self._end, QueueReader):
            return self._end
        raise TypeError(f"{operation}: this end of the queue writes")
