# mypy: disable-error-code="override"
"""Provide vLLM's message queue over `shm_broadcast.MessageQueue`: any size, deadlines, liveness."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import msgspec

import shm_broadcast as native
from coordinator.launcher import own_address
from coordinator.secret import launcher_secret

_ROUTED = "192.0.2.1"
"""An address of no host (RFC 5737): packets to it take the default route. None is sent."""


class Handle(native.QueueHandle, frozen=True):
    """A queue's handle for its readers, with the attributes of vLLM's.

    Without local sockets: shared memory carries and announces all messages to local readers.
    """

    tensor_arena_handle: ClassVar[None] = None
    local_subscribe_addr: ClassVar[None] = None
    local_notify_addr: ClassVar[None] = None

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
    def remote_subscribe_addr(self) -> str | None:
        """Return the address for readers on other hosts; None without such readers."""
        return None if self.remote is None else self.remote.address

    @property
    def remote_addr_ipv6(self) -> bool:
        """Return whether that is an IPv6 address."""
        return "[" in (self.remote_subscribe_addr or "")


class MessageQueue(native.MessageQueue):
    """One member's end of a queue from one writer to many readers.

    Attributes:
        handle: for the readers.
        n_local_reader: the number of readers on the writer's host.
        n_remote_reader: the number of readers on other hosts.
        max_chunk_bytes: the size of the buffer of `acquire_write`.
        shutting_down: whether `shutdown` was called.
    """

    max_chunk_bytes = 4 << 20
    shutting_down = False

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: list[int] | None = None,
        max_chunk_bytes: int = 24 << 20,
        max_chunks: int = 10,
        connect_ip: str | None = None,
        enable_shm_tensor_arena: bool = False,
        *,
        secret: bytes | None = None,
        **options: Any,
    ) -> None:
        """Create a queue; this process writes.

        Args:
            n_reader: the number of readers.
            n_local_reader: the number of readers on this host.
            local_reader_ranks: the caller's ranks of the local readers; None: 0, 1, ...
            max_chunk_bytes: with ``max_chunks``, requests a ring of their product, at most 4 MiB.
                It does not limit a message's size.
            max_chunks: see ``max_chunk_bytes``.
            connect_ip: the address of this host for readers on others; None: ``VLLM_HOST_IP`` in
                the environment, or this host's address on the default route. These readers also
                need the launcher's secret, from the file that the environment names.
            enable_shm_tensor_arena: let readers use large tensors without a copy, if all are on
                this host; they must not write to them.

        Raises:
            ValueError: the numbers do not fit together, or a secret is missing.
            OSError: this host has no default route, and no address is given.
        """
        if n_reader > n_local_reader:
            secret = launcher_secret() if secret is None else secret
            connect_ip = connect_ip or os.environ.get("VLLM_HOST_IP") or own_address(_ROUTED, 1)
        super().__init__(
            n_reader,
            n_local_reader,
            local_reader_ranks,
            max_chunk_bytes,
            max_chunks,
            connect_ip,
            secret=secret,
            zero_copy=enable_shm_tensor_arena and n_reader == n_local_reader,
            **options,
        )
        self.max_chunk_bytes = max_chunk_bytes

    @classmethod
    def create_from_handle(
        cls,
        handle: native.QueueHandle,
        rank: int,
        *,
        secret: bytes | None = None,
        **options: Any,
    ) -> Self:
        """Join as reader ``rank``; a sole reader on another host may use any rank.

        Raises ValueError if ``rank`` is not a reader of the queue.
        """
        if handle.remote is not None and len(handle.remote.readers) == 1 > len(handle.reader_ranks):
            (rank,) = handle.remote.readers
        rank = handle.rank_of(rank)
        if secret is None and rank not in handle.reader_ranks:
            secret = launcher_secret()
        return super().create_from_handle(  # type: ignore[return-value]
            handle, rank, secret=secret, **options
        )

    @classmethod
    def create_from_process_group_single_reader(
        cls, *args: Any, **options: Any
    ) -> tuple[Any, list[Handle]]:
        """Create a queue from every rank to one, which gets all handles. Collective: yes."""
        queue, handles = super().create_from_process_group_single_reader(*args, **options)
        return queue, [Handle.of(handle) for handle in handles]

    def export_handle(self) -> Handle:
        """Return the handle for readers."""
        return Handle.of(super().export_handle())

    handle = property(export_handle)

    @property
    def n_local_reader(self) -> int:
        """Return the number of readers on the writer's host."""
        return len(self._handle.reader_ranks)

    @property
    def n_remote_reader(self) -> int:
        """Return the number of readers on other hosts."""
        return len(self._handle.remote.readers) if self._handle.remote else 0

    def enqueue(self, obj: Any, timeout: float | native.Deadline | None = None) -> None:
        """Send a picklable object to every reader.

        Raises TimeoutError if the ring stays full; it names the readers that are behind.
        """
        super().enqueue(obj, timeout)

    def broadcast_object(
        self, obj: Any = None, timeout: float | native.Deadline | None = None
    ) -> Any:
        """At the writer: `enqueue` and return ``obj``. At a reader: `dequeue`."""
        return super().broadcast_object(obj, timeout)

    @contextmanager
    def acquire_write(self, timeout: float | None = None) -> Iterator[memoryview]:
        """Yield a zeroed buffer of ``max_chunk_bytes``; send it when the block ends.

        Readers get it whole by `acquire_read`. Nothing is sent if the block raises.
        """
        with memoryview(bytearray(self.max_chunk_bytes)) as buffer:
            yield buffer
            self.enqueue_encoded(buffer, timeout)

    def shutdown(self) -> None:
        """Close this end; a thread of this process that waits in it gets an error."""
        self.shutting_down = True
        super().shutdown()
