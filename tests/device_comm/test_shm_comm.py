"""The table over `ShmBackend`, with the C extension and without; who touches its memory first."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch

from device_comm.shm.layout import RANK_PRESENT, GroupLayout
from shm_broadcast.segment import Segment
from tests.device_comm.cases_move import move_cases
from tests.device_comm.cases_named import named_cases
from tests.device_comm.cases_reduce import reduce_cases
from tests.device_comm.shm_ranks import make_comm, shm_of
from tests.device_comm.suite import check_table, run_table
from tests.device_comm.whole_table import run_whole_table
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from shm_broadcast import BoardHandle

FAST = {"fast": [True] * 4, "slow": [False] * 4, "mixed": [True, False, True, False]}


def table(rank: int, n: int, path: str, board: BoardHandle, fast: list[bool]) -> dict[str, str]:
    with make_comm(rank, board, path, fast_path=fast[rank]) as comm:
        return run_whole_table(comm)


@pytest.mark.parametrize(
    ("n", "fast"),
    [(2, "fast"), (2, "slow"), (3, "mixed"), (4, "fast"), (4, "mixed")],
)
def test_table(n: int, fast: str, store_path: str) -> None:
    check_table(run_ranks(n, table, store_path, NEW_BOARD, FAST[fast]))


def subgroup_table(rank: int, n: int, path: str, board: BoardHandle) -> dict[str, str]:
    grid = [[1, 3], [2, 0]]
    index = next(index for index, ranks in enumerate(grid) if rank in ranks)
    with make_comm(rank, board, f"{path}{index}", members=grid[index]) as comm:
        assert comm.rank == grid[index].index(rank)
        failures = run_table(comm, reduce_cases, [torch.float32, torch.int64])
        failures |= run_table(comm, move_cases, [torch.int64])
        return failures | run_table(comm, named_cases)


def test_table_on_groups_that_do_not_start_at_rank_0(store_path: str) -> None:
    check_table(run_ranks(4, subgroup_table, store_path, NEW_BOARD))


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
