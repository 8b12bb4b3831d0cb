"""Two processes that spin on one core part when another core is free."""

from __future__ import annotations

import os
import resource
import time
from typing import TYPE_CHECKING

from shm_broadcast import Board, BoardHandle, MessageQueue
from tests.ranks import NEW_BOARD, run_ranks
from tests.shm_broadcast.queues import CAPACITY, LIMIT
from tests.shm_broadcast.remote_peers import get, put

if TYPE_CHECKING:
    from pathlib import Path


def share_a_core(
    rank: int, n: int, folder: str, handle: BoardHandle, turns: int
) -> tuple[int, float]:
    """How often this process slept while two took turns on one core, and the seconds of that."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with Board.attach(handle, rank) as board:
        mine = MessageQueue.on_board(board, rank, [1 - rank], CAPACITY)
        put(folder, f"queue-{rank}", mine.export_handle())
        theirs = MessageQueue.attach(get(folder, f"queue-{1 - rank}"), board)
        mine.wait_until_ready(LIMIT)
        theirs.wait_until_ready(LIMIT)
        began, slept = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        for turn in range(turns):
            mine.enqueue(turn)
            assert theirs.readable(LIMIT)
            assert theirs.dequeue() == turn
        slept = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - slept
        seconds = time.monotonic() - began
        put(folder, f"done-{rank}", True)
        get(folder, f"done-{1 - rank}")
        theirs.shutdown()
        mine.shutdown()
    return slept, seconds


def test_processes_that_yield_one_core_to_each_other_sleep_now_and_then(tmp_path: Path) -> None:
    """Linux moves one that wakes to a free core; one that only yields it leaves where it is."""
    for slept, seconds in run_ranks(2, share_a_core, str(tmp_path), NEW_BOARD, 3000):
        assert 1 <= slept <= 2 + seconds / 0.002
