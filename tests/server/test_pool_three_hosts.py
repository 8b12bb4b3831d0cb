"""Pools over three hosts, and what the driver learns of a worker that holds up others elsewhere."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from server.errors import CallTimeoutError, WorkerStartError
from tests.coordinator.hosts import NAMES
from tests.netns import hosts_on_a_switch, two_hosts
from tests.patience import PATIENCE_SECONDS, until
from tests.ranks import run_ranks
from tests.server.over_hosts import over_hosts
from tests.server.workers import Worker, pids_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from server.pool import WorkerPool
    from server.worker import WorkerContext
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
    return str(caught.value), caught.value.blocked_by, pid, after


@pytest.mark.parametrize(("tp", "rank"), [(6, 4), (3, 2)], ids=["beside another", "alone"])
def test_a_stopped_worker_on_another_host_is_named_and_nobody_else(
    tp: int, rank: int, tmp_path: Path
) -> None:
    with hosts_on_a_switch(3) as hosts:
        (text, culprits, pid, after), *_ = run_ranks(
            3, over_three, str(tmp_path), hosts, has_one_stopped, (rank,), {"tp": tp}
        )
    why = "its process is stopped, by a signal or a debugger"
    assert f"(rank {rank} (pid {pid} on {NAMES[2]}) holds up others: {why}; last seen" in text
    assert text.count("holds up others") == 1
    assert culprits == (rank,)
    assert after == [float(tp)] * tp


def is_late(pool: WorkerPool, method: str, *args: Any) -> tuple[str, Any, list[str], list[int]]:
    pids = pids_of(pool)
    error = pool.submit(method, *args, timeout=2.0).exception()
    assert isinstance(error, CallTimeoutError)
    told = pool.hang_report()
    pool.shutdown(0.2)
    return str(error), error.blocked_by, told, pids


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (("hang_in_group", 1), "it waits for no other process"),
        (("skip_group", 1), "it is idle, and waits for the next message of the driver"),
    ],
    ids=["sleeps", "has answered"],
)
def test_a_worker_alone_on_its_host_that_others_wait_for_is_named(
    call: tuple[str, int], why: str, tmp_path: Path
) -> None:
    with hosts_on_a_switch(3) as hosts:
        (text, culprits, told, pids), *_ = run_ranks(
            3, over_three, str(tmp_path), hosts, is_late, call, {"tp": 3}
        )
    assert f"(rank 1 (pid {pids[1]} on {NAMES[1]}) holds up others: {why}; last seen in" in text
    assert text.count("holds up others") == 1
    assert culprits == (1,)
    assert told[0].startswith(f"Rank 1 (pid {pids[1]} on {NAMES[1]}) holds up others: {why}")
    waits = [line.split(" in ")[0] for line in told if line.startswith("  Rank")]
    assert f"  Rank 0 (pid {pids[0]}) waits for rank 1" in waits
    assert f"  Rank 2 (pid {pids[2]} on {NAMES[2]}) waits for rank 1" in waits


def test_workers_that_wait_for_each_other_over_hosts_are_named_as_such(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        (text, culprits, told, pids), *_ = run_ranks(
            2, over_hosts, str(tmp_path), hosts, is_late, ("cross",), {"tp": 2}
        )
    first, second = f"rank 0 (pid {pids[0]})", f"rank 1 (pid {pids[1]} on {NAMES[1]})"
    assert f"({first} and {second} wait for each other)" in text
    assert culprits == (0, 1)
    assert told[-1] == "All of them receive, and none has sent."


class Meets(Worker):
    """In its ``__init__`` all ranks meet, but for one, which sleeps."""

    def __init__(self, context: WorkerContext, late: int) -> None:
        super().__init__(context)
        if self.rank == late:
            time.sleep(600)
        self.groups.world.barrier()


def fails_to_start(rank: int, n: int, folder: str, hosts: Sequence[Host]) -> Any:
    options = {"worker": Meets, "tp": 3, "worker_kwargs": {"late": 1}, "start_timeout": 6.0}
    try:
        return over_three(rank, n, folder, hosts, pids_of, (), options)
    except WorkerStartError as error:
        return error.rank, str(error), error.traceback


def test_a_start_names_the_worker_on_another_host_that_holds_it_up(tmp_path: Path) -> None:
    with hosts_on_a_switch(3) as hosts:
        (rank, text, stack), *_ = run_ranks(3, fails_to_start, str(tmp_path), hosts)
    assert rank == 1
    assert "(late: 0, 1, 2; rank 1 (pid " in text
    assert f" on {NAMES[1]}) holds up others: it waits for no other process" in text
    assert "in __init__" in stack
