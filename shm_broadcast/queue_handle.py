"""What a queue is made of before it has ends: its handle and its ring's segment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from shm_broadcast import layout
from shm_broadcast.board import BoardHandle  # noqa: TC001  (msgspec reads a field's annotation)
from shm_broadcast.remote_wire import RemoteHandle  # noqa: TC001
from shm_broadcast.segment import Segment, SegmentHandle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shm_broadcast.board import Board

DEFAULT_CAPACITY: Final = 4 << 20
"""Bytes of a ring unless asked otherwise; also the most that ``max_chunk_bytes`` gets."""

SMALLEST_CAPACITY: Final = 64 << 10


class QueueHandle(msgspec.Struct, frozen=True):
    """Names a queue to its other members. Plain data, and no secret.

    Attributes:
        board: the board that the writer and the readers on its host wait on.
        ring: the segment that holds the records; ``None`` without readers on that host.
        writer: the board's member that writes.
        readers: the board's members that read, in reader order.
        reader_ranks: what the caller calls those readers; see `MessageQueue.create_from_handle`.
        remote: how readers on other hosts connect; ``None`` without such.
    """

    board: BoardHandle
    ring: SegmentHandle | None
    writer: int
    readers: tuple[int, ...]
    reader_ranks: tuple[int, ...]
    remote: RemoteHandle | None = None


def ring_capacity(max_chunk_bytes: int, max_chunks: int) -> int:
    """The bytes a ring takes where ``max_chunks`` chunks of ``max_chunk_bytes`` are asked for."""
    if max_chunk_bytes < 1 or max_chunks < 1:
        raise ValueError(f"a queue needs room; got {max_chunks} chunks of {max_chunk_bytes} bytes")
    return min(max_chunk_bytes * max_chunks, DEFAULT_CAPACITY)


def create_ring(board: Board, writer: int, readers: Sequence[int], capacity: int) -> Segment:
    """A ring between members of ``board``, with ``capacity`` rounded up to 64 KiB.

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
    return ring
