"""The table over `TorchBackend` on gloo."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from device_comm import Communicator, TorchBackend
from shm_broadcast import Board, BoardHandle
from tests.device_comm.cases_move import move_cases
from tests.device_comm.cases_named import named_cases
from tests.device_comm.cases_reduce import reduce_cases
from tests.device_comm.suite import check_table, run_table
from tests.ranks import init_gloo, run_ranks


def table(rank: int, n: int, path: str, board: BoardHandle | None) -> dict[str, str]:
    group = init_gloo(rank, n, path)
    watch = None if board is None else Board.attach(board, rank)
    with Communicator(TorchBackend(group, "cpu", watch)) as comm:
        dtypes = None if board and n > 1 else [torch.float32, torch.bool]
        failures = run_table(comm, reduce_cases, dtypes)
        failures |= run_table(comm, move_cases, dtypes)
        return failures | run_table(comm, named_cases)


def subgroup_table(rank: int, n: int, path: str, board: BoardHandle) -> dict[str, str]:
    init_gloo(rank, n, path)
    watch = Board.attach(board, rank)
    grid = [[1, 3], [2, 0]]
    groups = [dist.new_group(ranks, sort_ranks=False) for ranks in grid]
    mine = next(index for index, ranks in enumerate(grid) if rank in ranks)
    comm = Communicator(
        TorchBackend(groups[mine], "cpu", watch, members=grid[mine], name=f"tp{mine}")
    )
    assert comm.rank == grid[mine].index(rank)
    failures = run_table(comm, reduce_cases, [torch.float32, torch.int64])
    return failures | run_table(comm, move_cases, [torch.int64]) | run_table(comm, named_cases)


@pytest.mark.parametrize("n", [1, 3, 4])
def test_table(n: int, store_path: str) -> None:
    with Board.create(n, None) as board:
        check_table(run_ranks(n, table, store_path, board.handle()))


def test_table_without_a_board(store_path: str) -> None:
    check_table(run_ranks(2, table, store_path, None))


def test_table_on_groups_that_do_not_start_at_rank_0(store_path: str) -> None:
    with Board.create(4, None) as board:
        check_table(run_ranks(4, subgroup_table, store_path, board.handle()))


def own_error(rank: int, n: int, path: str) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"cannot look at {x.dtype}")

    group = init_gloo(rank, n, path)
    with Communicator(TorchBackend(group)) as comm:
        with mock.patch("device_comm.torch_group.torch_backend.as_cargo", fail):
            for call in (comm.broadcast, comm.all_gather, comm.send, comm.isend):
                with pytest.raises(RuntimeError, match="cannot look at"):
                    call(torch.ones(3))
            with pytest.raises(RuntimeError, match="cannot look at"):
                comm.recv([3], torch.float32)
        assert comm.all_reduce(torch.ones(1)).item() == n


def test_an_error_of_our_own_is_no_broken_connection(store_path: str) -> None:
    run_ranks(2, own_error, store_path)
