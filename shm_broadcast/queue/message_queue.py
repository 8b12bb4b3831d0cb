"""The message queue: one writer, many readers, any object, any size.

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

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from msgspec import structs

from shm_broadcast.board.board import Board
from shm_broadcast.checked_arguments import whole
from shm_broadcast.codec import codec_for
from shm_broadcast.doorbell import DEFAULT_SPIN_SECONDS, AdaptiveSpin
from shm_broadcast.errors import DRIVER_RANK
from shm_broadcast.queue.end import QueueEnd
from shm_broadcast.queue.handle import DEFAULT_CAPACITY, QueueHandle, create_ring, ring_capacity
from shm_broadcast.queue.reader import DistantReader, LocalReader
from shm_broadcast.queue.rendezvous import (
    ObjectGroup,
    as_object_group,
    local_and_remote,
    ranks_beside,
)
from shm_broadcast.queue.writer import QueueWriter
from shm_broadcast.ring.arena import DEFAULT_BLOCK_BYTES, BlockWriter
from shm_broadcast.ring.reader import RingReader
from shm_broadcast.ring.writer import RingWriter
from shm_broadcast.segment import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import ProcessGroup

    from shm_broadcast.codec import Codec
    from shm_broadcast.deadline import Deadline
    from shm_broadcast.queue.reader import QueueReader
    from shm_broadcast.remote.writer import RemoteWriter


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
        rank = handle.rank_of(whole("rank", rank, least=DRIVER_RANK))
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
        from shm_broadcast.remote.reader import RemoteReader  # noqa: PLC0415 - loads ZeroMQ

        remote = RemoteReader(handle.remote, rank, secret)
        queue = cls.__new__(cls)
        QueueEnd.__init__(queue, handle, DistantReader(codec, remote, watch))
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
        writer_rank = whole("writer_rank", writer_rank, group.world_size - 1, least=0)
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
        reader_rank = whole("reader_rank", reader_rank, group.world_size - 1, least=0)
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
    from shm_broadcast.remote.writer import RemoteWriter  # noqa: PLC0415 - loads ZeroMQ

    return undo.enter_context(RemoteWriter(writer_rank, ranks, connect_ip, secret))
