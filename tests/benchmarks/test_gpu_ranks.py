"""Programs for ranks on GPUs, over shared memory and devices that are none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from benchmarks import gpu_first, gpu_soak
from benchmarks.gpu_model import CONFIG, TinyWorker, inputs, reference
from device_comm.cuda.agree import all_gather_bytes_over
from server.errors import WorkerStartError
from server.pool import WorkerPool
from shm_broadcast import Board, BoardHandle
from tests.device_comm.shm_ranks import make_comm
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from device_comm import Communicator


class NoStream:
    def synchronize(self) -> None: ...


@dataclass
class NoGraph:
    replay: Callable[[], object]


class HostRank:
    """As `benchmarks.gpu_world.Rank`."""

    stream = NoStream()

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank, self.n = comm.rank, comm.world_size
        self.swap = all_gather_bytes_over(comm)

    def capture(self, call: Callable[[], object]) -> NoGraph:
        call()
        return NoGraph(call)

    def least(self, value: int) -> int:
        return min(int(row) for row in self.swap(str(value).encode()))

    def meet(self) -> None:
        self.swap(b"")


def soak(
    rank: int, n: int, path: str, board: BoardHandle, wanted: int, seconds: float
) -> dict[str, float]:
    with make_comm(rank, Board.attach(board, rank), path) as comm:
        return gpu_soak.soak(HostRank(comm), wanted, wanted, False, seconds)


def test_a_soak_counts_its_calls_and_stops_in_time_on_all_ranks(store_path: str) -> None:
    for found in run_ranks(2, soak, store_path, NEW_BOARD, 150, math.inf):
        assert (found["replays"], found["eager"], found["wrong"]) == (150, 150, 0)
    one, other = run_ranks(2, soak, f"{store_path}-2", NEW_BOARD, 10**9, 1.0, timeout=120)
    assert (one["replays"], one["eager"]) == (other["replays"], other["eager"])
    assert 100 <= one["replays"] < 10**9
    assert one["wrong"] == other["wrong"] == 0


class WrongNow:
    """A group of one that is wrong about one number, in its second call."""

    world_size, rank, device = 1, 0, "cpu"
    calls = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        total = x.clone()
        total[3] += self.calls == 2
        return total


def test_a_soak_finds_one_wrong_number() -> None:
    check = gpu_soak.Checked(WrongNow(), 7, torch.float32)
    wrong = []
    for _ in range(3):
        check.step()
        wrong.append(int(check.wrong))
    assert wrong == [0, 1, 1]


def test_the_first_look_finds_one_wrong_number() -> None:
    right, wrong = torch.tensor([1.0, 1, 2, 2]), torch.tensor([1.0, 1, 2, 1])
    gpu_first.check(SimpleNamespace(rank=1), "it", right, [1.0, 2.0])
    with pytest.raises(RuntimeError, match="it on rank 1 gives"):
        gpu_first.check(SimpleNamespace(rank=1), "it", wrong, [1.0, 2.0])


def first(rank: int, n: int, path: str, board: BoardHandle) -> list[str]:
    with make_comm(rank, Board.attach(board, rank), path) as comm:
        return list(gpu_first.smallest(HostRank(comm)))


def test_the_first_look_is_at_all_small_collectives(store_path: str) -> None:
    (looks, *_) = run_ranks(3, first, store_path, NEW_BOARD)
    assert {look.partition(" ")[0] for look in looks} == {
        *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "20")
    }


TOKENS = inputs(9)


def test_the_encoder_is_the_same_in_a_grid() -> None:
    with WorkerPool(TinyWorker, tp=2, pp=2) as pool:
        found = pool.call("embed", TOKENS, timeout=120)
    expected = reference(TOKENS)
    assert found.shape == (9, CONFIG.hidden_size)
    assert np.abs(found - expected).max() < 1e-6
    assert np.abs(expected - expected[0]).max() > 1e-2, "all inputs are embedded alike"


def test_a_grid_that_the_encoder_does_not_allow_is_refused() -> None:
    with pytest.raises(WorkerStartError, match="tp=5 does not divide the model's 12"):
        WorkerPool(TinyWorker, tp=5)
