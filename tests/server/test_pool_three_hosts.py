"""Pools over three hosts, and what the driver learns of a worker that holds up others elsewhere."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from server.errors import CallTimeoutError
from tests.coordinator.hosts import NAMES
from tests.netns import hosts_on_a_switch
from tests.patience import PATIENCE_SECONDS, until
from tests.ranks import run_ranks
from tests.server.over_hosts import over_hosts
from tests.server.workers import pids_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from server.pool import WorkerPool
    from tests.netns import Host

pytestmark = pytest.mark.namespaces


def over_three(
    rank: int,
    n: int,
    folder: str,
    hosts: Sequence[Host],
    body: Callable[..., Any],
    args: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    return over_hosts(rank, n, folder, hosts, body, args, options, {"nnodes": 3})


def loses_a_worker(pool: WorkerPool) -> Any:
    """Its hosts, what it computes before and after, and which workers are the same."""
    before, hosts = pids_of(pool), [status.host for status in pool.status()]
    totals = [pool.collective_rpc("total", args=(1.0,), timeout=PATIENCE_SECONDS)]
    os.kill(before[4], signal.SIGKILL)
    until(lambda: pool.generation > 1)
    totals += [
        pool.collective_rpc("total", args=(1.0,), timeout=PATIENCE_SECONDS, retry=True),
    ]
    return hosts, totals, [a == b for a, b in zip(before, pids_of(pool), strict=True)]


def test_a_lost_worker_is_replaced_on_its_host_and_the_others_stay(tmp_path: Path) -> None:
    options = {"tp": 3, "pp": 2, "restart": "worker"}
    with hosts_on_a_switch(3) as hosts:
        (at, totals, same), *ends = run_ranks(
            3, over_three, str(tmp_path), hosts, loses_a_worker, (), options
        )
    assert at == ["", "", NAMES[1], NAMES[1], NAMES[2], NAMES[2]]
    assert totals == [[6.0] * 6] * 2
    assert same == [True, True, True, True, False, True]
    assert [end[0] for end in ends] == ["dismissed"] * 2


def has_one_stopped(pool: WorkerPool, rank: int) -> tuple[str, tuple[int, ...], int, Any]:
    pid = pids_of(pool)[rank]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(CallTimeoutError) as caught:
            pool.collective_rpc("total", args=(1.0,), timeout=1.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    after = pool.collective_rpc("total", args=(1.0,), timeout=PATIENCE_SECONDS)
    return str(caught.value), caught.value.held_up_by, pid, after


@pytest.mark.parametrize(
    ("tp", "rank", "says"),
    [
        (6, 4, "rank 4 (pid {pid}) holds up others: its process is stopped, by a signal"),
        (3, 2, "rank 2 (pid {pid}) is stopped, by a signal or a debugger"),
    ],
    ids=["beside another", "alone"],
)
def test_a_stopped_worker_on_another_host_is_named_and_nobody_else(
    tp: int, rank: int, says: str, tmp_path: Path
) -> None:
    with hosts_on_a_switch(3) as hosts:
        (text, culprits, pid, after), *_ = run_ranks(
            3, over_three, str(tmp_path), hosts, has_one_stopped, (rank,), {"tp": tp}
        )
    assert f"(on host {NAMES[2]}, {says.format(pid=pid)}" in text
    assert text.count("holds up others") <= 1
    assert culprits == (rank,)
    assert after == [float(tp)] * tp
