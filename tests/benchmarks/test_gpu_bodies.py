"""What ranks on a GPU do and count, over shared memory and with graphs that are no graphs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks import gpu_first, gpu_soak
from benchmarks.gpu_fit import GRACE, LONGEST, TimeLeft, fits
from benchmarks.gpu_pace import AHEAD
from device_comm.cuda.agree import all_gather_bytes_over
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


def test_a_soak_counts_what_it_did_and_finds_nothing_wrong(store_path: str) -> None:
    for found in run_ranks(2, soak, store_path, NEW_BOARD, 150, math.inf):
        assert (found["replays"], found["eager"], found["wrong"]) == (150, 150, 0)


def test_a_soak_does_as_much_as_fits_on_all_ranks_alike(store_path: str) -> None:
    one, other = run_ranks(2, soak, store_path, NEW_BOARD, 10**9, 1.0, timeout=120)
    assert (one["replays"], one["eager"]) == (other["replays"], other["eager"])
    assert 100 <= one["replays"] < 10**9
    assert one["wrong"] == other["wrong"] == 0


class Alone:
    """One of two ranks, on a device that does nothing until it is waited for."""

    n = 2

    def __init__(self) -> None:
        self.stream = self
        self.under_way = 0

    def launch(self, _: int) -> None:
        self.under_way += gpu_soak.STEP_KERNELS
        assert self.under_way <= AHEAD // self.n

    def synchronize(self) -> None:
        self.under_way = 0

    def meet(self) -> None: ...

    def least(self, value: int) -> int:
        return value


def test_a_soak_never_launches_more_than_the_queue_holds() -> None:
    rank = Alone()
    assert gpu_soak.many(rank, rank.launch, 300, math.inf) == 300
    assert rank.under_way


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


def first(rank: int, n: int, path: str, board: BoardHandle) -> list[str]:
    with make_comm(rank, Board.attach(board, rank), path) as comm:
        return list(gpu_first.smallest(HostRank(comm)))


@pytest.mark.parametrize("n", [2, 3])
def test_the_first_look_is_at_all_small_collectives(n: int, store_path: str) -> None:
    (looks, *_) = run_ranks(n, first, store_path, NEW_BOARD)
    assert {look.partition(" ")[0] for look in looks} == {
        *("all_reduce", "all_gather", "reduce_scatter", "broadcast", "barrier", "20")
    }


def test_the_first_look_sees_one_wrong_number() -> None:
    class AnyRank:
        rank = 1

    right, wrong = torch.tensor([1.0, 1, 2, 2]), torch.tensor([1.0, 1, 2, 1])
    gpu_first.check(AnyRank(), "it", right, [1.0, 2.0])
    with pytest.raises(RuntimeError, match="it on rank 1 gives"):
        gpu_first.check(AnyRank(), "it", wrong, [1.0, 2.0])
    with pytest.raises(RuntimeError, match=r"not 1\.0"):
        gpu_first.check(AnyRank(), "it", right, 1.0)


@pytest.mark.parametrize(
    ("wanted", "tried", "took", "seconds", "expected"),
    [
        (1000, 10, 1.0, 5.0, 50),
        (30, 10, 1.0, 5.0, 30),
        (1000, 10, 1.0, 0.1, 10),  # no less than there were
        (1000, 10, 1.0, math.inf, 1000),
        (1000, 10, 0.0, 5.0, 1000),
    ],
)
def test_as_many_as_fit(
    wanted: int, tried: int, took: float, seconds: float, expected: int
) -> None:
    assert fits(wanted, tried, took, seconds) == expected


def test_seconds_are_shared_out() -> None:
    left = TimeLeft(1000.0)
    assert left.part(2, 100.0) == pytest.approx(400.0, abs=50)
    assert left.part(1) == pytest.approx(1000.0, abs=50)
    assert left.part(2, 600.0) == 0.0
    assert TimeLeft(math.inf).part(3, 8.0) == math.inf


def test_what_hangs_is_stopped_soon_after_the_end() -> None:
    assert TimeLeft(100.0).limit() == pytest.approx(100.0 + GRACE, abs=50)
    assert TimeLeft(math.inf).limit() == LONGEST
