"""A late call names who holds up the others, also if that one has answered."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import TYPE_CHECKING
from unittest.mock import Mock

import psutil
import pytest

from server.config import PoolConfig
from server.driver.worker_processes import blocked_by
from server.errors import CallTimeoutError, WorkerLostError, WorkerStartError
from server.hosts.remote_hosts import RemoteWorker
from server.inspection.diagnosis import own_diagnoses
from server.launchers.local import LocalWorker
from server.pool import WorkerPool
from shm_broadcast import DRIVER_RANK, MessageQueue
from tests.patience import PATIENCE_SECONDS, until
from tests.server.workers import Gate, Restored, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from server.control.protocol import Start
    from server.worker import WorkerContext
    from shm_broadcast import Deadline


PATIENT = PoolConfig(leave_seconds=PATIENCE_SECONDS)
"""Survivors have time to leave."""


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(Worker, tp=2) as pool:
        yield pool
        pool.shutdown(0.2)


def late_error(pool: WorkerPool, method: str, *args: object) -> CallTimeoutError:
    error = pool.submit(method, *args, timeout=0.8).exception()
    assert isinstance(error, CallTimeoutError)
    return error


def test_a_rank_that_skips_a_collective_is_named_beside_those_that_wait(pool: WorkerPool) -> None:
    pid = pool.status()[1].pid
    error = late_error(pool, "skip_group", 1)
    assert [each.rank for each in error.waiting_for] == [0]
    assert error.blocked_by == (1,)
    assert f"(rank 1 (pid {pid}) holds up others: it is idle, and waits for the next" in str(error)


def test_a_rank_that_is_stopped_is_named_beside_those_that_wait(pool: WorkerPool) -> None:
    pid = pool.status()[1].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        future = pool.submit("total", 1.0, timeout=0.8)
        with pytest.raises(CallTimeoutError) as raised:
            future.result()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert raised.value.blocked_by == (1,)
    assert f"(rank 1 (pid {pid}) holds up others: its process is stopped" in str(raised.value)


def test_a_rank_that_lags_is_told_from_those_that_wait_for_it(pool: WorkerPool) -> None:
    error = late_error(pool, "hang_in_group", 1, 3.0)
    assert [each.rank for each in error.waiting_for] == [0, 1]
    assert error.blocked_by == (1,)
    assert "holds up others: it waits for no other process; last seen in" in str(error)
    told = pool.hang_report()
    waits, late = (each.pid for each in error.waiting_for)
    for begin in f"Rank 1 (pid {late}) holds up others", f"  Rank 0 (pid {waits}) waits for rank 1":
        assert sum(line.startswith(begin) for line in told) == 1


def activities(pool: WorkerPool) -> list[tuple[str, tuple[int, ...]]]:
    return [(each.activity, each.waits_for) for each in pool.status()]


def test_ranks_are_idle_computing_or_waiting_for_others(pool: WorkerPool) -> None:
    until(lambda: activities(pool) == [("idle", (DRIVER_RANK,))] * 2)
    hangs = pool.submit("hang_in_group", 1, 3.0)
    until(lambda: activities(pool) == [("waiting", (1,)), ("computing", ())])
    assert hangs.result(PATIENCE_SECONDS) == 2.0
    until(lambda: activities(pool) == [("idle", (DRIVER_RANK,))] * 2)


def test_where_nobody_waits_nothing_is_told(pool: WorkerPool) -> None:
    assert pool.call("echo", 1) == 1
    assert pool.hang_report() == []
    pool.shutdown()
    assert pool.hang_report() == []


def test_a_worker_that_is_stopped_alone_is_said_to_be() -> None:
    with WorkerPool(Worker) as alone:
        pid = alone.status()[0].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            error = late_error(alone, "total", 1.0)
        finally:
            os.kill(pid, signal.SIGCONT)
    assert error.blocked_by == (0,)
    assert "holds up others: its process is stopped, by a signal or a debugger" in str(error)


def test_ranks_that_wait_for_each_other_are_told_as_such(pool: WorkerPool) -> None:
    first, second = (each.pid for each in pool.status())
    error = late_error(pool, "cross")
    assert error.blocked_by == (0, 1)
    assert f"(rank 0 (pid {first}) and rank 1 (pid {second}) wait for each other)" in str(error)


def test_a_driver_is_seen_to_wait_for_all_ranks_that_have_not_answered(
    pool: WorkerPool, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    call = pool.submit("hold", gate)
    pids = [each.pid for each in pool.status()]

    def all_are_named() -> bool:
        named = ([each.status.pid for each in verdict.culprits] for verdict in own_diagnoses())
        return pids in named

    until(all_are_named)
    gate.open()
    call.result()


def test_what_is_late_and_holds_up_nobody_is_not_told_twice(
    pool: WorkerPool, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    error = late_error(pool, "hold", gate)
    gate.open()
    assert (error.blocked_by, error.detail) == ((), "")


def test_pools_of_one_process_are_not_blamed_for_each_other(pool: WorkerPool) -> None:
    with WorkerPool(Worker, tp=2) as other:
        held = other.submit("skip_group", 0)
        error = late_error(pool, "skip_group", 1)
        assert error.blocked_by == (1,)
        assert str(error).count("rank 1 (pid ") == 1
        assert not held.done()
        other.shutdown(0.2)


def test_a_worker_on_another_host_is_not_taken_for_one_of_the_same_pid(pool: WorkerPool) -> None:
    assert late_error(pool, "skip_group", 1).blocked_by == (1,)
    workers = dict(pool._driver._processes.workers)
    workers[2] = RemoteWorker(2, 1, post=Mock())
    workers[2].pid = workers[1].pid
    assert blocked_by(workers)[1] == (1,)
    workers[2].close()


class Meeting(Worker):
    """In its ``__init__`` all ranks meet, but for one that comes late or never."""

    def __init__(self, context: WorkerContext, late: int, how: str) -> None:
        super().__init__(context)
        if self.rank != late:
            self.groups.world.barrier()
        elif how == "sleeps":
            time.sleep(600)
        elif how == "comes late":
            time.sleep(1.5)
            self.groups.world.barrier()
        elif how == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("how", "late", "why"),
    [
        ("sleeps", "0, 1, 2", "it waits for no other process"),
        ("is stopped", "0, 1, 2", "its process is stopped"),
        ("takes no part", "0, 1", "it is idle"),
    ],
)
def test_a_start_names_who_holds_it_up(how: str, late: str, why: str) -> None:
    given = {"late": 2, "how": how}
    with pytest.raises(WorkerStartError) as raised:
        WorkerPool(Meeting, tp=3, start_timeout=4.0, worker_kwargs=given)
    assert f"(late: {late}; rank 2 (pid " in str(raised.value)
    assert f" holds up others: {why}" in str(raised.value)
    assert raised.value.rank == (2 if "2" in late else 0)
    if how == "sleeps":
        assert "in __init__" in raised.value.traceback
        assert "barrier" not in raised.value.traceback


def without_number(text: str) -> str:
    """A text without the number of an operation: what its rank did before is not tested."""
    return re.sub(r" #\d+", "", text)


def test_a_start_that_takes_longer_than_stuck_after_succeeds_while_a_rank_works() -> None:
    given = {"late": 2, "how": "comes late"}
    with WorkerPool(Meeting, tp=3, stuck_after=0.3, worker_kwargs=given) as pool:
        assert pool.call("echo", 1) == 1


@pytest.mark.parametrize(
    ("how", "rank", "why"),
    [
        ("is stopped", 2, "its process is stopped, by a signal or a debugger"),
        ("takes no part", 0, "it waits in world barrier for rank 2, which has started"),
    ],
)
def test_a_first_start_that_cannot_go_on_fails_after_stuck_after(
    how: str, rank: int, why: str
) -> None:
    given = {"late": 2, "how": how}
    with pytest.raises(WorkerStartError) as raised:
        WorkerPool(Meeting, tp=3, stuck_after=0.5, worker_kwargs=given)
    reason = without_number(raised.value.reason)
    assert (raised.value.rank, reason) == (rank, f"stuck for 0.5 s: {why}")


def test_a_start_without_stuck_after_names_at_once_who_cannot_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    given = {"late": 2, "how": "takes no part"}
    with pytest.raises(WorkerStartError, match="not ready after 4 s"):
        WorkerPool(Meeting, tp=3, start_timeout=4.0, worker_kwargs=given)
    told = [without_number(record.getMessage()) for record in caplog.records]
    for rank in (0, 1):
        why = "it waits in world barrier for rank 2, which has started"
        assert told.count(f"the worker of rank {rank} does not start: {why}") == 1


class Rejoining(Restored):
    """A replacement of the second generation stops itself, or meets those that do not meet it."""

    def __init__(self, context: WorkerContext, how: str) -> None:
        super().__init__(context)
        if context.generation > 1 and how == "meets":
            self.total(1.0)
        elif context.generation == 2 and how == "is stopped":
            os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("is stopped", "its process is stopped, by a signal or a debugger"),
        ("meets", "it waits in world all_reduce for rank 0, which has started"),
    ],
)
def test_a_replacement_that_cannot_go_on_is_replaced_after_stuck_after(
    how: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"how": how}
    with WorkerPool(
        Rejoining, tp=2, worker_kwargs=given, restart="worker", stuck_after=0.5, config=PATIENT
    ) as pool:
        with pytest.raises(WorkerLostError):
            pool.call("exit", [1], 3)
        assert pool.call("total", 2.0, timeout=PATIENCE_SECONDS) == 4.0
        assert pool.generation == 3
    told = [without_number(record.getMessage()) for record in caplog.records]
    assert f"the worker of rank 1 does not start: {why}" in told
    failed = f"the worker of rank 1 did not start: stuck for 0.5 s: {why}"
    assert any(failed in each for each in told)


def test_a_replacement_that_is_stopped_before_it_has_sent_anything_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    really_start, stopped = LocalWorker.start, []

    def start(worker: LocalWorker, told: Start, deadline: Deadline) -> None:
        if told.generation == 2 and worker.rank == 1:
            assert not worker.connected
            until(psutil.Process(worker.pid).children)
            stopped.append(psutil.Process(worker.pid).children()[0])
            stopped[0].suspend()
        really_start(worker, told, deadline)

    with WorkerPool(Worker, tp=2, restart="worker", stuck_after=0.5) as pool:
        monkeypatch.setattr(LocalWorker, "start", start)
        with pytest.raises(WorkerLostError):
            pool.call("exit", [1], 3)
        assert pool.call("total", 2.0, timeout=PATIENCE_SECONDS) == 4.0
        assert pool.generation == 3
        assert not stopped[0].is_running()


class Aided(Worker):
    """Rank 0 writes to a queue of its own, which has a board of its own, where it has no rank."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        if self.rank == 0:
            self.own = MessageQueue(1, 1)


def test_a_worker_that_has_a_queue_of_its_own_is_held_up_like_any_other() -> None:
    with WorkerPool(Aided, tp=2) as pool:
        assert late_error(pool, "hang_in_group", 1, 3.0).blocked_by == (1,)
        pool.shutdown(0.2)
