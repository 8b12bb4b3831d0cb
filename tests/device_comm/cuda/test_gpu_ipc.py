"""`IpcComm` on real devices, which ranks share where there are more of them."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from shm_broadcast import Board, BoardHandle, GroupAbortedError, PeerLostError
from tests.device_comm.cases_move import move_cases
from tests.device_comm.cases_named import named_cases
from tests.device_comm.cases_reduce import reduce_cases
from tests.device_comm.suite import check_table, run_table
from tests.gpus import make_gpu_comm
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu

HALVES = [torch.float32, torch.float16, torch.bfloat16]


def table(rank: int, n: int, board: BoardHandle, path: str) -> dict[str, str]:
    with make_gpu_comm(rank, n, board, path) as comm:
        failures = run_table(comm, reduce_cases, None if n == 2 else HALVES)
        failures |= run_table(comm, move_cases, None if n == 2 else HALVES)
        return failures | run_table(comm, named_cases)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_table(n: int, store_path: str) -> None:
    with Board.create(n, None) as board:
        check_table(run_ranks(n, table, board.handle(), store_path, timeout=240))


def captured(rank: int, n: int, board: BoardHandle, path: str, expandable: bool) -> list[str]:
    if expandable:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    with make_gpu_comm(rank, n, board, path) as comm:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            sizes = (1, 7, 1_000, 16_384, 40_001, 3_000_000)
            inputs = [torch.zeros(size, device=comm.device) for size in sizes]
            graphs, results = [], []
            for x in inputs:
                graph = torch.cuda.CUDAGraph()
                with comm.graph_capture(), torch.cuda.graph(graph, stream=stream):
                    whole = comm.all_reduce(x)
                    gathered = comm.all_gather(x)
                graphs.append(graph)
                results.append((whole, gathered))
            for turn in range(60):
                at = turn * 5 % len(sizes)
                inputs[at].fill_(turn + rank)
                graphs[at].replay()
                whole, gathered = results[at]
                assert bool((whole == n * turn + n * (n - 1) / 2).all()), (turn, sizes[at])
                rows = gathered.view(n, -1)
                assert [float(row.unique()) for row in rows] == [float(turn + r) for r in range(n)]
                eager = comm.all_reduce(inputs[at] + 1)  # between replays, on the same stream
                assert bool((eager == whole + n).all())
            stream.synchronize()
            graphs.clear()
        return list(comm.reasons)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("n", [2, 4])
def test_captures(n: int, expandable: bool, store_path: str) -> None:
    """Many graphs of many sizes, replays with eager calls between them."""
    with Board.create(n, None) as board:
        reasons = run_ranks(n, captured, board.handle(), store_path, expandable, timeout=180)
    if expandable:
        assert all("expandable segments" in " ".join(told) for told in reasons), reasons
    else:
        assert reasons == [[]] * n


def killed(rank: int, n: int, board: BoardHandle, path: str) -> str:
    with make_gpu_comm(rank, n, board, path) as comm:
        x = torch.ones(1_000, device=comm.device)
        comm.all_reduce(x)
        comm.barrier()
        if rank == n - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        comm.all_reduce(x)
        torch.cuda.synchronize()
        assert time.monotonic() - began < 10
        with pytest.raises((PeerLostError, GroupAbortedError)) as info:
            comm.barrier()
    assert float(torch.ones(5, device=x.device).sum()) == 5  # the device is usable
    return str(info.value)


def test_a_rank_killed_in_mid_collective(store_path: str) -> None:
    with Board.create(3, None) as board:
        texts = run_ranks(3, killed, board.handle(), store_path, timeout=120, may_die=[2])
    assert all("rank 2" in text for text in texts[:2]), texts
