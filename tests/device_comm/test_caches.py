"""Whether ranks share a cache, by made-up machines; writing what they read, both ways."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
import torch

from shm_broadcast.machine.core_map import listed, share_a_cache
from tests.device_comm.shm_ranks import make_comm
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
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
        "from shm_broadcast.machine import affinity, core_map\n"
        "given = os.sched_getaffinity(0)\n"
        "affinity.bind_process({min(given)})\n"
        "assert os.sched_getaffinity(0) == {min(given)}\n"
        "counted = []\n"
        "core_map.share_a_cache = lambda usable: counted.append(usable)\n"
        "import device_comm.shm.shm_backend as backend\n"
        "assert counted == ([given] if backend.extension is not None else []), counted\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_lists_of_cores() -> None:
    assert listed("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert listed("7") == {7}


def both_ways(rank: int, n: int, path: str, board: BoardHandle) -> list[float]:
    """Sums of what collectives and messages of 3 MB brought, written each way in turn."""
    native = import_module("device_comm._native")
    found = []
    with make_comm(rank, board, path) as comm:
        for past in (False, True):
            native.write_past_caches(past)
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
    pytest.importorskip("device_comm._native")
    one = 750_003 * 750_002 / 2
    for rank, found in enumerate(run_ranks(3, both_ways, store_path, NEW_BOARD)):
        sender = (rank - 1) % 3 + 1
        assert found == [6 * one, 6 * one, 2 * one, sender * one] * 2
