"""Whether ranks share a cache, by made-up machines; writing what they read, both ways."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import ShmBackend
from shm_broadcast import Board
from shm_broadcast.cpu import listed, share_a_cache
from tests.device_comm.shm_ranks import make_comm, on_ranks
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    from shm_broadcast import BoardHandle


def machine(folder: Path, online: str, shared: list[str]) -> Path:
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
    assert share_a_cache(usable, tmp_path) is False, "nothing is known"
    assert share_a_cache(usable, machine(tmp_path, online, shared)) is expected


# --- Writing plainly, or past the caches ----------------------------------------------------------


def measure_ways(rank: int, _: int, path: str, board: BoardHandle) -> list[bool]:
    """Whether this rank writes as it has measured, after all-reduces and messages of 64 KiB."""
    native = import_module("device_comm._native")
    x = torch.full((16_384,), float(rank))
    right = []
    attached = Board.attach(board, rank)
    for begins_past in (False, True):
        native.write_past_caches(begins_past)
        with make_comm(rank, attached, f"{path}-{begins_past}") as comm:
            for _ in range(800):
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


@on_ranks(3)
def test_results_are_the_same_either_way(rank: int, n: int, path: str, board: BoardHandle) -> None:
    """Collectives and messages of 2.4 MB, written each way in turn."""
    native = import_module("device_comm._native")
    numbers = torch.arange(300_007, dtype=torch.float64)
    x, left = numbers * (rank + 1), (rank - 1) % n
    with make_comm(rank, board, path) as comm:
        for past in (False, True):
            native.write_past_caches(past, True)
            assert torch.equal(comm.all_reduce(x), 6 * numbers)
            assert torch.equal(comm.all_gather(x), torch.cat([numbers, 2 * numbers, 3 * numbers]))
            assert torch.equal(comm.broadcast_(x.clone(), src=1), 2 * numbers)
            sent = comm.isend(x, (rank + 1) % n)
            assert torch.equal(comm.recv(x.shape, x.dtype, left), numbers * (left + 1))
            sent.wait()
        comm.barrier()
