"""Send messages from one writer to many readers: any object, any size, on any host.

- Every reader gets every message, once, in order; the writer waits for slow readers. Large buffers
  of a ``zero_copy`` writer vanish with its process: a reader that has not received them gets
  `PeerLostError`, and no later messages.
- The caller may change a message after `MessageQueue.enqueue` returns.
- A `MessageQueue.dequeue` that times out consumes nothing; the next one returns that message.
- A message that cannot be decoded raises at its reader only and is consumed.
- An error names a dead peer within a second, usually within 0.15 s, and a slow one at the deadline.

A message larger than an eighth of the ring streams through it while the readers drain it: its
``enqueue`` returns only when they have nearly all of it.

Assumes: the members share the trust domain of `shm_broadcast.codec`.
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

    Threads may share it: calls run one at a time. An end that is garbage-collected without
    `shutdown` counts as lost, as if its process had exited, unless the board is the caller's.
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

        ``board`` is that of the members on the writer's host, None at a reader on another host;
        ``ring`` is None if there are no readers on the writer's host.
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
            "a queue cannot be pickled: send export_handle() to the other process, which joins "
            "with create_from_handle()"
        )

    def export_handle(self) -> QueueHandle:
        """Return the handle for the other members; valid while this process keeps the queue."""
        return self._handle

    @property
    def is_writer(self) -> bool:
        """Return whether this end writes."""
        return self._writer is not None

    def wait_until_ready(self, timeout: float | Deadline | None = None) -> None:
        """Wait until all readers have joined; at a reader, until the writer has joined.

        ``timeout`` is in seconds; 0 or less does not wait, ``None`` has no limit. GroupTimeoutError
        names the missing members; other errors as in `dequeue`.
        """
        (self._end or self._refuse("wait_until_ready")).wait_until_ready(Deadline.within(timeout))

    def enqueue(self, message: Any, timeout: float | Deadline | None = None) -> None:
        """Send ``message`` to every reader.

        Waits only while the queue is full, for the slowest reader. ``message`` may be changed after
        the call.

        Args:
            message: any picklable object, or one of the queue's type.
            timeout: seconds to wait for room; 0 or less does not wait, ``None`` has no limit. A
                message that times out reaches no reader.

        Raises:
            GroupTimeoutError: no room in time; names the readers that are behind, and by how much.
            PeerLostError: a reader on another host, or a reader that keeps the queue full, is lost:
                its process has exited or dropped it. No reader gets this message or a later one,
                until `remove_reader` or, on this host, a successor that joins as the same reader.
            GroupAbortedError: a member aborted the board.
            GroupClosedError: this end was shut down, or every reader was (detected when the queue
                is full).
            RuntimeError: this thread is in a call of the queue, and a signal handler or the
                message's pickling calls it again.
            Exception: a signal handler's; while a message is sent to other hosts it closes this
                end.
            PeerProtocolError: a reader on another host violated the protocol.
            TypeError: this end reads, or ``message`` cannot be encoded.
        """
        (self._writer or self._refuse("enqueue")).enqueue(message, timeout)

    def enqueue_noted(self, message: Any, timeout: Deadline, begins: Callable[[], object]) -> None:
        """Like `enqueue`, and call ``begins`` once ``message`` is encoded.

        A message that raises before that, also by a signal handler, reaches no reader.
        """
        (self._writer or self._refuse("enqueue")).enqueue(message, timeout, begins)

    def enqueue_encoded(self, data: Buffer, timeout: float | Deadline | None = None) -> None:
        """Send a contiguous buffer unchanged, for readers that call `acquire_read`.

        Readers that call `dequeue` decode it with the queue's codec. ``timeout``, aliasing and
        errors as in `enqueue`.
        """
        (self._writer or self._refuse("enqueue")).enqueue_encoded(data, timeout)

    def dequeue(
        self,
        timeout: float | Deadline | None = None,
        indefinite: bool = False,  # noqa: ARG002
    ) -> Any:
        """Wait for the next message and return it.

        Args:
            timeout: seconds; 0 or less does not wait, ``None`` has no limit.
            indefinite: vLLM's argument, without effect.

        Returns:
            The message, which belongs to the caller. Memory of tensors and arrays of 1 MiB and more
                is reused after their last reference is dropped. If the writer was made with
                ``zero_copy``, such tensors and arrays are in memory shared by all readers: do not
                write to them, and drop them soon. They count towards the writer's limit of 512 MiB;
                beyond it messages are copied as without ``zero_copy``.

        Raises:
            GroupTimeoutError: no message in time; nothing was consumed.
            MessageDecodeError: a message is not of the queue's type; it was consumed.
            PeerLostError: the writer is lost (its process has exited or dropped it), and all its
                messages were read, or the next one was in a block of a ``zero_copy`` writer. No
                later message is returned, unless a successor writes.
            SharedMemoryError: a block of a ``zero_copy`` writer cannot be mapped; the message was
                consumed, unless this process has no free descriptor.
            GroupAbortedError: a member aborted the board.
            GroupClosedError: this end was shut down, or the writer was and all messages were read.
            RuntimeError: this thread is in a call of the queue, as in an `acquire_read` block.
            TypeError: this end writes.
        """
        return (self._reader or self._refuse("dequeue")).dequeue(timeout)

    def acquire_read(
        self,
        timeout: float | Deadline | None = None,
        indefinite: bool = False,  # noqa: ARG002
    ) -> AbstractContextManager[memoryview]:
        """Use the next message's encoded main part in a ``with`` block, without decoding it.

        The view is valid inside the block only. If the message is one record of the ring, the view
        is of the ring itself, and the block's end, even by an exception, releases the space. A
        message that was streamed, has out-of-band buffers, or arrived from another host is copied
        first. Arguments and errors as in `dequeue`, except `MessageDecodeError`.
        """
        return (self._reader or self._refuse("acquire_read")).acquire_read(timeout)

    def readable(self, within: float = 0.0) -> bool:
        """Return whether part of a message has arrived; cheap, to poll several queues.

        ``within``: seconds to spin for it, without the GIL. A reader on another host than the
        writer's does not spin, and waits for the whole message.
        """
        return (self._reader or self._refuse("readable")).readable(within)

    def fileno(self) -> int:
        """Return a descriptor as `RemoteEnd.fileno`, at a reader on another host than the writer's.

        Raises ValueError at any other end.
        """
        return (self._reader or self._refuse("fileno")).fileno()

    def behind(self) -> dict[int, int]:
        """Return each local reader's number of unread messages, by member of the board."""
        return (self._writer or self._refuse("behind")).behind()

    def remove_reader(self, rank: int) -> None:
        """Continue without reader ``rank``, which `enqueue` has named as lost or at fault.

        The writer stops waiting for a reader that shut down; a dead reader may be replaced, so the
        caller decides. Raises ValueError if it is no reader of this queue or not lost, and
        TypeError if this end reads.
        """
        (self._writer or self._refuse("remove_reader")).remove_reader(rank)

    def broadcast_object(self, message: Any = None, timeout: float | Deadline | None = None) -> Any:
        """`enqueue` and return ``message`` at the writer; `dequeue` at a reader."""
        if not self.is_writer:
            return self.dequeue(timeout)
        self.enqueue(message, timeout)
        return message

    def shutdown(self) -> None:
        """Close this end. Idempotent; any thread or signal handler may call it at any time.

        A thread of this process that waits in the queue gets GroupClosedError. After the writer's
        shutdown, readers still get the messages in the queue, then GroupClosedError. A
        ``zero_copy`` writer's process keeps unread blocks, and a thread, until each joined reader
        has mapped them, shut down or exited. The writer no longer waits for a reader that shut
        down. In a forked child only the child's copy is closed.
        """
        if self._end is not None:
            self._end.close()
        if self._ring is not None:
            self._ring.close()
        if self._owns_board and self._board is not None:
            self._board.close()

    close = shutdown

    def after_fork_in_child(self) -> None:
        """Refuse all calls in a forked child: this end belongs to its parent."""
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
    """One member's end of a queue, and the ways to make and join it."""

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
        type: Any | None = None,  # noqa: A002 - as in msgspec
        zero_copy: bool = False,
        watch: Callable[[str], None] | None = None,
    ) -> None:
        """Make a queue with its own board; this process writes.

        Readers join with `create_from_handle`. For processes that already have a board see
        `on_board`.

        Args:
            n_reader: the number of readers, at most 4096; a queue without readers, as of a group of
                one, accepts messages and drops them.
            n_local_reader: how many of them run on this host.
            local_reader_ranks: their ranks; default 0, 1, ...
            max_chunk_bytes: with ``max_chunks``, requests a ring of their product, of at most
                `DEFAULT_CAPACITY` bytes. It limits no message's size.
            max_chunks: see ``max_chunk_bytes``.
            connect_ip: the address at which readers on other hosts reach this one; needed for them.
            remote_reader_ranks: the ranks of readers on other hosts; by default the ranks after the
                local ones.
            writer_rank: the writer's rank in error messages; by default it is the driver.
            secret: the launcher's secret, 16 bytes or more; needed for readers on other hosts.
            type: a type that msgspec can validate; ``None`` carries any picklable object.
            zero_copy: let readers use buffers of 1 MiB and more in place: see `dequeue`.
            watch: called with the operation's name when a call begins to wait, then every 40 ms,
                after a second every 160 ms; for example `Board.check` of another board. Its
                exceptions end the call.

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
        """Make a queue between members of ``board``; this process owns its memory.

        The others `attach` by `export_handle`. The shared memory is ``capacity`` bytes plus 64 per
        reader and 192, rounded up to whole pages. Readers on other hosts join by
        `create_from_handle`; only the writer's process may make a queue for them. Other arguments
        as of the constructor.

        Args:
            board: its member is the writer or a reader.
            writer: the member that writes.
            readers: the members that read, without the writer; one or more, unless there are
                readers on other hosts.
            capacity: bytes, rounded up to a multiple of 64 KiB.
            spin_seconds: the longest time to poll for a message without sleeping.
            zero_copy: counts at the writer only.

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
        """Join the queue of ``handle``; ``board.member`` decides whether to write or read.

        A reader that attaches late gets every message from the first on; a successor of a dead
        reader continues at its position. Arguments as in `on_board`; ``type`` is the creator's.

        Args:
            board: this process's end of the handle's board; it stays the caller's.

        Raises:
            ValueError: ``board.member`` takes no part in the queue, or ``spin_seconds`` is not a
                valid time.
            SharedMemoryError: the queue is on another host, or its owner has exited.
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

        A reader on the writer's host joins the board and reads the ring; any other reader connects,
        for which it needs the launcher's ``secret``. ``watch``: see the constructor.

        Raises:
            TypeError: ``handle`` is not a handle, or ``rank`` not a whole number.
            ValueError: ``rank`` is not a reader of the queue or has already joined, a secret is
                missing, or ``spin_seconds`` is not a valid time.
            SharedMemoryError: the writer's process has exited.
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
        """Make a queue from one rank of a group, or from an external writer, to all others.

        Collective: yes, every rank of ``pg``. Ranks that can attach to the writer's memory share
        its host. Other arguments as of the constructor.

        Args:
            pg: a torch process group whose backend carries CPU objects, or an `ObjectGroup`.
            writer_rank: the rank in the group that writes, or holds ``external_writer_handle``.
            external_writer_handle: a queue whose writer is not in the group; all ranks then read.
            blocking: wait, for ``timeout`` seconds, until writer and readers have all joined.

        Raises:
            ValueError: ``writer_rank`` is not in the group.
            GroupTimeoutError: names the members that have not joined in time.
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
                except Exception as error:  # noqa: BLE001 - raised after the exchange
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
        """Make a queue from every rank of a group to one of them.

        Collective: yes, every rank of ``pg``. Arguments as of `create_from_process_group`.

        Returns:
            The queue that this rank writes, and, on ``reader_rank``, every rank's handle, by rank
                (elsewhere an empty list). The reader joins each with ``create_from_handle(handle,
                0)``.

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
            except Exception as error:  # noqa: BLE001 - raised after the exchange
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
