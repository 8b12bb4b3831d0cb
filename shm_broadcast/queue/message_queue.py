"""Send messages from one writer to many readers: any object, any size, on this host and on others.

`shm_broadcast.queue.message_queue` makes and joins queues.

Guarantees
- Every reader gets every message, once, in order; nothing is dropped for a slow reader: the writer
  waits for it. Large buffers of a ``zero_copy`` writer disappear with its process: a reader that
  comes too late gets `PeerLostError`, and no later messages.
- The caller may change whatever it enqueued once `MessageQueue.enqueue` returns.
- A `MessageQueue.dequeue` that timed out has consumed nothing; the next one returns that message.
- A message that cannot be decoded raises at its reader and is consumed; nobody else notices.
- A dead peer is named within a second, usually within 0.15 s; a slow one at the deadline.

A message larger than an eighth of the ring streams through it while the readers drain it, so its
``enqueue`` returns only when they have nearly all of it.

Assumes: the members share the trust domain that `shm_broadcast.codec` describes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, NoReturn, Self

from msgspec import structs

from shm_broadcast.arguments import integer
from shm_broadcast.codec import Codec, codec_for
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import DRIVER_RANK, GroupClosedError
from shm_broadcast.eventcount import DEFAULT_SPIN_SECONDS, AdaptiveSpin
from shm_broadcast.process import IN_FORKED_CHILD, call_in_forked_children
from shm_broadcast.queue.handle import DEFAULT_CAPACITY, QueueHandle, create_ring, ring_capacity
from shm_broadcast.queue.reader import LocalReader, QueueReader, RemoteQueueReader
from shm_broadcast.queue.rendezvous import (
    ObjectGroup,
    as_object_group,
    local_and_remote,
    ranks_beside,
)
from shm_broadcast.queue.writer import QueueWriter
from shm_broadcast.ring.buffers import DEFAULT_BLOCK_BYTES, BlockWriter
from shm_broadcast.ring.reader import RingReader
from shm_broadcast.ring.writer import RingWriter
from shm_broadcast.segment import Segment
from shm_broadcast.state.board import Board

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Buffer

    from shm_broadcast.net.writer import RemoteWriter


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
            weakref.finalize(end, board.mark_lost).atexit = False
        call_in_forked_children(self)

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

    def after_fork_in_child(self) -> None:
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
            raise GroupClosedError(f"{operation}: {IN_FORKED_CHILD}")
        raise TypeError(
            f"{operation}: this end of the queue {'writes' if self.is_writer else 'reads'}"
        )


class MessageQueue(QueueEnd):
    """One member's end of a queue: how to make it, and how to join it."""

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: Sequence[int] | None = None,
        max_chunk_bytes: int = DEFAULT_CAPACITY,
        max_chunks: int = 1,
        connect_ip: str | None = None,
        *,
        remote_reader_ranks: Sequence[int] | None = None,
        writer_rank: int = DRIVER_RANK,
        secret: bytes | None = None,
        type: Any | None = None,  # noqa: A002  (the field's name for it, as in msgspec)
        zero_copy: bool = False,
        watch: Callable[[str], None] | None = None,
    ) -> None:
        """A new queue with its own board; this process writes.

        Collective: no. Readers join with `create_from_handle`. See `on_board` for a queue between
        processes that already have a board.

        Args:
            n_reader: how many readers there are, at most 4096; a queue without readers, like that
                of a group of one, accepts messages and drops them.
            n_local_reader: how many of them run on this host.
            local_reader_ranks: what the caller calls them; 0, 1, ... if not given.
            max_chunk_bytes: with ``max_chunks``, asks for a ring of their product, of which at most
                `DEFAULT_CAPACITY` bytes are taken. It limits no message's size.
            max_chunks: see ``max_chunk_bytes``.
            connect_ip: the address at which readers on other hosts reach this one; needed for them.
            remote_reader_ranks: what the caller calls the readers on other hosts; the ranks that
                follow the local ones if not given.
            writer_rank: what error messages call the writer, if it has a rank; otherwise they call
                it the driver.
            secret: the launcher's secret, 16 bytes or more; needed for readers on other hosts.
            type: a type that msgspec can validate; ``None`` carries any picklable object.
            zero_copy: let readers use buffers of 1 MiB and more in place: see `dequeue`.
            watch: called with the operation's name when a call begins to wait, then every 40 ms,
                and after a second every 160 ms. An exception that it raises ends the call. An
                example is `Board.check` of another board.

        Raises:
            ValueError: the numbers do not fit together or are too large, or an address or a secret
                is missing.
            SharedMemoryError: too little memory is free.
        """
        local, distant = local_and_remote(
            n_reader, n_local_reader, local_reader_ranks, remote_reader_ranks
        )
        readers = tuple(range(1, len(local) + 1))
        capacity = ring_capacity(max_chunk_bytes, max_chunks)
        codec = codec_for(type)
        with ExitStack() as undo:
            remote = _remote_writer(undo, writer_rank, distant, connect_ip, secret)
            board = undo.enter_context(
                Board.create(1 + len(local), 0, "queue", (writer_rank, *local))
            )
            ring = _ring(undo, board, 0, readers, capacity)
            writing = RingWriter(ring, board, 0, readers) if ring else None
            blocks = _blocks(writing, zero_copy)
            end = QueueWriter(board, codec, writing, remote, blocks, watch)
            handle = _describe(board, ring, 0, readers, local, remote)
            undo.pop_all()
        super().__init__(handle, end, board, ring, owns_board=True)

    @classmethod
    def on_board(
        cls,
        board: Board,
        writer: int,
        readers: Sequence[int],
        capacity: int = DEFAULT_CAPACITY,
        *,
        type: Any | None = None,  # noqa: A002
        spin_seconds: float = DEFAULT_SPIN_SECONDS,
        zero_copy: bool = False,
        connect_ip: str | None = None,
        remote_reader_ranks: Sequence[int] = (),
        secret: bytes | None = None,
    ) -> MessageQueue:
        """A new queue between members of ``board``; this process owns its memory.

        Collective: no. The others `attach` by `export_handle`. The shared memory is ``capacity``
        bytes plus 64 per reader and 192, rounded up to whole pages. Readers on other hosts join by
        `create_from_handle`; only the writer's process may make a queue for them.

        Args:
            board: its member need not be the writer, but must take part.
            writer: the member that writes.
            readers: the members that read, without the writer; one or more, unless there are
                readers on other hosts.
            capacity: bytes, rounded up to a multiple of 64 KiB.
            type: a type that msgspec can validate; ``None`` carries any picklable object.
            spin_seconds: the longest time to look for a message without sleeping.
            zero_copy: at the writer, let readers use buffers of 1 MiB and more in place: see
                `dequeue`.
            connect_ip: see the constructor.
            remote_reader_ranks: see the constructor.
            secret: see the constructor.

        Raises:
            ValueError: the members are not distinct members of the board, an address or a secret is
                missing, or ``spin_seconds`` is not a valid time.
            SharedMemoryError: too little memory is free.
        """
        if not readers and not remote_reader_ranks:
            raise ValueError("a queue needs one or more readers")
        if remote_reader_ranks and board.member != writer:
            raise ValueError("only the writer's process can make a queue for other hosts")
        codec, spin = codec_for(type), AdaptiveSpin(spin_seconds)
        with ExitStack() as undo:
            ring = _ring(undo, board, writer, readers, capacity)
            rank = board.ranks[writer]
            remote = _remote_writer(undo, rank, remote_reader_ranks, connect_ip, secret)
            handle = _describe(board, ring, writer, readers, readers, remote)
            queue = cls._on_ring(
                handle, board, ring, codec, spin, zero_copy=zero_copy, remote=remote
            )
            undo.pop_all()
        return queue

    @classmethod
    def attach(
        cls,
        handle: QueueHandle,
        board: Board,
        *,
        type: Any | None = None,  # noqa: A002
        spin_seconds: float = DEFAULT_SPIN_SECONDS,
        zero_copy: bool = False,
    ) -> MessageQueue:
        """Join the queue that ``handle`` names; ``board.member`` decides whether to write or read.

        Collective: no. A reader that attaches late gets every message from the first on; one that
        replaces a dead reader continues where that one stopped.

        Args:
            handle: from `export_handle`.
            board: this process's view of the board that ``handle`` names; it stays the caller's.
            type: the same as the creator's.
            spin_seconds: the longest time to look for a message without sleeping.
            zero_copy: at the writer, let readers use buffers of 1 MiB and more in place: see
                `dequeue`.

        Raises:
            ValueError: ``board.member`` takes no part in the queue, or ``spin_seconds`` is not a
                valid time.
            SharedMemoryError: the queue is on another host, or its owner has ended.
        """
        codec, spin = codec_for(type), AdaptiveSpin(spin_seconds)
        with ExitStack() as undo:
            ring = _attach_ring(undo, handle)
            queue = cls._on_ring(handle, board, ring, codec, spin, zero_copy=zero_copy)
            undo.pop_all()
        return queue

    @classmethod
    def create_from_handle(
        cls,
        handle: QueueHandle,
        rank: int,
        *,
        secret: bytes | None = None,
        type: Any | None = None,  # noqa: A002
        spin_seconds: float = DEFAULT_SPIN_SECONDS,
        watch: Callable[[str], None] | None = None,
    ) -> MessageQueue:
        """Join, as reader ``rank``, a queue whose board this process has not joined yet.

        Collective: no. A reader on the writer's host joins the board and reads the ring; any other
        connects, for which it needs the launcher's ``secret``. ``watch``: see the constructor.

        Raises:
            TypeError: ``handle`` is not a handle, or ``rank`` not a whole number.
            ValueError: ``rank`` is not a reader of the queue or has already joined, a secret is
                missing, or ``spin_seconds`` is not a valid time.
            SharedMemoryError: the writer's process has ended.
        """
        _check_handle(handle)
        rank = handle.rank_of(integer("rank", rank, least=DRIVER_RANK))
        codec, spin = codec_for(type), AdaptiveSpin(spin_seconds)
        if rank in handle.reader_ranks:
            member = handle.readers[handle.reader_ranks.index(rank)]
            with ExitStack() as undo:
                ring = _attach_ring(undo, handle)
                board = undo.enter_context(Board.attach(handle.board, member))
                queue = cls._on_ring(handle, board, ring, codec, spin, owns_board=True, watch=watch)
                undo.pop_all()
            return queue
        if handle.remote is None or rank not in handle.remote.readers:
            known = [*handle.reader_ranks, *(handle.remote.readers if handle.remote else ())]
            raise ValueError(f"rank {rank} is no reader of this queue; its readers are {known}")
        if secret is None:
            raise ValueError(f"rank {rank} reads from another host: it needs the launcher's secret")
        from shm_broadcast.net.reader import RemoteReader  # noqa: PLC0415 - loads ZeroMQ

        remote = RemoteReader(handle.remote, rank, secret)
        queue = cls.__new__(cls)
        QueueEnd.__init__(queue, handle, RemoteQueueReader(codec, remote, watch))
        return queue

    @classmethod
    def create_from_process_group(
        cls,
        pg: ProcessGroup | ObjectGroup,
        max_chunk_bytes: int = DEFAULT_CAPACITY,
        max_chunks: int = 1,
        writer_rank: int = 0,
        external_writer_handle: QueueHandle | None = None,
        blocking: bool = True,
        *,
        connect_ip: str | None = None,
        secret: bytes | None = None,
        type: Any | None = None,  # noqa: A002
        timeout: float | Deadline | None = 60.0,
        watch: Callable[[str], None] | None = None,
    ) -> MessageQueue:
        """A queue from one rank of a group to all others, or from outside to all of them.

        Collective: yes, every rank of ``pg``. Which ranks share the writer's host is found out by
        attaching to its memory, not guessed.

        Args:
            pg: a torch process group whose backend carries CPU objects, or an `ObjectGroup`.
            max_chunk_bytes: see the constructor.
            max_chunks: see the constructor.
            writer_rank: the rank in the group that writes; with ``external_writer_handle``, the one
                that holds the handle.
            external_writer_handle: a queue whose writer is in no group; all ranks then read.
            blocking: wait until writer and readers have all joined.
            connect_ip: the writer's address for readers on other hosts.
            secret: the launcher's secret, for readers on other hosts.
            type: a type that msgspec can validate; ``None`` carries any picklable object.
            timeout: seconds for ``blocking``.
            watch: see the constructor.

        Raises:
            ValueError: ``writer_rank`` is not in the group.
            GroupTimeoutError: some have not joined in time; names them.
        """
        group = as_object_group(pg)
        writer_rank = integer("writer_rank", writer_rank, group.world_size - 1, least=0)
        beside = ranks_beside(group, writer_rank)
        queue: MessageQueue | None = None
        handle: QueueHandle | Exception | None = external_writer_handle
        with ExitStack() as undo:
            if group.rank == writer_rank and external_writer_handle is None:
                elsewhere = {*range(group.world_size)} - {*beside, writer_rank}
                try:
                    queue = cls(
                        group.world_size - 1,
                        len(beside),
                        beside,
                        max_chunk_bytes,
                        max_chunks,
                        connect_ip,
                        remote_reader_ranks=sorted(elsewhere),
                        writer_rank=writer_rank,
                        secret=secret,
                        type=type,
                        watch=watch,
                    )
                    undo.callback(queue.shutdown)
                    handle = queue.export_handle()
                except Exception as error:  # noqa: BLE001 - raised once the others are told
                    handle = error
            handle = group.broadcast_obj(handle, writer_rank)
            if isinstance(handle, Exception):
                raise handle
            if queue is None:
                queue = cls.create_from_handle(
                    handle, group.rank, secret=secret, type=type, watch=watch
                )
                undo.callback(queue.shutdown)
            if blocking:
                queue.wait_until_ready(timeout)
            undo.pop_all()
        return queue

    @classmethod
    def create_from_process_group_single_reader(
        cls,
        pg: ProcessGroup | ObjectGroup,
        max_chunk_bytes: int = DEFAULT_CAPACITY,
        max_chunks: int = 1,
        reader_rank: int = 0,
        blocking: bool = False,
        *,
        connect_ip: str | None = None,
        secret: bytes | None = None,
        type: Any | None = None,  # noqa: A002
        timeout: float | Deadline | None = 60.0,
        watch: Callable[[str], None] | None = None,
    ) -> tuple[MessageQueue, list[QueueHandle]]:
        """A queue from every rank of a group to one of them.

        Collective: yes, every rank of ``pg``. The arguments are those of
        `create_from_process_group`.

        Returns:
            The queue this rank writes, and, on ``reader_rank``, every rank's handle, by rank (an
            empty list elsewhere). The reader joins each with ``create_from_handle(handle, 0)``.

        Raises:
            ValueError: ``reader_rank`` is not in the group.
            SharedMemoryError: too little memory is free on some rank; every rank raises.
        """
        group = as_object_group(pg)
        reader_rank = integer("reader_rank", reader_rank, group.world_size - 1, least=0)
        beside = group.rank in (reader_rank, *ranks_beside(group, reader_rank))
        here, elsewhere = ([reader_rank], []) if beside else ([], [reader_rank])
        queue: MessageQueue | None = None
        handle: QueueHandle | Exception
        with ExitStack() as undo:
            try:
                queue = cls(
                    1,
                    len(here),
                    here,
                    max_chunk_bytes,
                    max_chunks,
                    connect_ip,
                    remote_reader_ranks=elsewhere,
                    writer_rank=group.rank,
                    secret=secret,
                    type=type,
                    watch=watch,
                )
                undo.callback(queue.shutdown)
                handle = queue._handle = structs.replace(queue._handle, sole_reader=True)
            except Exception as error:  # noqa: BLE001 - raised once the others are told
                handle = error
            handles = group.all_gather_obj(handle)
            failed = [each for each in handles if isinstance(each, Exception)]
            if queue is None or failed:
                raise failed[0]
            if blocking:
                queue.wait_until_ready(timeout)
            undo.pop_all()
        return queue, handles if group.rank == reader_rank else []

    @classmethod
    def _on_ring(
        cls,
        handle: QueueHandle,
        board: Board,
        ring: Segment | None,
        codec: Codec,
        spin: AdaptiveSpin,
        *,
        owns_board: bool = False,
        zero_copy: bool = False,
        remote: RemoteWriter | None = None,
        watch: Callable[[str], None] | None = None,
    ) -> MessageQueue:
        member, writer, readers = board.member, handle.writer, handle.readers
        if member is None or member not in (writer, *readers):
            raise ValueError(f"member {member} of {board.name} neither writes nor reads this queue")
        end: QueueWriter | QueueReader
        if member == writer:
            writing = RingWriter(ring, board, writer, readers) if ring is not None else None
            end = QueueWriter(board, codec, writing, remote, _blocks(writing, zero_copy), watch)
        elif ring is not None:
            reading = RingReader(ring, board, member, readers.index(member), len(readers), writer)
            end = LocalReader(board, codec, reading, writer, spin, watch)
        else:
            raise ValueError("the queue has no readers on its writer's host")
        queue = cls.__new__(cls)
        QueueEnd.__init__(queue, handle, end, board, ring, owns_board=owns_board)
        return queue


def _describe(
    board: Board,
    ring: Segment | None,
    writer: int,
    readers: Sequence[int],
    reader_ranks: Sequence[int],
    remote: RemoteWriter | None,
) -> QueueHandle:
    return QueueHandle(
        board.handle(),
        ring.handle() if ring else None,
        writer,
        tuple(readers),
        tuple(reader_ranks),
        remote.handle if remote else None,
    )


def _blocks(ring: RingWriter | None, zero_copy: bool) -> BlockWriter | None:
    if ring is None or not zero_copy:
        return None
    return BlockWriter(ring, DEFAULT_BLOCK_BYTES)


def _ring(
    undo: ExitStack, board: Board, writer: int, readers: Sequence[int], capacity: int
) -> Segment | None:
    if not readers:
        return None
    return undo.enter_context(create_ring(board, writer, readers, capacity))


def _check_handle(handle: Any) -> None:
    if not isinstance(handle, QueueHandle):
        kind = type(handle).__name__
        raise TypeError(f"handle must be what export_handle() returns; got {kind}")


def _attach_ring(undo: ExitStack, handle: QueueHandle) -> Segment:
    if handle.ring is None:
        raise ValueError("the queue has no readers on its writer's host")
    return undo.enter_context(Segment.attach(handle.ring))


def _remote_writer(
    undo: ExitStack,
    writer_rank: int,
    ranks: Sequence[int],
    connect_ip: str | None,
    secret: bytes | None,
) -> RemoteWriter | None:
    if not ranks:
        return None
    if connect_ip is None or secret is None:
        raise ValueError(
            f"readers {ranks} are on other hosts: the queue needs connect_ip, the address at which "
            "they reach this host, and the launcher's secret"
        )
    from shm_broadcast.net.writer import RemoteWriter  # noqa: PLC0415 - loads ZeroMQ

    return undo.enter_context(RemoteWriter(writer_rank, ranks, connect_ip, secret))
