"""The table over `ShmBackend`, with the C extension and without."""

from __future__ import annotations

import pytest
import torch

from shm_broadcast import Board, BoardHandle
from tests.device_comm.cases_move import move_cases
from tests.device_comm.cases_named import named_cases
from tests.device_comm.cases_reduce import reduce_cases
from tests.device_comm.shm_ranks import make_comm, shm_of
from tests.device_comm.suite import check_table, run_table
from tests.ranks import run_ranks

NATIVE = {"native": [True] * 4, "python": [False] * 4, "mixed": [True, False, True, False]}


def table(rank: int, n: int, path: str, board: BoardHandle, native: list[bool]) -> dict[str, str]:
    with make_comm(rank, board, path, use_native=native[rank]) as comm:
        assert shm_of(comm).uses_native is (native[rank] and n > 1)
        assert ("not used: the C extension" in str(comm.explain())) is not native[rank]
        failures = run_table(comm, reduce_cases)
        failures |= run_table(comm, move_cases)
        return failures | run_table(comm, named_cases)


@pytest.mark.parametrize(
    ("n", "native"),
    [(1, "native"), (2, "native"), (2, "python"), (3, "mixed"), (4, "native"), (4, "mixed")],
)
def test_table(n: int, native: str, store_path: str) -> None:
    with Board.create(n, None) as board:
        check_table(run_ranks(n, table, store_path, board.handle(), NATIVE[native]))


def subgroup_table(rank: int, n: int, path: str, board: BoardHandle) -> dict[str, str]:
    grid = [[1, 3], [2, 0]]
    index = next(index for index, ranks in enumerate(grid) if rank in ranks)
    with make_comm(rank, board, f"{path}{index}", members=grid[index]) as comm:
        assert comm.rank == grid[index].index(rank)
        failures = run_table(comm, reduce_cases, [torch.float32, torch.int64])
        failures |= run_table(comm, move_cases, [torch.int64])
        return failures | run_table(comm, named_cases)


def test_table_on_groups_that_do_not_start_at_rank_0(store_path: str) -> None:
    with Board.create(4, None) as board:
        check_table(run_ranks(4, subgroup_table, store_path, board.handle()))
