"""vLLM's message queue, over `shm_broadcast.MessageQueue`: any size, deadlines, liveness."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import msgspec
from torch.distributed import ProcessGroup

import shm_broadcast as native
from coordinator.secret import launcher_secret
from shm_broadcast.queue.rendezvous import ObjectGroup

SHM_PATH = "/dev/shm"
"""Where POSIX shared memory has its files. Ours has none: it counts towards memory alone."""


def check_shm_free_space(
    required_bytes: int,
    shm_path: str = SHM_PATH,
    *,
    allocation_name: str = "shared-memory allocation",
) -> None:
    """Accept only what fits the file system of shared memory.

    Args:
        required_bytes: how large a file is to be.
        shm_path: where; nothing is checked where there is no such folder.
        allocation_name: what the error calls it.

    Raises:
        RuntimeError: there is too little room.
    """
    if Path(shm_path).is_dir() and required_bytes > (free := shutil.disk_usage(shm_path).free):
        raise RuntimeError(
            f"{allocation_name} needs {required_bytes} bytes in {shm_path}, which has {free} free"
        )


class Handle(native.QueueHandle, frozen=True):
    """Names a queue to its readers, also in vLLM's words."""

    @classmethod
    def of(cls, handle: native.QueueHandle) -> Self:
        """The same queue's."""
        return cls(*msgspec.structs.astuple(handle))

    @property
    def local_reader_ranks(self) -> list[int]:
        """The readers on the writer's host, as they join."""
        return [0] if self.sole_reader and self.reader_ranks else list(self.reader_ranks)

    @property
    def buffer_handle(self) -> native.SegmentHandle | None:
        """The ring that they read; None without such."""
        return self.ring

    @property
    def tensor_arena_handle(self) -> None:
        """None: large tensors lie in the memory that their message names."""
        return None

    @property
    def local_subscribe_addr(self) -> None:
        """None: large messages go through the ring as well."""
        return None

    @property
    def local_notify_addr(self) -> None:
        """None: readers are woken through shared memory."""
        return None

    @property
    def remote_subscribe_addr(self) -> str | None:
        """Where readers on other hosts connect; None without such."""
        return None if self.remote is None else self.remote.address

    @property
    def remote_addr_ipv6(self) -> bool:
        """Whether that is an IPv6 address."""
        return "[" in (self.remote_subscribe_addr or "")


class MessageQueue:
    """One member's end of a queue from one writer to many readers.

    Attributes:
        queue: ours.
        handle: what readers join with.
        n_local_reader: how many readers are on the writer's host.
        n_remote_reader: how many are not.
        max_chunk_bytes: what `acquire_write` yields.
        shutting_down: whether `shutdown` was called.
    """

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: list[int] | None = None,
        max_chunk_bytes: int = 24 << 20,
        max_chunks: int = 10,
        connect_ip: str | None = None,
        enable_shm_tensor_arena: bool = False,
    ) -> None:
        """A new queue; this process writes. Collective: no.

        Args:
            n_reader: how many readers there are.
            n_local_reader: how many of them run on this host.
            local_reader_ranks: what the caller calls them; 0, 1, ... if not given.
            max_chunk_bytes: with ``max_chunks``, asks for a ring of their product, of which at
                most 4 MiB are taken. It limits no message's size.
            max_chunks: see ``max_chunk_bytes``.
            connect_ip: the address of this host for readers on others. These also need the
                launcher's secret, from the file that the environment names.
            enable_shm_tensor_arena: let readers use large tensors where they lie, if all are on
                this host; they must not write to them.

        Raises:
            ValueError: the numbers do not fit together, or an address or a secret is missing.
        """
        queue = native.MessageQueue(
            n_reader,
            n_local_reader,
            local_reader_ranks,
            max_chunk_bytes,
            max_chunks,
            connect_ip,
            writer_rank=self._own_rank(),
            secret=launcher_secret() if n_reader > n_local_reader else None,
            zero_copy=enable_shm_tensor_arena and n_reader == n_local_reader,
        )
        self._show(queue, max_chunk_bytes)

    def _own_rank(self) -> int:
        """What messages call this process."""
        return native.DRIVER_RANK

    @classmethod
    def wrap(cls, queue: native.MessageQueue, max_chunk_bytes: int = 4 << 20) -> Self:
        """One of ours, in vLLM's words."""
        face = cls.__new__(cls)
        face._show(queue, max_chunk_bytes)
        return face

    def _show(self, queue: native.MessageQueue, max_chunk_bytes: int) -> None:
        self.queue = queue
        self.handle = Handle.of(queue.export_handle())
        self.n_local_reader = len(self.handle.reader_ranks)
        self.n_remote_reader = len(self.handle.remote.readers) if self.handle.remote else 0
        self.max_chunk_bytes = max_chunk_bytes
        self.shutting_down = False

    @classmethod
    def create_from_handle(cls, handle: native.QueueHandle, rank: int) -> Self:
        """Join as reader ``rank``. Collective: no.

        The only reader, if it is on another host, may call itself by any rank.

        Raises:
            ValueError: ``rank`` is no reader of the queue.
        """
        if handle.remote is not None and len(handle.remote.readers) == 1 > len(handle.reader_ranks):
            (rank,) = handle.remote.readers
        rank = handle.rank_of(rank)
        secret = None if rank in handle.reader_ranks else launcher_secret()
        return cls.wrap(native.MessageQueue.create_from_handle(handle, rank, secret=secret))

    @classmethod
    def create_from_process_group(
        cls,
        pg: ProcessGroup | ObjectGroup,
        max_chunk_bytes: int,
        max_chunks: int,
        writer_rank: int = 0,
        external_writer_handle: native.QueueHandle | None = None,
        blocking: bool = True,
    ) -> Self:
        """A queue from one rank of a group to all others, or from outside to all of them.

        Collective: yes, every rank of ``pg``.
        """
        queue = native.MessageQueue.create_from_process_group(
            pg,
            max_chunk_bytes,
            max_chunks,
            writer_rank,
            external_writer_handle,
            blocking,
            secret=launcher_secret(),
        )
        return cls.wrap(queue, max_chunk_bytes)

    @classmethod
    def create_from_process_group_single_reader(
        cls,
        pg: ProcessGroup | ObjectGroup,
        max_chunk_bytes: int,
        max_chunks: int,
        reader_rank: int = 0,
        blocking: bool = False,
    ) -> tuple[Self, list[Handle]]:
        """A queue from every rank of a group to one of them; there, the handles of all.

        Collective: yes, every rank of ``pg``.
        """
        queue, handles = native.MessageQueue.create_from_process_group_single_reader(
            pg, max_chunk_bytes, max_chunks, reader_rank, blocking, secret=launcher_secret()
        )
        return cls.wrap(queue, max_chunk_bytes), [Handle.of(handle) for handle in handles]

    def export_handle(self) -> Handle:
        """What readers join with."""
        return self.handle

    def wait_until_ready(self) -> None:
        """Wait until the writer, or at the writer all readers, have joined."""
        self.queue.wait_until_ready()

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send a picklable object to every reader.

        Raises:
            TimeoutError: no room in time; names the readers that are behind.
        """
        self.queue.enqueue(obj, timeout)

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """The next object.

        Args:
            timeout: seconds; None waits for ever.
            indefinite: no effect: nothing is logged meanwhile.

        Raises:
            TimeoutError: no message in time.
        """
        del indefinite
        return self.queue.dequeue(timeout)

    @contextmanager
    def acquire_write(self, timeout: float | None = None) -> Iterator[memoryview]:
        """A buffer of ``max_chunk_bytes``, zeros at first, which is sent when the block ends.

        Readers take it by `acquire_read`, whole. Nothing is sent if the block raises.
        """
        with memoryview(bytearray(self.max_chunk_bytes)) as buffer:
            yield buffer
            self.queue.enqueue_encoded(buffer, timeout)

    @contextmanager
    def acquire_read(
        self, timeout: float | None = None, indefinite: bool = False
    ) -> Iterator[memoryview]:
        """The next message's bytes, not decoded; valid inside the block only."""
        del indefinite
        with self.queue.acquire_read(timeout) as view:
            yield view

    def broadcast_object(self, obj: Any = None) -> Any:
        """At the writer: `enqueue` and return ``obj``. At a reader: `dequeue`."""
        return self.queue.broadcast_object(obj)

    def shutdown(self) -> None:
        """Close this end; a thread of this process that waits here gets an error."""
        self.shutting_down = True
        self.queue.shutdown()
