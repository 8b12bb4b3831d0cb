"""Real processes around one board and its queues: what the tests of faults share."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shm_broadcast import Board, MessageQueue
from shm_broadcast.queue.handle import SMALLEST_CAPACITY
from shm_broadcast.state.status import PublishedStatus, read_status
from tests.shm_broadcast.remote_peers import get, put

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 30.0
"""Seconds that anything in these tests may take at most."""


def status_of(board: Board, member: int) -> PublishedStatus:
    """What ``member`` of ``board`` publishes for inspection."""
    memory = board.memory
    return read_status(lambda at, size: bytes(memory[at : at + size]), member, board.n_members)


@contextmanager
def joined(
    rank: int, n: int, folder: str, writer: int = 0, **options: Any
) -> Iterator[tuple[Board, MessageQueue]]:
    """Rank ``rank`` of ``n`` on a board, with its end of a queue from ``writer`` to the others."""
    readers = [member for member in range(n) if member != writer]
    put(folder, f"pid {rank}", os.getpid())
    if rank == 0:
        board = Board.create(n, member=0, name="test")
        queue = MessageQueue.on_board(board, writer, readers, SMALLEST_CAPACITY, **options)
        put(folder, "handles", (board.handle(), queue.export_handle()))
    else:
        board_handle, queue_handle = get(folder, "handles")
        board = Board.attach(board_handle, rank)
        queue = MessageQueue.attach(queue_handle, board, **options)
    put(folder, f"joined {rank}", True)
    for member in range(n):
        get(folder, f"joined {member}")
    try:
        yield board, queue
    finally:
        queue.shutdown()
        board.close()


def kill(folder: str, rank: int) -> float:
    """Kill a rank; the moment of it."""
    os.kill(get(folder, f"pid {rank}"), signal.SIGKILL)
    return time.monotonic()
