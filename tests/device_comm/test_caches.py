"""Whether ranks share a cache, by made-up machines; writing what they read, both ways."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import ShmBackend
from shm_broadcast import Board
from shm_broadcast.cpu import listed, share_a_cache
from tests.device_comm.shm_ranks import make_comm
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shm_broadcast import BoardHandle


def machine(folder: Path, online: str, shared: list[str]) -> Path:
    """Cores ``online``; those of each of ``shared`` have one third-level cache."""
    (folder / "online").write_text(online + "\n")
    for group in shared:
        for core in listed(group):
            for index, (level, cores) in enumerate(
                [("1", str(core)), ("1", str(core)), ("2", str(core)), ("3", group)]
            ):
                cache = folder / f"cpu{core}/cache/index{index}"
                cache.mkdir(parents=True)
                (cache / "level").write_text(level + "\n")
                (cache / "shared_cpu_list").write_text(cores + "\n")
    return folder


@pytest.mark.parametrize(
    ("online", "shared", "usable", "expected"),
    [
        pytest.param("0-1", ["0-1"], {0, 1}, True, id="two cores under one cache"),
        pytest.param("0-7", ["0-3", "4-7"], set(range(8)), False, id="two caches"),
        pytest.param("0-7", ["0-3", "4-7"], {4, 5, 6, 7}, True, id="confined to one of them"),
        pytest.param("0-7", ["0-3", "4-7"], {3, 4}, False, id="confined to a core of each"),
        pytest.param("0-7", ["0-3", "4-7"], {5}, False, id="tied to a core of many"),
        pytest.param("0-7", ["0-7"], {5}, True, id="tied to a core, one cache"),
        pytest.param("0-7", ["0,2,4,6", "1,3,5,7"], {0, 2}, True, id="every second core"),
    ],
)
def test_cores_share_a_cache(
    tmp_path: Path, online: str, shared: list[str], usable: set[int], expected: bool
) -> None:
    assert share_a_cache(usable, machine(tmp_path, online, shared)) is expected


def test_where_nothing_is_known_they_do_not(tmp_path: Path) -> None:
    assert share_a_cache({0, 1}, tmp_path) is False
    (tmp_path / "cpu0/cache").mkdir(parents=True)
    assert share_a_cache({0, 1}, tmp_path) is False


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_bound_rank_counts_the_cores_of_the_others() -> None:
    """Its own may share a cache that is not theirs."""
    code = (
        "import os\n"
        "from shm_broadcast import extension\n"
        "from shm_broadcast import cpu\n"
        "given = os.sched_getaffinity(0)\n"
        "cpu.bind_process({min(given)})\n"
        "assert os.sched_getaffinity(0) == {min(given)}\n"
        "counted = []\n"
        "extension.share_a_cache = lambda usable: counted.append(usable)\n"
        "extension.require_extension('device_comm')\n"
        "assert counted == [given, given], counted\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lists_of_cores() -> None:
    assert listed("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert listed("7") == {7}


PLAIN, PAST, NEITHER = range(3)
MICROSECONDS = {
    "near": {128 << 10: (8, 19), 1 << 20: (58, 125), 16 << 20: (1_900, 2_700)},
    "apart": {128 << 10: (61, 15), 1 << 20: (470, 100), 16 << 20: (7_900, 2_200)},
}
"""All-reduces of two ranks that wrote plainly, and past the caches; measured."""
PIECE = 128 << 10


def sample(state: str, size: int, way: int) -> int:
    """Ticks of a nanosecond for a MiB, of writing or of reading, which take the same."""
    return MICROSECONDS[state][size][way] * 500 * (1 << 20) // size


def seconds(size: int, states: Sequence[str], *, begins_past: bool) -> tuple[float, float]:
    """What pieces take, one in each of ``states``, and what they take the better way."""
    native = import_module("device_comm._native")
    ways = [native.tried_way(number, PIECE) for number in range(len(states))]
    trials = [
        (way, sample(state, size, way), sample(state, size, way))
        for way, state in zip(ways, states, strict=True)
        if way != NEITHER
    ]
    choices = iter(native.weigh_ways(begins_past, trials))
    past, taken, best = begins_past, 0, 0
    for way, state in zip(ways, states, strict=True):
        taken += sample(state, size, past if way == NEITHER else way)
        best += min(sample(state, size, each) for each in (PLAIN, PAST))
        past = past if way == NEITHER else next(choices)
    return taken, best


@pytest.mark.parametrize("size", [128 << 10, 1 << 20, 16 << 20])
@pytest.mark.parametrize("state", ["near", "apart"])
def test_the_better_way_is_taken_and_trials_cost_two_percent(state: str, size: int) -> None:
    taken, best = seconds(size, [state] * 200_000, begins_past=state == "apart")
    assert best <= taken <= 1.02 * best


@pytest.mark.parametrize("size", [128 << 10, 1 << 20, 16 << 20])
@pytest.mark.parametrize("first", [["near", "apart"], ["apart", "near"]])
def test_where_cores_move_the_better_way_follows(first: list[str], size: int) -> None:
    states = [state for state in first * 3 for _ in range(40_000)]
    taken, best = seconds(size, states, begins_past=first[0] == "near")
    assert taken <= 1.15 * best


def test_a_trial_without_the_core_changes_nothing() -> None:
    native = import_module("device_comm._native")
    fast, slow, late = (PLAIN, 100, 100), (PAST, 200, 200), (PLAIN, 90_000, 100)
    trials = [fast, slow, late, slow, fast, slow, fast, slow, late, slow]
    assert native.weigh_ways(False, trials) == [False] * len(trials)


def test_ways_that_take_the_same_are_not_changed() -> None:
    """Past the caches counts 7/5: 50 + 50, and 48 + 50, beside 70 + 70 and 66 + 70."""
    native = import_module("device_comm._native")
    samples = [(PLAIN, 70, 70), (PAST, 50, 50), (PLAIN, 66, 70), (PAST, 48, 50)]
    trials = [samples[number % 4] for number in range(100)]
    for past in (False, True):
        assert native.weigh_ways(past, trials) == [past] * 100


def test_nothing_changes_before_both_ways_are_known() -> None:
    native = import_module("device_comm._native")
    assert native.weigh_ways(True, [(PAST, 900, 900)] * 5) == [True] * 5
    assert native.weigh_ways(True, [(PAST, 900, 900), (PLAIN, 100, 0)]) == [True] * 2
    assert native.weigh_ways(True, [(PAST, 900, 900), (PLAIN, 100, 100)]) == [True, False]


@pytest.mark.parametrize("stride", [1, 2, 3, 5, 64, 1025, 2049, 4096])
def test_each_way_is_tried_with_one_of_256_pieces(stride: int) -> None:
    native = import_module("device_comm._native")
    n = 100_000
    tried = [native.tried_way(stride * number, PIECE) for number in range(n)]
    for way in (PLAIN, PAST):
        assert n / 256 * 0.8 < tried.count(way) < n / 256 * 1.2


def test_small_pieces_are_not_tried() -> None:
    native = import_module("device_comm._native")
    assert {native.tried_way(number, 8191) for number in range(5000)} == {NEITHER}
    assert {native.tried_way(number, 8192) for number in range(5000)} == {PLAIN, PAST, NEITHER}


def measure_ways(rank: int, _: int, path: str, board: BoardHandle) -> list[bool]:
    """Whether this rank writes as it has measured, after all-reduces and messages of 64 KiB."""
    native = import_module("device_comm._native")
    x = torch.full((16_384,), float(rank))
    right = []
    attached = Board.attach(board, rank)
    for begins_past in (False, True):
        native.write_past_caches(begins_past)
        with make_comm(rank, attached, f"{path}-{begins_past}") as comm:
            for _ in range(3000):
                assert comm.all_reduce(x)[-1] == 1
            backend = comm.backend
            assert isinstance(backend, ShmBackend)
            past, plain_cost, past_cost = backend._comm.way
            name, why = comm.explain().unavailable[-1]
        taken, other = (past_cost, plain_cost) if past else (plain_cost, past_cost)
        right.append(taken > 0 and 0.9 * taken < other)
        assert name == f"writing {'through' if past else 'past'} the caches"
        assert why == f"takes {other / taken:.1f} times as long between these ranks, measured"
    return right


def test_ranks_measure_both_ways(store_path: str) -> None:
    assert run_ranks(2, measure_ways, store_path, NEW_BOARD) == [[True, True]] * 2


def both_ways(rank: int, n: int, path: str, board: BoardHandle) -> list[float]:
    """Sums of what collectives and messages of 3 MB brought, written each way in turn."""
    native = import_module("device_comm._native")
    found = []
    with make_comm(rank, board, path) as comm:
        for past in (False, True):
            native.write_past_caches(past, True)
            x = torch.arange(750_003, dtype=torch.float64) * (rank + 1)
            found.append(float(comm.all_reduce(x).sum()))
            found.append(float(comm.all_gather(x).sum()))
            found.append(float(comm.broadcast_(x.clone(), src=1).sum()))
            peer = (rank + 1) % n
            received = torch.empty_like(x)
            sent = comm.isend(x, peer)
            comm.recv(out=received, src=(rank - 1) % n)
            sent.wait()
            found.append(float(received.sum()))
        comm.barrier()
    return found


def test_results_are_the_same_either_way(store_path: str) -> None:
    one = 750_003 * 750_002 / 2
    for rank, found in enumerate(run_ranks(3, both_ways, store_path, NEW_BOARD)):
        sender = (rank - 1) % 3 + 1
        assert found == [6 * one, 6 * one, 2 * one, sender * one] * 2
