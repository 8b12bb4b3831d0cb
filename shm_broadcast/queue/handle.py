"""A queue's handle, which names it to its members, and the shared memory of its ring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from shm_broadcast import layout
from shm_broadcast.arguments import integer
from shm_broadcast.net.protocol import RemoteHandle
from shm_broadcast.segment import Segment, SegmentHandle
from shm_broadcast.state.board import (
    Board,
    BoardHandle,
)

DEFAULT_CAPACITY: Final = 4 << 20
"""Default bytes of a ring; also the limit of ``max_chunk_bytes`` times ``max_chunks``."""

SMALLEST_CAPACITY: Final = 64 << 10


class QueueHandle(msgspec.Struct, frozen=True):
    """Names a queue to its other members. Plain data without a secret.

    Attributes:
        board: the board of the writer and the readers on its host.
        ring: the ring's segment; ``None`` if there are no readers on the writer's host.
        writer: the writer's member number on the board.
        readers: the readers' member numbers on the board, in reader order.
        reader_ranks: the ranks of these readers; see `MessageQueue.create_from_handle`.
        remote: how readers on other hosts connect; ``None`` if there are none.
        sole_reader: whether there is one reader, which joins as 0 whatever its rank.
    """

    board: BoardHandle
    ring: SegmentHandle | None
    writer: int
    readers: tuple[int, ...]
    reader_ranks: tuple[int, ...]
    remote: RemoteHandle | None = None
    sole_reader: bool = False

    def rank_of(self, reader: int) -> int:
        """Return the rank of the process that joins as ``reader``."""
        ranks = (*self.reader_ranks, *(self.remote.readers if self.remote else ()))
        return ranks[0] if self.sole_reader and ranks and reader == 0 else reader


def ring_capacity(max_chunk_bytes: int, max_chunks: int) -> int:
    """Return the bytes of a ring from vLLM's arguments, at most `DEFAULT_CAPACITY`.

    Raises TypeError or ValueError if an argument is no whole number of 1 or more.
    """
    wanted = integer("max_chunk_bytes", max_chunk_bytes) * integer("max_chunks", max_chunks)
    return min(wanted, DEFAULT_CAPACITY)


def create_ring(board: Board, writer: int, readers: Sequence[int], capacity: int) -> Segment:
    """Return the segment of a ring of ``capacity`` bytes, a multiple of 64 KiB.

    ``capacity`` is rounded up; ``writer`` and ``readers`` are member numbers of ``board``. Raises
    ValueError if they are not distinct members, and SharedMemoryError if too little memory is free.
    """
    members = [writer, *readers]
    if not readers or len(set(members)) != len(members):
        raise ValueError(f"a queue needs one writer and other readers; got {writer}, {readers}")
    for member in members:
        board.slot_offset(member)
    capacity = layout.align(max(capacity, 1), SMALLEST_CAPACITY)
    ring = Segment.create(layout.ring_size(len(readers), capacity), layout.RING_LABEL)
    ring.words.store64(layout.RING_CAPACITY, capacity)
    ring.words.write(layout.RING_BOARD, board.handle().segment.nonce)
    ring.words.store32(layout.RING_WRITER, writer)
    for reader, member in enumerate(readers):
        ring.words.store32(layout.reader_line(reader) + layout.READER_MEMBER, member)
    ring.words.store32(layout.RING_READER_COUNT, len(readers))
    return ring
