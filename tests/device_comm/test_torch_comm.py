"""The table over `TorchBackend` on gloo."""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from device_comm import Communicator, ReduceOp, TorchBackend
from shm_broadcast import Board, BoardHandle, GroupAbortedError
from tests.device_comm.cases_move import move_cases
from tests.device_comm.cases_named import named_cases
from tests.device_comm.cases_reduce import reduce_cases
from tests.device_comm.suite import check_table, run_table
from tests.device_comm.whole_table import run_whole_table
from tests.patience import until
from tests.ranks import NEW_BOARD, init_gloo, run_ranks


def table(rank: int, n: int, path: str, board: BoardHandle | None) -> dict[str, str]:
    group = init_gloo(rank, n, path)
    watch = None if board is None else Board.attach(board, rank)
    with Communicator(TorchBackend(group, "cpu", watch)) as comm:
        dtypes = None if board and n > 1 else [torch.float32, torch.bool]
        return run_whole_table(comm, dtypes)


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
    check_table(run_ranks(n, table, store_path, NEW_BOARD))


def test_table_without_a_board(store_path: str) -> None:
    check_table(run_ranks(2, table, store_path, None))


def test_table_on_groups_that_do_not_start_at_rank_0(store_path: str) -> None:
    check_table(run_ranks(4, subgroup_table, store_path, NEW_BOARD))


def series_with_empty_tensors(rank: int, n: int, path: str, board: BoardHandle) -> None:
    sent = [torch.empty(0), torch.full((2,), 1.0), torch.empty(0), torch.full((2,), 2.0)]
    with Communicator(
        TorchBackend(init_gloo(rank, n, path), "cpu", Board.attach(board, rank))
    ) as comm:
        for asynchronous in (True, False):
            if rank == 0:
                for x in sent:
                    comm.send(x, dst=1)
                continue
            received = [torch.zeros_like(x) for x in sent]
            parts = iter([received[:2], received[2:3], received[3:], []])
            if asynchronous:
                comm.irecv_series(partial(next, parts), 0).wait(30)
            else:
                for x in received:
                    comm.recv(out=x, src=0, timeout=30)
            assert [x.tolist() for x in received] == [x.tolist() for x in sent]
        comm.barrier()


def test_a_series_may_have_tensors_without_elements(store_path: str) -> None:
    run_ranks(2, series_with_empty_tensors, store_path, NEW_BOARD)


CANNOT_BEGIN = {
    "all_reduce": ("transport_reduction", MemoryError("no room for it")),
    "broadcast": ("as_transport_dtype", RuntimeError("no room for it")),
    "all_gather": ("as_transport_dtype", RuntimeError("no room for it")),
    "send": ("as_transport_dtype", RuntimeError("no room for it")),
    "isend": ("as_transport_dtype", MemoryError("no room for it")),
    "irecv": ("as_transport_dtype", RuntimeError("no room for it")),
}
"""Verbs, and what fails in them before torch is called: no error of a connection."""


def fails_to_begin(rank: int, n: int, path: str, boards: list[BoardHandle]) -> None:
    """Rank 1 cannot begin a verb; what it does next is no answer to what rank 0 has begun."""
    init_gloo(rank, n, path)
    x = torch.ones(4, dtype=torch.bfloat16)
    for board, (verb, (place, error)) in zip(boards, CANNOT_BEGIN.items(), strict=True):
        group = dist.new_group([0, 1])
        with Communicator(TorchBackend(group, "cpu", Board.attach(board, rank))) as comm:
            comm.barrier()
            out_of_it = Path(f"{path}-{verb}")
            if rank == 1:
                until(out_of_it.exists)  # what ends the group may overtake what else was sent
                call: Any = getattr(comm, verb)
                how = {"out": x} if verb == "irecv" else {"x": x}
                with (
                    mock.patch(f"device_comm.torch_backend.{place}", Mock(side_effect=error)),
                    pytest.raises(type(error), match="no room for it"),
                ):
                    call(**how)
            else:
                out_of_it.touch()
                told = f"rank 1 reported: {type(error).__name__}: no room"
                with pytest.raises(GroupAbortedError, match=told):
                    comm.all_reduce(x)
            with pytest.raises(GroupAbortedError, match="no room"):
                comm.all_reduce(x)


def test_a_rank_that_cannot_begin_ends_the_group(store_path: str) -> None:
    with ExitStack() as closing:
        boards = [closing.enter_context(Board.create(2, None)) for _ in CANNOT_BEGIN]
        run_ranks(2, fails_to_begin, store_path, [board.handle() for board in boards])


def nan_in_different_places(rank: int, n: int, path: str) -> None:
    nan = math.nan
    with Communicator(TorchBackend(init_gloo(rank, n, path))) as comm:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            x = torch.tensor([[nan, 1, 2, 4], [1, nan, 3, 4], [1, 1, nan, 5]][rank], dtype=dtype)
            largest = comm.all_reduce(x, op=ReduceOp.MAX)
            assert largest.isnan().tolist() == [True, True, True, False]
            assert largest[3] == 5
            least = comm.reduce(x, op=ReduceOp.MIN, dst=0)
            if least is not None:
                assert least.isnan().tolist() == [True, True, True, False]
                assert least[3] == 4


def test_what_is_not_a_number_stays_none_whichever_rank_has_it(store_path: str) -> None:
    run_ranks(3, nan_in_different_places, store_path)
