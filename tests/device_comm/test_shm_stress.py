"""Random operations of several groups over `ShmBackend`, against results computed locally."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from shm_broadcast import Board, BoardHandle
from shm_broadcast.executor import ProgressEngine
from tests.device_comm.shm_ranks import make_comm
from tests.device_comm.soak import draw, run
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from device_comm import Communicator

GROUPS = {2: [[0, 1], [1, 0]], 4: [[0, 1, 2, 3], [0, 2], [3, 1], [2, 0, 3]]}


def make_groups(
    stack: ExitStack,
    rank: int,
    n: int,
    watch: Board,
    path: str,
    progress: ProgressEngine,
) -> tuple[list[Communicator | None], list[int]]:
    """This rank's end of each group of `GROUPS`, None where it is no member; and their sizes."""
    comms = [
        stack.enter_context(
            make_comm(
                rank,
                watch,
                f"{path}{index}",
                members=members,
                name=f"group {index}",
                timeout=60,
                progress=progress,
            )
        )
        if rank in members
        else None
        for index, members in enumerate(GROUPS[n])
    ]
    return comms, [len(members) for members in GROUPS[n]]


def soak(rank: int, n: int, path: str, board: BoardHandle, count: int, seed: int) -> int:
    with ExitStack() as stack:
        watch = stack.enter_context(Board.attach(board, rank))
        progress = ProgressEngine(watch)
        stack.callback(progress.close)
        comms, sizes = make_groups(stack, rank, n, watch, path, progress)
        done = run(draw(seed, count, sizes), comms)
        comms[0].barrier()  # nobody closes what somebody still reads
        return done


@pytest.mark.stress
@pytest.mark.parametrize(("n", "count"), [(2, 10_000), (4, 10_000)])
def test_random_operations(n: int, count: int, store_path: str) -> None:
    done = run_ranks(n, soak, store_path, NEW_BOARD, count, 7, timeout=200)
    assert done[0] > count / 3
