"""A pool over two hosts of which one ends or is cut off: which process learns it, and in time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from server.errors import WorkerLostError, with_notes
from shm_broadcast import CoordinatorError
from tests.coordinator.hosts import NAMES
from tests.netns import Host, two_hosts
from tests.patience import PATIENCE_SECONDS, quickest, until
from tests.ranks import run_ranks
from tests.server.over_hosts import PORT, is_gone, kill, note, noted, over_hosts, run_over
from tests.server.workers import Restored, pids_of

if TYPE_CHECKING:
    from server.pool import WorkerPool

Hosts = tuple[Host, Host]

pytestmark = pytest.mark.namespaces

NAMED_WITHIN = 2.0
"""Seconds in which, as promised, the end of a host is named on the others."""
HEADLESS_END_WITHIN = 5.0
"""Seconds in which the workers of all hosts end when the head does."""
RESTARTS: dict[str, Any] = {"worker": Restored, "restart": "worker"}


# --- the end of the pool -----------------------------------------------------------------


def loses_the_host(pool: WorkerPool, folder: str) -> tuple[str, float]:
    supervisor = int(noted(folder, "supervisor"))
    pid = pids_of(pool)[1]
    call = pool.submit("hang_in_group", 1)
    killed = kill(supervisor)
    with pytest.raises(WorkerLostError) as caught:
        call.result(PATIENCE_SECONDS)
    seconds = time.monotonic() - killed
    assert (caught.value.rank, caught.value.pid) == (1, pid)
    until(lambda: is_gone(pid), "a worker of the lost host is left")
    return str(caught.value), seconds


def test_a_killed_supervisor_is_named_and_its_workers_end(tmp_path: Path) -> None:
    def attempt() -> float:
        folder = mkdtemp(dir=tmp_path)
        with two_hosts("IPv4") as hosts:
            found = run_over(folder, hosts, loses_the_host, folder, may_die=[1])
        text, seconds = found[0]
        assert f"host {NAMES[1]} ({hosts[1].address}) has ended" in text
        return float(seconds)

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


def is_unplugged(pool: WorkerPool, folder: str, hosts: Hosts) -> tuple[str, float]:
    call = pool.submit("hang_in_group", 1)
    until(lambda: all(each.state == "busy" for each in pool.status()))
    note(folder, "unplugged", time.monotonic())
    hosts[0].unplug()
    hosts[1].unplug()
    with pytest.raises(WorkerLostError) as caught:
        call.result(PATIENCE_SECONDS)
    seconds = time.monotonic() - noted(folder, "unplugged")
    until(lambda: pool.failure is not None)
    return str(caught.value), seconds


def test_a_cut_cable_is_named_on_both_hosts(tmp_path: Path) -> None:
    def attempt() -> float:
        folder = mkdtemp(dir=tmp_path)
        with two_hosts("IPv4") as hosts:
            given = folder, hosts, is_unplugged, folder, hosts
            (text, seconds), (end, ended_at, left) = run_over(*given, silence_seconds=1.5)
        assert f"host {NAMES[1]} ({hosts[1].address})" in text
        assert "the head" in end
        assert left == []
        return max(float(seconds), ended_at - noted(folder, "unplugged"))

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


def is_cut_at_the_calls_port(pool: WorkerPool, head: Host) -> str:
    remote = pool._driver._shared.calls.export_handle().remote
    assert remote is not None
    port = str(urlsplit(remote.address).port)
    head.ip("rule", "add", "pref", "1", "ipproto", "tcp", "sport", port, "blackhole")
    with pytest.raises(CoordinatorError) as caught:
        pool.call("total", 1.0)
    return with_notes(caught.value)


def test_a_worker_that_only_the_calls_do_not_reach_says_so(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        given = tmp_path, hosts, is_cut_at_the_calls_port, hosts[0]
        told, _ = run_over(*given, options={"restart": "worker"}, silence_seconds=1.5)
    assert "the worker of rank 1" in told and f"on host {NAMES[1]}" in told
    assert "PeerLostError: dequeue: lost the driver" in told


def ends_suddenly(pool: WorkerPool, folder: str) -> None:
    note(folder, "pid", pids_of(pool)[1])
    note(folder, "killed", time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def test_when_the_head_is_killed_all_hosts_workers_end(tmp_path: Path) -> None:
    def attempt() -> float:
        folder = mkdtemp(dir=tmp_path)
        with two_hosts("IPv4") as hosts:
            given = folder, hosts, ends_suddenly, folder
            _, (end, ended_at, left) = run_over(*given, may_die=[0])
        assert "the head has ended" in end
        assert left == []
        assert is_gone(int(noted(folder, "pid")))
        return ended_at - noted(folder, "killed")

    assert quickest(attempt, HEADLESS_END_WITHIN) < HEADLESS_END_WITHIN


# --- a host takes part again -------------------------------------------------------------


def is_plugged_in_again(pool: WorkerPool, hosts: Hosts) -> Any:
    for host in hosts:
        host.unplug()
    until(lambda: pool.restarting is not None)
    for host in hosts:
        host.plug()
    until(lambda: pool.generation == 2)
    return pool.collective_rpc("holds"), pool.collective_rpc("total", args=(1.0,))


def test_a_host_that_was_only_cut_off_takes_part_again_by_itself(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        given = tmp_path, hosts, is_plugged_in_again, hosts
        (held, totals), end = run_over(*given, options=RESTARTS, silence_seconds=1.5)
    assert held == [["made in 1", "restored in 2"], ["made in 2"]]
    assert totals == [2.0, 2.0]
    assert end[0] == "dismissed"


def started_again(rank: int, n: int, folder: str, hosts: Hosts) -> Any:
    if rank == 2:
        noted(folder, "killed")
        return over_hosts(1, n, folder, hosts, goes_on)
    return over_hosts(rank, n, folder, hosts, goes_on, (folder,), RESTARTS)


def goes_on(pool: WorkerPool, folder: str) -> Any:
    before = pids_of(pool)
    note(folder, "killed", kill(int(noted(folder, "supervisor"))))
    until(lambda: pool.generation == 2)
    assert pool.call("total", 1.0) == 2.0
    after = pids_of(pool)
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False]
    return pool.collective_rpc("holds")


def test_a_host_that_is_started_again_takes_part_again(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        held, _, end = run_ranks(3, started_again, str(tmp_path), hosts, may_die=[1])
    assert held == [["made in 1", "restored in 2"], ["made in 2"]]
    assert end[0] == "dismissed"


def is_lost_for_good(pool: WorkerPool, folder: str) -> str:
    kill(int(noted(folder, "supervisor")))
    until(lambda: pool.failure is not None)
    return f"{type(pool.failure).__name__}: {pool.failure}"


def test_a_host_that_stays_away_ends_the_pool_before_its_budget_of_restarts_does(
    tmp_path: Path,
) -> None:
    options = {"restart": "worker", "start_timeout": 6.0, "window": 10.0}
    with two_hosts("IPv4") as hosts:
        given = tmp_path, hosts, is_lost_for_good, str(tmp_path)
        failure, _ = run_over(*given, options=options, may_die=[1])
    late = "HostError: node 1 did not connect in 6 s; the head listens at "
    assert failure == f"{late}{hosts[0].address}:{PORT}"
