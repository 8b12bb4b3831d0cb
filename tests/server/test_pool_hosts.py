"""A pool over several hosts: its answers, its lost workers, and which rank holds up others."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import pytest

from server.config import PoolConfig
from server.errors import CallTimeoutError, WorkerError, WorkerLostError, WorkerStartError
from tests.coordinator.hosts import NAMES
from tests.netns import hosts_on_a_switch, two_hosts
from tests.patience import PATIENCE_SECONDS, STALL_SECONDS, quickest, until
from tests.ranks import run_ranks
from tests.server.over_hosts import is_gone, kill, noted, over_hosts, run_over
from tests.server.workers import Restored, Unlucky, Worker, pids_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.pool import WorkerPool
    from server.worker import WorkerContext
    from tests.netns import Host

pytestmark = pytest.mark.namespaces

ABORTED_WITHIN = 0.2
"""Seconds in which, as promised, an abort crosses to the other host."""

FAST = (0.0, 0.0)
SLOW = (0.02, 0.01)
"""A cable of 20 ms, which loses 1 % of the packets."""


# --- what works as on one host -----------------------------------------------------------


def uses(pool: WorkerPool, size: int) -> dict[str, Any]:
    board = pool._driver._shared.board
    until(lambda: board.member_status(3).state == "idle")
    pool.call("echo")
    until(lambda: board.member_status(3).operation == "echo")
    until(lambda: board.member_status(3).state == "idle")
    found: dict[str, Any] = {
        "total": pool.collective_rpc("total", args=(1.0,)),
        "ranks": [rank for rank, _ in pool.collective_rpc("where")],
        "large": len(pool.call("echo", b"x" * size)),
        "items": list(pool.stream("count", 5)),
        "many": [
            call.result(PATIENCE_SECONDS) for call in [pool.submit("echo", i) for i in range(50)]
        ],
    }
    with pytest.raises(WorkerError, match=r"rank 3 .*fail: .*bad input") as caught:
        pool.call("fail", [3])
    found["traceback"] = caught.value.traceback
    found["after"] = pool.call("total", 1.0)
    until(lambda: {each.state for each in pool.status()} == {"idle"})
    found["hosts"] = [each.host for each in pool.status()]
    found["pids"] = [each.pid for each in pool.status()] == pids_of(pool)
    with pytest.raises(CallTimeoutError) as late:
        pool.call("sleep", 3.0, [3], timeout=0.5)
    found["late"] = str(late.value), sorted(late.value.stacks)
    found["goes on"] = pool.call("echo", "goes on")
    return found


def test_calls_streams_errors_and_status_are_those_of_one_host(tmp_path: Path) -> None:
    size = 9 << 20
    with two_hosts("IPv6") as hosts:
        found, end = run_over(tmp_path, hosts, uses, size, options={"tp": 2, "pp": 2})
    assert found["total"] == [4.0] * 4
    assert found["ranks"] == [0, 1, 2, 3]
    assert found["large"] == size
    assert found["items"] == [0, 1, 2, 3, 4]
    assert found["many"] == list(range(50))
    assert "in fail" in found["traceback"]
    assert found["after"] == 4.0
    assert found["hosts"] == ["", "", NAMES[1], NAMES[1]]
    assert found["pids"]
    text, ranks = found["late"]
    assert all(each in text for each in ("rank 3 (pid ", f" on {NAMES[1]})", "in sleep"))
    assert (ranks, found["goes on"]) == ([3], "goes on")
    assert (end[0], end[2]) == ("dismissed", [])


# --- a lost worker, an abort -------------------------------------------------------------


def loses_a_worker(pool: WorkerPool, rank: int) -> tuple[str, float, list[int]]:
    pids = pids_of(pool)
    call = pool.submit("hang_in_group", rank)
    until(lambda: all(each.state == "busy" for each in pool.status()))
    killed = kill(pids[rank])
    with pytest.raises(WorkerLostError) as caught:
        call.result(PATIENCE_SECONDS)
    seconds = time.monotonic() - killed
    until(lambda: all(map(is_gone, pids)), "workers are left")
    with pytest.raises(WorkerLostError):
        pool.call("echo")
    return str(caught.value), seconds, [caught.value.rank, caught.value.pid, pids[rank]]


@pytest.mark.parametrize(("victim", "cable"), [(0, FAST), (1, SLOW)])
def test_a_killed_worker_is_named_and_all_hosts_workers_end(
    victim: int, cable: tuple[float, float], tmp_path: Path
) -> None:
    def attempt() -> float:
        with two_hosts("IPv4", *cable) as hosts:
            given = mkdtemp(dir=tmp_path), hosts, loses_a_worker, victim
            (text, seconds, found), end = run_over(*given)
        where = f" on host {NAMES[1]}" if victim else ""
        assert f"killed by SIGKILL{where}" in text
        assert found == [victim, found[2], found[2]]
        assert (end[0], end[2]) == ("dismissed", [])
        return float(seconds)

    assert quickest(attempt, 1.0) < 1.0


def is_aborted(pool: WorkerPool, folder: str, rank: int) -> None:
    call = pool.submit("abort_and_note", rank, Path(folder))
    with pytest.raises(WorkerError):
        call.result(PATIENCE_SECONDS)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_abort_crosses_to_the_other_host(rank: int, tmp_path: Path) -> None:
    def attempt() -> float:
        folder = mkdtemp(dir=tmp_path)
        with two_hosts("IPv4") as hosts:
            run_over(folder, hosts, is_aborted, folder, rank)
        return noted(folder, f"aborted-{1 - rank}") - noted(folder, f"aborted-{rank}")

    assert quickest(attempt, ABORTED_WITHIN) < ABORTED_WITHIN


def replaces(pool: WorkerPool) -> tuple[list[list[str]], int, list[str]]:
    before, hosts = pids_of(pool), [status.host for status in pool.status()]
    for generation, victim in ((2, 0), (3, 4)):
        kill(before[victim])
        until(lambda: pool.generation == generation)  # noqa: B023
        assert pool.collective_rpc("total", args=(1.0,)) == [6.0] * 6
        after = pids_of(pool)
        same = [one == other for one, other in zip(before, after, strict=True)]
        assert same == [rank != victim for rank in range(6)]
        before = after
    return pool.collective_rpc("holds"), pool.restarts, hosts


def test_a_killed_worker_is_replaced_on_its_host_and_the_others_stay(tmp_path: Path) -> None:
    options = {"worker": Restored, "tp": 3, "pp": 2, "restart": "worker"}
    with hosts_on_a_switch(3) as hosts:
        found, *ends = run_over(tmp_path, hosts, replaces, options=options)
    held, restarts, at = found
    stayed = ["made in 1", "restored in 2", "restored in 3"]
    assert held[0] == ["made in 2", "restored in 3"]
    assert held[1:] == [["made in 3"] if rank == 4 else stayed for rank in range(1, 6)]
    assert (restarts, at) == (2, ["", "", NAMES[1], NAMES[1], NAMES[2], NAMES[2]])
    assert [end[0] for end in ends] == ["dismissed"] * 2


def cannot_start(rank: int, n: int, folder: str, hosts: Sequence[Host]) -> Any:
    options = {"worker": Unlucky, "worker_kwargs": {"raises": [1], "hangs": []}}
    try:
        return over_hosts(rank, n, folder, hosts, pids_of, (), options)
    except WorkerStartError as error:
        return str(error)


def test_a_worker_that_cannot_start_on_another_host_says_why(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        head, end = run_ranks(2, cannot_start, str(tmp_path), hosts)
    assert "the worker of rank 1 did not start" in head
    assert "no luck in 1" in head
    assert (end[0], end[2]) == ("dismissed", [])


# --- which rank holds up others ----------------------------------------------------------


def has_one_stopped(pool: WorkerPool) -> tuple[str, tuple[int, ...], int, Any]:
    pid = pids_of(pool)[2]
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(CallTimeoutError) as caught:
            pool.collective_rpc("total", args=(1.0,), timeout=1.0)
    finally:
        os.kill(pid, signal.SIGCONT)
    after = pool.collective_rpc("total", args=(1.0,), timeout=PATIENCE_SECONDS)
    return str(caught.value), caught.value.blocked_by, pid, after


def test_only_a_stopped_worker_on_another_host_is_named(tmp_path: Path) -> None:
    with hosts_on_a_switch(3) as hosts:
        found, *_ = run_over(tmp_path, hosts, has_one_stopped, options={"tp": 3})
    text, culprits, pid, after = found
    why = "its process is stopped, by a signal or a debugger"
    assert f"(rank 2 (pid {pid} on {NAMES[2]}) holds up others: {why}; last seen in" in text
    assert text.count("holds up others") == 1
    assert culprits == (2,)
    assert after == [3.0] * 3


ANSWERED = PoolConfig(leave_seconds=PATIENCE_SECONDS, stack_seconds=PATIENCE_SECONDS)
"""Hosts answer in time, also on a loaded machine."""


def are_late(pool: WorkerPool, *calls: tuple[Any, ...]) -> tuple[list[int], list[Any]]:
    """Each of these calls ends after it was late, but for the last."""
    pids, found = pids_of(pool), list[Any]()
    for call in calls:
        future = pool.submit(*call, timeout=2.0)
        error = future.exception()
        assert isinstance(error, CallTimeoutError)
        found.append((str(error), error.blocked_by, pool.hang_report()))
        if call is not calls[-1]:
            pool.call("echo", timeout=PATIENCE_SECONDS)
    pool.shutdown(0.2)
    return pids, found


def test_a_worker_alone_on_its_host_that_others_wait_for_is_named(tmp_path: Path) -> None:
    calls = ("hang_in_group", 1, 4.0 + STALL_SECONDS), ("skip_group", 1)
    options = {"tp": 3, "config": ANSWERED}
    with hosts_on_a_switch(3) as hosts:
        (pids, found), *_ = run_over(tmp_path, hosts, are_late, *calls, options=options)
    reasons = "waits for no other process", "is idle, and waits for the next message of the driver"
    for why, (text, culprits, told) in zip(reasons, found, strict=True):
        named = f"ank 1 (pid {pids[1]} on {NAMES[1]}) holds up others: it {why}"
        assert f"(r{named}; last seen in" in text
        assert text.count("holds up others") == 1
        assert culprits == (1,)
        assert told[0].startswith(f"R{named}")
        waits = [line.split(" in ")[0] for line in told if line.startswith("  Rank")]
        assert f"  Rank 0 (pid {pids[0]}) waits for rank 1" in waits
        assert f"  Rank 2 (pid {pids[2]} on {NAMES[2]}) waits for rank 1" in waits


def test_workers_that_wait_for_each_other_over_hosts_are_named(tmp_path: Path) -> None:
    options = {"config": ANSWERED}
    with two_hosts("IPv4") as hosts:
        found = run_over(tmp_path, hosts, are_late, ("cross",), options=options)
    (pids, [(text, culprits, told)]), _ = found
    first, second = f"rank 0 (pid {pids[0]})", f"rank 1 (pid {pids[1]} on {NAMES[1]})"
    assert f"({first} and {second} wait for each other)" in text
    assert culprits == (0, 1)
    assert told[-1] == "All of them receive, and none has sent."


class Meets(Worker):
    def __init__(self, context: WorkerContext, late: int) -> None:
        super().__init__(context)
        if self.rank == late:
            time.sleep(600)
        self.groups.world.barrier()


def fails_to_start(rank: int, n: int, folder: str, hosts: Sequence[Host]) -> Any:
    options = {"worker": Meets, "tp": 3, "worker_kwargs": {"late": 1}, "start_timeout": 6.0}
    try:
        return over_hosts(rank, n, folder, hosts, pids_of, (), options, {"nnodes": 3})
    except WorkerStartError as error:
        return error.rank, str(error), error.traceback


def test_a_start_names_the_worker_on_another_host_that_holds_it_up(tmp_path: Path) -> None:
    with hosts_on_a_switch(3) as hosts:
        (rank, text, stack), *_ = run_ranks(3, fails_to_start, str(tmp_path), hosts)
    assert rank == 1
    assert "(late: 0, 1, 2; rank 1 (pid " in text
    assert f" on {NAMES[1]}) holds up others: it waits for no other process" in text
    assert "in __init__" in stack
