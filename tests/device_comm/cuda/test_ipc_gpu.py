"""`IpcBackend` on CUDA devices: processes that share one, and streams of one process."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.gpu_fit import fits
from benchmarks.gpu_pace import Pace
from device_comm import ReduceOp
from shm_broadcast import BoardHandle, GroupAbortedError, GroupTimeoutError, PeerLostError
from tests.device_comm.cuda.ipc_ranks import (
    cuda_comm,
    ipc_of,
    local_swaps,
    make_cuda,
    on_threads,
)
from tests.device_comm.suite import check_table, run_whole_table
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from device_comm import Communicator

pytestmark = pytest.mark.gpu

SIZES = [1, 1000, 40_001, 300_000, 3_000_000]
"""Numbers: in packets, in one shot, in two shots, and more than the staging holds."""

PLAY_SECONDS = 60.0
"""For all replays of a test, of which it does as many as fit."""

SOME = [torch.float32, torch.bfloat16, torch.int64]


def new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def table(rank: int, n: int, path: str, board: BoardHandle, index: int | None) -> dict[str, str]:
    dtypes = None if n == 2 else SOME
    with cuda_comm(rank, n, path, board, index=index) as comm:
        return run_whole_table(comm, dtypes)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_table_on_one_device(n: int, store_path: str) -> None:
    check_table(run_ranks(n, table, store_path, NEW_BOARD, 0, timeout=500))


def test_table_on_a_device_each(store_path: str) -> None:
    n = min(torch.cuda.device_count(), 8)
    if n < 2:
        pytest.skip("one CUDA device")
    check_table(run_ranks(n, table, store_path, NEW_BOARD, None, timeout=500))


class Captured:
    """A graph of two collectives of one size."""

    def __init__(self, comm: Communicator, numel: int, stream: torch.cuda.Stream) -> None:
        n, device = comm.world_size, comm.device
        self.comm = comm
        self.x = torch.zeros(numel, device=device)
        self.base = torch.arange(numel, device=device) % 97
        self.ranks = torch.arange(n, device=device).repeat_interleave(numel)
        torch.cuda.synchronize(device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream, capture_error_mode="thread_local"):
            self.sum = comm.all_reduce(self.x)
            self.all = comm.all_gather(self.x, dim=0)

    def give(self, turn: int) -> None:
        self.x.copy_(self.base + self.comm.rank + turn % 50)

    def check(self, turn: int) -> None:
        n = self.comm.world_size
        expected = n * (self.base + turn % 50) + n * (n - 1) // 2
        assert torch.equal(self.sum, expected.float()), (self.x.numel(), turn)
        gathered = self.base.repeat(n) + self.ranks + turn % 50
        assert torch.equal(self.all, gathered.float()), (self.x.numel(), turn)


def capture_and_replay(
    rank: int, n: int, path: str, board: BoardHandle, turns: int
) -> tuple[str, ...]:
    with cuda_comm(rank, n, path, board, index=0) as comm:
        stream = new_stream()
        eager = torch.full((3000,), float(rank), device=comm.device)
        with comm.graph_capture():
            graphs = [Captured(comm, numel, stream) for numel in SIZES[::2]]
        with comm.graph_capture():
            graphs += [Captured(comm, numel, stream) for numel in SIZES[1::2]]

        def play(numbers: range) -> None:
            for turn in numbers:
                for each in graphs:
                    each.give(turn)
                    each.graph.replay()
                if turn % 10 == 0:
                    total = comm.all_reduce(eager)
                    for each in graphs:
                        each.check(turn)
                    assert total[0] == n * (n - 1) // 2
            comm.flush()

        began = time.monotonic()
        play(range(20))
        fitting = fits(turns, 20, time.monotonic() - began, PLAY_SECONDS)
        play(range(20, int(comm.all_reduce(torch.tensor([fitting]).cuda(), op=ReduceOp.MIN))))
        return ipc_of(comm).reasons


@pytest.mark.parametrize("n", [2, 4, 8])
def test_replays_among_eager_calls(n: int, store_path: str) -> None:
    turns = 10_000 // (2 * len(SIZES))
    reasons = run_ranks(n, capture_and_replay, store_path, NEW_BOARD, turns, timeout=500)
    assert reasons == [()] * n


def test_expandable_segments_are_staged_and_said(store_path: str) -> None:
    reasons = run_ranks(
        2,
        capture_and_replay,
        store_path,
        NEW_BOARD,
        20,
        timeout=120,
        environment={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    )
    assert all("expandable segments" in " ".join(each) for each in reasons)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_replays_on_streams_of_one_process(n: int) -> None:
    """Ranks that truly run side by side: 10^5 captured collectives."""
    turns, per_graph = 4000, 25
    swaps, capturing = local_swaps(n, 200), threading.Lock()
    x = torch.zeros(n, 20_000, device="cuda:0")
    for warm in (x + 1, x.sum(0), torch.equal(x, x), x.fill_(0)):
        assert warm is not None
    torch.cuda.synchronize()

    def body(rank: int) -> None:
        comm = make_cuda(rank, n, swaps[rank], index=0, timeout=60.0)
        stream = new_stream()
        x[rank].fill_(rank + 1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with (
            comm.graph_capture(),
            capturing,
            torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"),
        ):
            out = [comm.all_reduce(x[rank]) for _ in range(per_graph)]
        pace = Pace(stream.synchronize, n)
        with torch.cuda.stream(stream):
            for _ in range(turns):
                pace.launching(per_graph)
                graph.replay()
            comm.flush(120)
        swaps[rank](b"done")
        for each in out:
            assert torch.equal(each, torch.full_like(each, n * (n + 1) / 2))
        comm.close()

    on_threads(n, body, 300)


def go_on(comm: Communicator, step: Callable[[], object]) -> None:
    """Until it raises; for 20 s at most."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        step()
        comm.flush()


def lose_a_rank(rank: int, n: int, path: str, board: BoardHandle, captured: bool) -> str:
    with cuda_comm(rank, n, path, board, index=0) as comm:
        x = torch.ones(300_000, device=comm.device)
        graph = torch.cuda.CUDAGraph()
        with comm.graph_capture(), torch.cuda.graph(graph):
            comm.all_reduce(x)
        if rank == n - 1:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
        step = graph.replay if captured else lambda: comm.all_reduce(x)
        with pytest.raises((PeerLostError, GroupAbortedError)) as caught:
            go_on(comm, step)
        torch.cuda.synchronize()
        return str(caught.value)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("n", [2, 4])
def test_a_rank_that_dies_in_mid_collective_is_named(
    n: int, captured: bool, store_path: str
) -> None:
    errors = run_ranks(
        n, lose_a_rank, store_path, NEW_BOARD, captured, may_die={n - 1}, timeout=120
    )
    assert all(f"rank {n - 1}" in error for error in errors[:-1])


def be_late(rank: int, n: int, path: str, board: BoardHandle) -> str:
    with cuda_comm(rank, n, path, board, index=0) as comm:
        x = torch.ones(300_000, device=comm.device)
        comm.barrier()
        if rank == 1:
            time.sleep(4)
            return ""
        with pytest.raises(GroupTimeoutError) as caught:
            comm.barrier(timeout=1.0)
        torch.cuda.synchronize()
        with pytest.raises(GroupAbortedError):
            comm.all_reduce(x)
        return str(caught.value)


def test_a_rank_that_comes_late_is_named(store_path: str) -> None:
    errors = run_ranks(2, be_late, store_path, NEW_BOARD, timeout=120)
    assert "waiting for rank 1" in errors[0]


def use_streams(rank: int, n: int, path: str, board: BoardHandle) -> None:
    with cuda_comm(rank, n, path, board, index=0) as comm:
        a, b = new_stream(), new_stream()
        for turn in range(50):
            x = torch.full((70_000,), float(rank + turn), device=comm.device)
            torch.cuda.synchronize()
            with torch.cuda.stream(a):
                once = comm.all_reduce(x)
            with torch.cuda.stream(b):
                twice = comm.all_reduce(once)
            thrice = comm.all_reduce(twice)
            assert thrice[-1] == n * n * (n * turn + n * (n - 1) / 2)
        graph = torch.cuda.CUDAGraph()
        with comm.graph_capture(), torch.cuda.graph(graph):
            comm.all_reduce(x)
            inner = new_stream()
            inner.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(inner), pytest.raises(ValueError, match="the capture's own"):
                comm.all_reduce(x)
            torch.cuda.current_stream().wait_stream(inner)


def test_results_on_alternating_streams(store_path: str) -> None:
    run_ranks(2, use_streams, store_path, NEW_BOARD, timeout=120)
