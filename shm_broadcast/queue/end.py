"""The methods of one end of a message queue: enqueue, dequeue, shutdown and the like.

`shm_broadcast.queue.message_queue` makes and joins queues.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NoReturn, Self

from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import GroupClosedError
from shm_broadcast.machine.forked_child import DISOWNED, disown_in_children
from shm_broadcast.queue.writer import QueueWriter

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from typing_extensions import Buffer

    from shm_broadcast.board.board import Board
    from shm_broadcast.queue.handle import QueueHandle
    from shm_broadcast.queue.reader import QueueReader
    from shm_broadcast.segment import Segment


class QueueEnd:
    """One end of a queue, the writer's or a reader's; `MessageQueue` makes it.

    Threads may share it: calls run one at a time, the others wait. One that is dropped without
    `shutdown` is lost to the others, as if its process had ended, unless the board is another's.
    """

    def __init__(
        self,
        handle: QueueHandle,
        end: QueueWriter | QueueReader,
        board: Board | None = None,
        ring: Segment | None = None,
        *,
        owns_board: bool = False,
    ) -> None:
        """For `MessageQueue` only.

        Args:
            handle: what the other members join with.
            end: the implementation that writes or reads.
            board: the board of the members on the writer's host; None at a reader on another host.
            ring: the shared memory between them; None if nobody reads on the writer's host.
            owns_board: whether to close the board with this end.
        """
        self._handle = handle
        self._board = board
        self._ring = ring
        self._end: QueueWriter | QueueReader | None = end
        self._writer = end if isinstance(end, QueueWriter) else None
        self._reader = None if isinstance(end, QueueWriter) else end
        self._owns_board = owns_board
        if owns_board and board is not None:
            weakref.finalize(end, board.drop).atexit = False
        disown_in_children(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a queue cannot be pickled: give the other process what export_handle() returns, to "
            "join with create_from_handle()"
        )

    def export_handle(self) -> QueueHandle:
        """What the other members join with; valid while this process keeps the queue open."""
        return self._handle

    @property
    def is_writer(self) -> bool:
        """Whether this end writes."""
        return self._writer is not None

    def wait_until_ready(self, timeout: float | Deadline | None = None) -> None:
        """At the writer: wait until all readers have joined. At a reader: until the writer has.

        Collective: no.

        Args:
            timeout: seconds; 0 or less only looks, ``None`` waits for ever.

        Raises:
            GroupTimeoutError: names those that have not joined.
            PeerLostError, GroupAbortedError, GroupClosedError: as for `dequeue`.
        """
        (self._end or self._refuse("wait_until_ready")).wait_until_ready(Deadline.within(timeout))

    def enqueue(self, message: Any, timeout: float | Deadline | None = None) -> None:
        """Send ``message`` to every reader.

        Collective: no. Returns once the message is in the queue; it waits only while the queue is
        full, for the slowest reader. ``message`` may be changed once this returns.

        Args:
            message: any picklable object, or one of the queue's type.
            timeout: seconds to wait for room; 0 or less does not wait, ``None`` waits for ever. A
                message that times out reaches no reader.

        Raises:
            GroupTimeoutError: no room in time; names the readers that are behind, and by how much.
            PeerLostError: the queue is full because of a reader that is lost, as its process has
                ended or has dropped it, or a reader on another host is. No reader gets the message,
                nor any later one, until the lost reader is taken out by `remove_reader` or, on this
                host, replaced by another that joins as the same reader.
            GroupAbortedError: a member aborted the board.
            GroupClosedError: this end was shut down, or every reader has left, which the writer
                notices once the queue is full.
            RuntimeError: this thread is in the queue already, as where a signal handler, or what
                the message's pickling runs, calls it.
            Exception: what a signal handler raises. In the middle of a message to readers on other
                hosts, it closes this end.
            PeerProtocolError: a reader on another host sent nonsense.
            MessageTooLargeError: with readers on other hosts, more buffers than a header can list.
            TypeError: this end reads, or ``message`` cannot be encoded.
        """
        (self._writer or self._refuse("enqueue")).enqueue(message, timeout)

    def enqueue_encoded(self, data: Buffer, timeout: float | Deadline | None = None) -> None:
        """Send bytes as they are, for readers that call `acquire_read`.

        Collective: no. Readers that call `dequeue` get them decoded, so they must be encoded as the
        queue's codec does.

        Args:
            data: a contiguous buffer of any size; it may be changed once this returns.
            timeout: seconds; 0 or less does not wait, ``None`` waits for ever. A message that times
                out reaches no reader.

        Raises:
            What `enqueue` raises.
        """
        (self._writer or self._refuse("enqueue")).enqueue_encoded(data, timeout)

    def dequeue(
        self,
        timeout: float | Deadline | None = None,
        indefinite: bool = False,  # noqa: ARG002
    ) -> Any:
        """Wait for the next message and return it.

        Collective: no.

        Args:
            timeout: seconds; 0 or less does not wait, ``None`` waits for ever.
            indefinite: no effect. In vLLM it keeps long waits out of the log; here none are logged.

        Returns:
            The message, which belongs to the caller. Memory of tensors and arrays of 1 MiB and more
            is reused for later messages once their last reference has gone. If the writer was made
            with ``zero_copy``, tensors and arrays of 1 MiB and more lie in memory shared by all
            readers: do not write to them, and drop them soon. They count towards the writer's limit
            of 512 MiB; beyond it messages are copied as without ``zero_copy``.

        Raises:
            GroupTimeoutError: no message in time; nothing was consumed.
            MessageDecodeError: a message came that is not of the queue's type; it was consumed.
            PeerLostError: the writer is lost, as its process has ended or has dropped it, and all
                its messages were read, or the next one lay where a ``zero_copy`` writer had put it,
                and went with it. Nothing behind that one is handed out, unless another writes in
                the lost one's place.
            SharedMemoryError: a message that lies where a ``zero_copy`` writer has put it cannot be
                mapped; it was consumed, unless this process has no descriptor left.
            GroupAbortedError: a member aborted the board.
            GroupClosedError: this end was shut down, or the writer was and all messages were read.
            RuntimeError: this thread is in the queue already, as in an `acquire_read` block.
            TypeError: this end writes.
        """
        return (self._reader or self._refuse("dequeue")).dequeue(timeout)

    def acquire_read(
        self,
        timeout: float | Deadline | None = None,
        indefinite: bool = False,  # noqa: ARG002
    ) -> AbstractContextManager[memoryview]:
        """Use the next message's encoded main part in a ``with`` block, without decoding it.

        Collective: no. The view is valid inside the block only. If the message is one record of the
        ring, the view is of the ring itself; the space goes back to the writer at the end of the
        block, also when the block raises. A message that was streamed, has out-of-band buffers, or
        came from another host is copied first. The arguments are those of `dequeue`.

        Raises:
            What `dequeue` raises, `MessageDecodeError` excepted.
        """
        return (self._reader or self._refuse("acquire_read")).acquire_read(timeout)

    def readable(self, within: float = 0.0) -> bool:
        """Whether a message, or a part of one, has arrived; cheap, to poll several queues.

        Collective: no.

        Args:
            within: seconds to spin until one arrives, without the GIL; not used by a reader on
                another host than the writer.
        """
        return (self._reader or self._refuse("readable")).readable(within)

    def fileno(self) -> int:
        """At a reader on another host than the writer's: what `RemoteEnd.fileno` says.

        Raises:
            ValueError: this end has no such descriptor.
        """
        return (self._reader or self._refuse("fileno")).fileno()

    def behind(self) -> dict[int, int]:
        """How many messages each reader on this host has not read, by member of the board."""
        return (self._writer or self._refuse("behind")).behind()

    def remove_reader(self, rank: int) -> None:
        """At the writer: go on without a reader that `enqueue` has named as lost or at fault.

        Collective: no. The writer stops waiting for a reader that shut down by itself. One that
        died might be replaced, so the caller decides.

        Args:
            rank: the reader's rank, as in the error.

        Raises:
            ValueError: it is no reader of this queue, or not lost.
            TypeError: this end reads.
        """
        (self._writer or self._refuse("remove_reader")).remove_reader(rank)

    def broadcast_object(self, message: Any = None, timeout: float | Deadline | None = None) -> Any:
        """At the writer: `enqueue` and return ``message``. At a reader: `dequeue`."""
        if not self.is_writer:
            return self.dequeue(timeout)
        self.enqueue(message, timeout)
        return message

    def shutdown(self) -> None:
        """Close this end. Idempotent; any thread may call it, also while another one waits.

        Collective: no. A thread of this process that waits in the queue gets GroupClosedError. When
        the writer shuts down, readers still get what is in the queue, then GroupClosedError. What a
        ``zero_copy`` writer has left where it lies, readers get while its process runs: that keeps
        the memory, and a thread, until each reader that has joined has it, has left or has ended.
        When a reader shuts down, the writer no longer waits for it. In a forked child it only lets
        go of the child's copy: the end is its parent's. A signal handler may call it in any call.
        """
        if self._end is not None:
            self._end.close()
        if self._ring is not None:
            self._ring.close()
        if self._owns_board and self._board is not None:
            self._board.close()

    close = shutdown

    def disown(self) -> None:
        """In a forked child: this end is its parent's."""
        self._end = self._writer = self._reader = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        where = "from another host" if self._board is None else repr(self._board)
        return f"MessageQueue({'writer' if self.is_writer else 'reader'}, {where})"

    def _refuse(self, operation: str) -> NoReturn:
        if self._end is None:
            raise GroupClosedError(f"{operation}: {DISOWNED}")
        raise TypeError(
            f"{operation}: this end of the queue {'writes' if self.is_writer else 'reads'}"
        )
