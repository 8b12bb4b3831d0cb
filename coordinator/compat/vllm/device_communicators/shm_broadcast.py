"""Provide vLLM's message queue over `shm_broadcast.MessageQueue`: any size, deadlines, liveness."""

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
"""The folder of POSIX shared memory. Queues use none of it, only memory."""


def check_shm_free_space(
    required_bytes: int,
    shm_path: str = SHM_PATH,
    *,
    allocation_name: str = "shared-memory allocation",
) -> None:
    """Raise RuntimeError if ``required_bytes`` exceed the free space at ``shm_path``.

    Does nothing if the folder does not exist. ``allocation_name`` is for the error.
    """
    if Path(shm_path).is_dir() and required_bytes > (free := shutil.disk_usage(shm_path).free):
        raise RuntimeError(
            f"{allocation_name} needs {required_bytes} bytes in {shm_path}, which has {free} free"
        )


class Handle(native.QueueHandle, frozen=True):
    """A queue's handle for its readers, with the attributes of vLLM's."""

    @classmethod
    def of(cls, handle: native.QueueHandle) -> Self:
        """Return the handle of the same queue."""
        return cls(*msgspec.structs.astuple(handle))

    @property
    def local_reader_ranks(self) -> list[int]:
        """Return the ranks by which readers on the writer's host join."""
        return [0] if self.sole_reader and self.reader_ranks else list(self.reader_ranks)

    @property
    def buffer_handle(self) -> native.SegmentHandle | None:
        """Return the ring of local readers; None without local readers."""
        return self.ring

    @property
    def tensor_arena_handle(self) -> None:
        """Return None: a message names the memory of its large tensors."""
        return None

    @property
    def local_subscribe_addr(self) -> None:
        """Return None: large messages go through the ring as well."""
        return None

    @property
    def local_notify_addr(self) -> None:
        """Return None: shared memory wakes readers."""
        return None

    @property
    def remote_subscribe_addr(self) -> str | None:
        """Return the address for readers on other hosts; None without such readers."""
        return None if self.remote is None else self.remote.address

    @property
    def remote_addr_ipv6(self) -> bool:
        """Return whether that is an IPv6 address."""
        return "[" in (self.remote_subscribe_addr or "")


class MessageQueue:
    """One member's end of a queue from one writer to many readers.

    Attributes:
        queue: the wrapped queue.
        handle: for the readers.
        n_local_reader: the number of readers on the writer's host.
        n_remote_reader: the number of readers on other hosts.
        max_chunk_bytes: the size of the buffer of `acquire_write`.
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
        """Create a queue; this process writes.

        Args:
            n_reader: the number of readers.
            n_local_reader: the number of readers on this host.
            local_reader_ranks: the caller's ranks of the local readers; None: 0, 1, ...
            max_chunk_bytes: with ``max_chunks``, requests a ring of their product, at most 4 MiB.
                It does not limit a message's size.
            max_chunks: see ``max_chunk_bytes``.
            connect_ip: the address of this host for readers on others. These also need the
                launcher's secret, from the file that the environment names.
            enable_shm_tensor_arena: let readers use large tensors without a copy, if all are on
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
        self._bind(queue, max_chunk_bytes)

    def _own_rank(self) -> int:
        """Return the rank that names this process in messages."""
        return native.DRIVER_RANK

    @classmethod
    def wrap(cls, queue: native.MessageQueue, max_chunk_bytes: int = 4 << 20) -> Self:
        """Return an adapter of ``queue``."""
        adapter = cls.__new__(cls)
        adapter._bind(queue, max_chunk_bytes)
        return adapter

    def _bind(self, queue: native.MessageQueue, max_chunk_bytes: int) -> None:
        self.queue = queue
        self.handle = Handle.of(queue.export_handle())
        self.n_local_reader = len(self.handle.reader_ranks)
        self.n_remote_reader = len(self.handle.remote.readers) if self.handle.remote else 0
        self.max_chunk_bytes = max_chunk_bytes
        self.shutting_down = False

    @classmethod
    def create_from_handle(cls, handle: native.QueueHandle, rank: int) -> Self:
        """Join as reader ``rank``; a sole reader on another host may use any rank.

        Raises ValueError if ``rank`` is not a reader of the queue.
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
        """Create a queue from one rank, or from outside, to all. Collective: yes."""
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
        """Create a queue from every rank to one, which gets all handles. Collective: yes."""
        queue, handles = native.MessageQueue.create_from_process_group_single_reader(
            pg, max_chunk_bytes, max_chunks, reader_rank, blocking, secret=launcher_secret()
        )
        return cls.wrap(queue, max_chunk_bytes), [Handle.of(handle) for handle in handles]

    def export_handle(self) -> Handle:
        """Return the handle for readers."""
        return self.handle

    def wait_until_ready(self) -> None:
        """Wait until the writer, or at the writer all readers, have joined."""
        self.queue.wait_until_ready()

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        """Send a picklable object to every reader.

        Raises TimeoutError if the ring stays full; it names the readers that are behind.
        """
        self.queue.enqueue(obj, timeout)

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        """Return the next object; without ``timeout`` (seconds) wait for ever.

        ``indefinite`` has no effect: waiting logs nothing. Raises TimeoutError.
        """
        del indefinite
        return self.queue.dequeue(timeout)

    @contextmanager
    def acquire_write(self, timeout: float | None = None) -> Iterator[memoryview]:
        """Yield a zeroed buffer of ``max_chunk_bytes``; send it when the block ends.

        Readers get it whole by `acquire_read`. Nothing is sent if the block raises.
        """
        with memoryview(bytearray(self.max_chunk_bytes)) as buffer:
            yield buffer
            self.queue.enqueue_encoded(buffer, timeout)

    @contextmanager
    def acquire_read(
        self, timeout: float | None = None, indefinite: bool = False
    ) -> Iterator[memoryview]:
        """Yield the next message's bytes, not decoded; valid inside the block only."""
        del indefinite
        with self.queue.acquire_read(timeout) as view:
            yield view

    def broadcast_object(self, obj: Any = None) -> Any:
        """At the writer: `enqueue` and return ``obj``. At a reader: `dequeue`."""
        return self.queue.broadcast_object(obj)

    def shutdown(self) -> None:
        """Close this end; a thread of this process that waits in it gets an error."""
        self.shutting_down = True
        self.queue.shutdown()
