"""The table over shared memory, on the fast path and the slow one; random operations."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from device_comm.shm.layout import RANK_PRESENT, GroupLayout
from shm_broadcast import Board, BoardHandle
from shm_broadcast.executor import ProgressEngine
from shm_broadcast.segment import Segment
from tests.device_comm.shm_ranks import make_comm, shm_of
from tests.device_comm.soak import draw, run
from tests.device_comm.suite import check_table, run_whole_table
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from device_comm import Communicator


FAST = {"fast": [True] * 4, "slow": [False] * 2, "mixed": [True, False, True]}


def table(rank: int, n: int, path: str, board: BoardHandle, fast: list[bool]) -> dict[str, str]:
    with make_comm(rank, board, path, fast_path=fast[rank]) as comm:
        return run_whole_table(comm)


@pytest.mark.parametrize(("n", "fast"), [(2, "fast"), (2, "slow"), (3, "mixed"), (4, "fast")])
def test_table(n: int, fast: str, store_path: str) -> None:
    check_table(run_ranks(n, table, store_path, NEW_BOARD, FAST[fast]))


def touches(rank: int, n: int, path: str, board: BoardHandle) -> list[tuple[str, Any]]:
    """What this rank touches of the group's memory until the group is made, in order."""
    group, events = GroupLayout.for_ranks(n), []
    settle, touch = Segment.first_touch, Segment.prefault

    def settle_noted(segment: Segment, begin: int, end: int) -> None:
        events.append(("settles", (begin, end)))
        settle(segment, begin, end)

    def touch_noted(segment: Segment) -> None:
        if len(segment._map) == group.size:
            lines = map(group.rank_line, range(n)) if events else ()
            events.append(("maps", [segment.words.load32(at + RANK_PRESENT) for at in lines]))
        touch(segment)

    with (
        patch.object(Segment, "first_touch", settle_noted),
        patch.object(Segment, "prefault", touch_noted),
        make_comm(rank, board, path) as comm,
    ):
        made = [*events]
        comm.barrier()
        reserved = os.fstat(shm_of(comm)._segment.handle().fd).st_blocks * 512
        assert reserved == group.size
        return made


def test_every_rank_touches_its_slots_first(store_path: str) -> None:
    """Their memory is of the node (NUMA) where it runs. Nobody maps them before all have."""
    found = run_ranks(3, touches, store_path, NEW_BOARD)
    group = GroupLayout.for_ranks(3)
    for rank, events in enumerate(found):
        settled = [("settles", slot) for slot in group.written_by(rank)]
        made: list[tuple[str, Any]] = [("maps", [])] if rank == 0 else []
        assert events == [*made, *settled, ("maps", [1, 1, 1])]


# --- Random operations of several groups ---------------------------------------------------------

GROUPS = {2: [[0, 1], [1, 0]], 4: [[0, 1, 2, 3], [0, 2], [3, 1], [2, 0, 3]]}


def make_groups(
    stack: ExitStack, rank: int, n: int, watch: Board, path: str, progress: ProgressEngine
) -> tuple[list[Communicator | None], list[int]]:
    """This rank's end of each group of `GROUPS`, None where it is no member; and their sizes."""
    comms: list[Communicator | None] = []
    for index, members in enumerate(GROUPS[n]):
        options = {"members": members, "name": f"group {index}", "timeout": 60}
        made = rank in members and make_comm(
            rank, watch, f"{path}{index}", progress=progress, **options
        )
        comms.append(stack.enter_context(made) if made else None)
    return comms, [len(members) for members in GROUPS[n]]


def soak(rank: int, n: int, path: str, board: BoardHandle, count: int, seed: int) -> int:
    with ExitStack() as stack:
        watch = stack.enter_context(Board.attach(board, rank))
        progress = ProgressEngine(watch)
        stack.callback(progress.close)
        comms, sizes = make_groups(stack, rank, n, watch, path, progress)
        done = run(draw(seed, count, sizes), comms)
        comms[0].barrier()  # no rank closes what others still read
        return done


@pytest.mark.stress
@pytest.mark.parametrize(("n", "count"), [(2, 1_000), (4, 1_500)])
def test_random_operations(n: int, count: int, store_path: str) -> None:
    done = run_ranks(n, soak, store_path, NEW_BOARD, count, 7, timeout=200)
    assert done[0] > count / 3
