"""Programs for ranks on GPUs, over shared memory and devices that are none."""

from __future__ import annotations

import math
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from benchmarks import gpu_first, gpu_soak, gpu_world
from benchmarks.gpu_fit import GRACE, LONGEST, TimeLeft, fits
from benchmarks.gpu_model import CONFIG, TinyWorker, inputs, reference
from benchmarks.gpu_pace import AHEAD, Pace
from device_comm import LoopbackBackend
from device_comm.cuda.agree import all_gather_bytes_over
from device_comm.cuda.ipc.ipc_backend import IpcBackend
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


def test_as_many_calls_run_as_fit() -> None:
    assert [fits(wanted, 10, 1.0, 5.0) for wanted in (1000, 30)] == [50, 30]
    assert fits(1000, 10, 1.0, 0.1) == 10  # no less than there were
    assert fits(1000, 10, 1.0, math.inf) == fits(1000, 10, 0.0, 5.0) == 1000
    left = TimeLeft(1000.0)
    assert (left.part(2, 100.0), left.part(2, 600.0)) == (pytest.approx(400.0, abs=50), 0.0)
    assert TimeLeft(math.inf).part(3, 8.0) == math.inf
    assert TimeLeft(100.0).limit() == pytest.approx(100.0 + GRACE, abs=50)
    assert TimeLeft(math.inf).limit() == LONGEST


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kernels", [1, 25, 1000])
def test_ranks_of_a_context_run_ahead_no_further_than_fits(ranks: int, kernels: int) -> None:
    under_way = waits = 0

    def wait() -> None:
        nonlocal under_way, waits
        under_way, waits = 0, waits + 1

    pace = Pace(wait, ranks)
    for _ in range(10 * AHEAD):
        pace.launching(kernels)
        under_way += kernels
        assert under_way * ranks <= AHEAD or under_way == kernels
    assert kernels > 1 or waits <= 10 * ranks


@pytest.fixture
def kernel_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Ranks as threads, alone on devices that are none; how long their kernels wait."""
    waits: list[float] = []

    def create(*_: object, timeout: float, **__: object) -> LoopbackBackend:
        waits.append(timeout)
        return LoopbackBackend("cpu")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu_world, "_own_stream", lambda _: nullcontext(NoStream()))
    monkeypatch.setattr(gpu_world, "CupyDriver", lambda _: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(IpcBackend, "create", create)
    return waits


def wait_in_vain(rank: gpu_world.Rank, never: threading.Event) -> None:
    never.wait()


def test_ranks_that_hang_show_where(
    kernel_waits: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    never = threading.Event()
    with pytest.raises(RuntimeError, match="rank 1 ---\nnot done in time"):
        gpu_world.run_world("streams", 2, wait_in_vain, never, seconds=2.0)
    never.set()
    assert capfd.readouterr().err.count("in wait_in_vain") == 2
    assert kernel_waits == [gpu_world.KERNEL_WAIT] * 2


TOKENS = inputs(9)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_the_encoder_is_the_same_in_every_grid(tp: int, pp: int) -> None:
    with WorkerPool(TinyWorker, tp=tp, pp=pp) as pool:
        found = pool.call("embed", TOKENS, timeout=120)
    expected = reference(TOKENS)
    assert found.shape == (9, CONFIG.hidden_size)
    assert np.abs(found - expected).max() < 1e-6
    assert np.abs(expected - expected[0]).max() > 1e-2, "all inputs are embedded alike"


def test_a_grid_that_the_encoder_does_not_allow_is_refused() -> None:
    with pytest.raises(WorkerStartError, match="tp=5 does not divide the model's 12"):
        WorkerPool(TinyWorker, tp=5)
