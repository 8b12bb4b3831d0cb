"""Which cores each worker gets: on made-up machines, and of this one."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from server.config import PoolConfig
from server.driver.binding import (
    bound_here,
    cpus_of_workers,
    threads_of,
    usable_cores,
    worker_threads,
    written,
)
from server.errors import WorkerStartError
from server.inspection.snapshot import of_process, programs, scan
from server.pool import WorkerPool
from server.replicas import Replicas
from shm_broadcast.cpu import Core, listed
from tests.netns import two_hosts
from tests.patience import PATIENCE_SECONDS
from tests.ranks import run_ranks
from tests.server.over_hosts import over_hosts
from tests.server.workers import Worker, pids_of

if TYPE_CHECKING:
    from server.driver.binding import Bound


def nodes(*sizes: int) -> list[Core]:
    numbers = iter(range(sum(sizes)))
    return [Core(node, (next(numbers),)) for node, size in enumerate(sizes) for _ in range(size)]


def threaded(*sizes: int) -> list[Core]:
    """The same with two threads each, the second ones numbered behind all first ones."""
    n = sum(sizes)
    return [Core(core.node, (*core.cpus, core.cpus[0] + n)) for core in nodes(*sizes)]


def ranges(bound: Bound) -> list[str]:
    """For reading: the first and the last of each, which all are without gaps."""
    assert all(cpus == tuple(range(cpus[0], cpus[-1] + 1)) for cpus in bound)
    return [f"{cpus[0]}-{cpus[-1]}" for cpus in bound]


@pytest.mark.parametrize(
    ("cores", "n_workers", "expected"),
    [
        pytest.param(nodes(8), 2, ["0-3", "4-7"], id="a node"),
        pytest.param(nodes(4, 4), 2, ["0-3", "4-7"], id="a node each"),
        pytest.param(nodes(4, 4), 4, ["0-1", "2-3", "4-5", "6-7"], id="two to a node"),
        pytest.param(nodes(7), 3, ["0-2", "3-4", "5-6"], id="not even: the first one has more"),
        pytest.param(nodes(8, 8), 3, ["0-3", "4-7", "8-15"], id="no share crosses nodes"),
        pytest.param(nodes(6, 2), 2, ["0-2", "3-5"], id="the smallest share counts"),
        pytest.param(nodes(2, 6), 3, ["0-1", "2-4", "5-7"], id="more workers on the larger node"),
        pytest.param(nodes(4, 4), 1, ["0-7"], id="one worker is not kept on half of the cores"),
        pytest.param(nodes(2, 2, 2, 2), 2, ["0-3", "4-7"], id="two nodes for each worker"),
        pytest.param(nodes(4, 4, 4, 4), 3, ["0-3", "4-7", "8-11"], id="better a node is idle"),
        pytest.param(nodes(1, 1), 2, ["0-0", "1-1"], id="a core each"),
    ],
)
def test_auto_gives_each_a_share(cores: list[Core], n_workers: int, expected: list[str]) -> None:
    assert ranges(cpus_of_workers("auto", n_workers, cores)) == expected


MASKED = [Core(0, (1,)), Core(1, (2, 6)), Core(1, (3, 7))]


@pytest.mark.parametrize(
    ("bind", "n_workers", "cores", "expected"),
    [
        ("auto", 2, threaded(2, 2), ((0, 1, 4, 5), (2, 3, 6, 7))),  # the threads of a core together
        ("auto", 4, threaded(4), ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("auto", 4, threaded(2), ((0,), (2,), (1,), (3,))),  # unless there are more workers
        ("auto", 3, threaded(2), ((0, 2), (1,), (3,))),
        ("auto", 3, MASKED, ((1,), (2, 6), (3, 7))),  # only what this process may use
        ("auto", 2, MASKED, ((1,), (2, 3, 6, 7))),
        ("0-1,5|4", 2, nodes(4, 4), ((0, 1, 5), (4,))),
        ("none", 3, nodes(2), ()),
        ("0-3", 0, nodes(4), ()),
    ],
)
def test_workers_get_their_cores(
    bind: str, n_workers: int, cores: list[Core], expected: Bound
) -> None:
    shares = cpus_of_workers(bind, n_workers, cores)
    assert shares == expected
    if bind == "auto":  # what was given can be named
        assert cpus_of_workers(written(shares), n_workers, cores) == shares
    elif not shares:
        assert written(shares) == "none"


@pytest.mark.parametrize(
    ("bind", "n_workers", "text"),
    [
        ("auto", 5, "5 workers cannot each have a core .* process may use 4"),
        ("0-1", 2, "bind='0-1' is for 1 workers, and this host has 2"),
        ("0-1|2-4", 2, "bind='2-4': this process may not use core 4, but 0, 1, 2, 3"),
        ("3-1", 1, "bind='3-1' names no core"),
    ],
)
def test_what_cannot_be_given_is_refused(bind: str, n_workers: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        cpus_of_workers(bind, n_workers, nodes(2, 2))


def test_threads_are_as_many_as_the_smallest_share_keeps_busy() -> None:
    assert threads_of(((0, 1, 2, 3), (4, 5))) == 2
    assert threads_of(((0, 1, 2, 3), (0, 1, 2, 3))) == 2
    assert threads_of(((0, 1, 2), (0, 1, 2), (0, 1, 2))) == 1
    assert threads_of(((0,), (0,))) == 1
    assert worker_threads(1, ((0,),), {}) == 1
    assert worker_threads(1, ((0,),), {"OMP_NUM_THREADS": "3"}) == 3
    assert worker_threads(1, (tuple(range(1000)),), {}) == usable_cores()


# --- real workers --------------------------------------------------------------------------

USABLE = sorted(os.sched_getaffinity(0))

FEW = pytest.mark.skipif(len(USABLE) < 2, reason="two workers need two cores")

CROSSED = f"{USABLE[-1]}|{USABLE[0]}"
"""The first worker on the last core."""


def affinities(pids: list[int]) -> list[set[int]]:
    found = []
    for pid in pids:
        cores = os.sched_getaffinity(pid)
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(ProcessLookupError):  # it has ended meanwhile
                assert os.sched_getaffinity(int(task.name)) == cores
        found.append(cores)
    return found


def cores_shown(pool: WorkerPool) -> list[set[int]]:
    seen = scan()
    (mine,) = of_process(os.getpid(), seen, programs(seen))
    key = pool._driver._shared.board.handle().segment.nonce.hex()
    (board,) = (each for each in mine.boards if each.key == key)
    return [listed(member.cores) for member in board.members]


@FEW
@pytest.mark.parametrize(("bind", "fork"), [("auto", True), (CROSSED, False)])
def test_workers_run_on_their_cores(bind: str, fork: bool) -> None:
    with WorkerPool(Worker, tp=2, config=PoolConfig(bind=bind, fork=fork)) as pool:
        shares = bound_here(bind, 2)
        assert affinities(pids_of(pool)) == [set(cpus) for cpus in shares]
        assert pool.call("environment")["threads"] == worker_threads(2, shares)
        assert os.sched_getaffinity(0) == set(USABLE)
        assert cores_shown(pool) == [*map(set, shares), set(USABLE)]


@FEW
def test_a_replacement_has_the_cores_of_its_worker() -> None:
    settings = PoolConfig(bind=CROSSED, leave_seconds=PATIENCE_SECONDS)
    with WorkerPool(Worker, tp=2, restart="worker", config=settings) as pool:
        before = pids_of(pool)
        os.kill(before[0], signal.SIGKILL)
        assert pool.call("total", 1.0, timeout=PATIENCE_SECONDS, retry=True) == 2.0
        after = pids_of(pool)
        assert (after[0] != before[0], after[1] == before[1]) == (True, True)
        assert affinities(after) == [{USABLE[-1]}, {USABLE[0]}]


@FEW
def test_replicas_share_the_cores() -> None:
    with Replicas(Worker, dp=2, config=PoolConfig(bind="auto")) as replicas:
        pids = [pid for pool in replicas.pools for pid in pids_of(pool)]
        assert affinities(pids) == [set(cpus) for cpus in bound_here("auto", 2)]


def test_a_pool_is_not_bound_unless_that_is_asked_for_and_possible() -> None:
    with WorkerPool(Worker) as pool:
        assert affinities(pids_of(pool)) == [set(USABLE)]
    missing = max(USABLE) + 1
    with pytest.raises(ValueError, match=f"may not use core {missing}, but "):
        WorkerPool(Worker, config=PoolConfig(bind=str(missing)))


def cores_there(pool: WorkerPool) -> list[set[int]]:
    return [each["cores"] for each in pool.collective_rpc("inherited")]


@FEW
@pytest.mark.namespaces
def test_every_host_binds_its_own_workers(tmp_path: Path) -> None:
    options: dict[str, Any] = {"tp": 4, "config": PoolConfig(bind=CROSSED)}
    with two_hosts("IPv4") as hosts:
        found, _ = run_ranks(2, over_hosts, str(tmp_path), hosts, cores_there, (), options)
    assert found == [{USABLE[-1]}, {USABLE[0]}] * 2


def start_alone(rank: int, *given: Any) -> Any:
    if rank:
        os.sched_setaffinity(0, {USABLE[0]})
    try:
        return over_hosts(rank, *given)
    except WorkerStartError as error:
        return str(error)


@FEW
@pytest.mark.namespaces
def test_a_host_that_cannot_bind_is_named(tmp_path: Path) -> None:
    options: dict[str, Any] = {"tp": 4, "config": PoolConfig(bind="auto")}
    with two_hosts("IPv4") as hosts:
        found, _ = run_ranks(2, start_alone, str(tmp_path), hosts, cores_there, (), options)
    assert "rank 2" in found
    assert "not started: bind='auto': 2 workers cannot each have a core" in found
