"""No call waits for ever; a late call or start names who is late and who holds up the others."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import psutil
import pytest

from server.calls.call_table import CallTable
from server.config import PoolConfig
from server.driver.worker_processes import blocked_by
from server.errors import CallTimeoutError, WorkerLostError, WorkerStartError
from server.hosts.remote_hosts import RemoteWorker
from server.launchers.local import LocalWorker
from server.pool import WorkerPool
from server.replicas import Replicas
from shm_broadcast import DRIVER_RANK, CoordinatorError
from tests.patience import PATIENCE_SECONDS, STALL_SECONDS, until
from tests.server.workers import Gate, Restored, Worker, pids_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server.control.protocol import Start
    from server.worker import WorkerContext
    from shm_broadcast import Deadline

SECONDS = 1.0


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    patient = PoolConfig(call_seconds=SECONDS, settle_seconds=30.0, stack_seconds=30.0)
    with WorkerPool(Worker, tp=2, config=patient) as pool:
        yield pool


def assert_says_who_is_late(error: BaseException | None, seconds: float) -> None:
    assert isinstance(error, CallTimeoutError)
    assert str(error).startswith(f"hold: timed out after {seconds:g} s, waiting for rank 1 (pid ")
    assert (error.method, error.blocked_by) == ("hold", ())
    assert list(error.stacks) == [1]
    assert "in pass_through" in error.stacks[1]


def test_a_call_that_hangs_fails_by_itself(pool: WorkerPool, gate: Gate) -> None:
    with pytest.raises(CallTimeoutError) as raised:
        pool.collective_rpc("hold", args=(gate, [1]))
    assert_says_who_is_late(raised.value, SECONDS)
    gate.open()
    assert pool.call("echo", "the pool goes on", timeout=30) == "the pool goes on"


def test_a_late_call_has_the_stack_of_each_late_rank(pool: WorkerPool, gate: Gate) -> None:
    began = time.monotonic()
    error = pool.submit("hold_before_group", gate, rank=1, timeout=1.5).exception()
    assert 1.5 <= time.monotonic() - began < 1.5 + STALL_SECONDS
    gate.open()
    assert isinstance(error, CallTimeoutError)
    assert (error.method, error.timeout) == ("hold_before_group", 1.5)
    assert [late.rank for late in error.waiting_for] == [0, 1]
    assert "all_reduce" in error.waiting_for[0].operation
    assert error.waiting_for[1].operation == "hold_before_group"
    assert "in all_reduce" in error.stacks[0]
    assert "in hold_before_group" in error.stacks[1]
    assert pool.call("echo", "late but fine", timeout=30) == "late but fine"


def test_a_call_is_late_also_amid_an_abort_without_a_cause(gate: Gate) -> None:
    with WorkerPool(Worker, tp=2, config=PoolConfig(settle_seconds=30.0)) as pool:
        with pytest.raises(CallTimeoutError, match="timed out after 1 s, waiting for rank "):
            pool.call("abort_and_hold", gate, timeout=1.0)
        gate.open()


def test_a_wait_for_a_future_may_be_made_again(pool: WorkerPool, gate: Gate) -> None:
    future = pool.submit("hold", gate, [1], timeout=math.inf)
    until(lambda: gate.reached(1))
    for wait in (future.result, future.exception):
        with pytest.raises(CallTimeoutError) as raised:
            wait(0.3)
        assert_says_who_is_late(raised.value, 0.3)
        with pytest.raises(ValueError, match="timeout must be"):
            wait(math.nan)
    gate.open()
    assert future.result(30) == 0


def test_a_call_that_waits_behind_others_is_told_so(pool: WorkerPool, gate: Gate) -> None:
    busy = [pool.submit("hold", gate, [1], timeout=60.0) for _ in range(3)]
    queued = pool.submit("note", 3000, timeout=0.3)
    until(lambda: gate.reached(1))
    told = (
        r"after 0.3 s \(not sent: the workers are busy with calls before it, the first "
        rf"waits for (rank 0 .*; )?rank 1 \(pid {pool.status()[1].pid}\), "
        r"last seen in hold #\d+, [0-9.]+ s ago\)"
    )
    with pytest.raises(CallTimeoutError, match=told):
        queued.result()
    gate.open()
    for future in busy:
        future.result(timeout=30)
    assert 3000 not in pool.call("note", 3001)


def test_a_call_that_waits_behind_no_other_is_not_told_so(pool: WorkerPool) -> None:
    with pool._driver.dispatcher._sending as mine:  # the sender comes late
        assert mine
        future = pool.submit("echo", 1)
        with pytest.raises(CallTimeoutError, match=r"after 0.1 s \(not sent in that time\)"):
            future.result(0.1)
    assert future.result(PATIENCE_SECONDS) == 1


@pytest.mark.parametrize("seconds", [3e6, 1e300, math.inf])
def test_limits_that_no_system_call_takes_leave_deaths_noticed(seconds: float) -> None:
    """poll(2) takes 24 days at most, a lock 292 years."""
    config = PoolConfig(call_seconds=seconds, settle_seconds=seconds, kill_seconds=seconds)
    with WorkerPool(
        Worker, tp=2, start_timeout=seconds, stuck_after=seconds, config=config
    ) as pool:
        assert pool.submit("echo", 1, timeout=seconds).result(PATIENCE_SECONDS) == 1
        until(lambda: pool.status()[1].state == "idle")
        os.kill(pool.status()[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="rank 1"):
            pool.submit("sleep", 60).result(PATIENCE_SECONDS)
        pool.shutdown(seconds)


@pytest.mark.parametrize("kind", [WorkerPool, Replicas])
def test_a_time_that_is_none_leaves_the_pool_as_it_is(kind: Any) -> None:
    timeouts: list[Any] = [-1.0, math.nan, "5"]
    with kind(Worker, dp=1) as pool:
        for timeout in timeouts:
            wrong = pytest.raises(
                (ValueError, TypeError), match=f"timeout must .*; got {timeout!r}"
            )
            with wrong:
                pool.shutdown(timeout)
            with wrong:
                pool.call("echo", 1, timeout=timeout)
        assert pool.call("echo", 1) == 1


@pytest.mark.parametrize("error", [AttributeError, SystemExit])
def test_a_supervisor_that_fails_ends_the_pool_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[BaseException],
) -> None:
    def fail(*_: object) -> float:
        raise error("no such thing")

    config = PoolConfig(kill_seconds=1.0)
    with WorkerPool(Worker, tp=2, config=config) as pool:
        pids = pids_of(pool)
        monkeypatch.setattr(CallTable, "tick", fail)
        with pytest.raises(CoordinatorError, match=r"supervisor has failed.*no such thing"):
            pool.submit("hold_python", [1]).result(PATIENCE_SECONDS)
        assert pool.failure is not None
        # One hangs in native code: nobody else would end it.
        until(lambda: not any(map(psutil.pid_exists, pids)), "workers are left")
    assert "the thread that watches the workers has failed" in caplog.text


# Who holds up the others.


@pytest.fixture
def fresh() -> Iterator[WorkerPool]:
    with WorkerPool(Worker, tp=2) as pool:
        yield pool
        pool.shutdown(0.2)


def late_error(pool: WorkerPool, method: str, *args: object) -> CallTimeoutError:
    error = pool.submit(method, *args, timeout=0.8).exception()
    assert isinstance(error, CallTimeoutError)
    return error


@pytest.mark.parametrize(
    ("method", "args", "late", "blocked_by", "text"),
    [
        (
            *("skip_group", (1,), [0], (1,)),
            "(rank 1 (pid {1}) holds up others: it is idle, and waits for the next",
        ),
        (
            *("hang_in_group", (1,), [0, 1], (1,)),
            "(rank 1 (pid {1}) holds up others: it waits for no other process; last seen in",
        ),
        (
            *("cross", (), [0, 1], (0, 1)),
            "(rank 0 (pid {0}) and rank 1 (pid {1}) wait for each other)",
        ),
    ],
)
def test_a_late_call_names_who_holds_up_the_others(
    fresh: WorkerPool,
    method: str,
    args: tuple[Any, ...],
    late: list[int],
    blocked_by: tuple[int, ...],
    text: str,
) -> None:
    pids = pids_of(fresh)
    error = late_error(fresh, method, *args)
    assert [each.rank for each in error.waiting_for] == late
    assert (error.blocked_by, text.format(*pids) in str(error)) == (blocked_by, True)
    if method == "hang_in_group":
        told = fresh.hang_report()
        for said in (f"(pid {pids[1]}) holds up others", f"(pid {pids[0]}) waits for rank 1"):
            assert sum(said in line for line in told) == 1, told


@pytest.mark.parametrize("tp", [1, 2])
def test_a_worker_that_is_stopped_is_named_and_ends_with_the_pool(tp: int) -> None:
    with WorkerPool(Worker, tp=tp) as pool:
        pids = pids_of(pool)
        os.kill(pids[-1], signal.SIGSTOP)
        error = late_error(pool, "total", 1.0)
        pool.shutdown(timeout=1.0)
        assert not any(map(psutil.pid_exists, pids))
    assert error.blocked_by == (tp - 1,)
    assert f"rank {tp - 1} (pid {pids[-1]})" in str(error)
    assert "holds up others: its process is stopped, by a signal or a debugger" in str(error)


def activities(pool: WorkerPool) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(each.state, each.activity, each.waits_for) for each in pool.status()]


def test_ranks_are_idle_computing_or_waiting_for_others(fresh: WorkerPool) -> None:
    idle = [("idle", "idle", (DRIVER_RANK,))] * 2
    until(lambda: activities(fresh) == idle)
    assert fresh.hang_report() == []
    hangs = fresh.submit("hang_in_group", 1, 3.0)
    until(lambda: activities(fresh) == [("busy", "waiting", (1,)), ("busy", "computing", ())])
    assert fresh.status()[1].operation == "hang_in_group"
    assert hangs.result(PATIENCE_SECONDS) == 2.0
    until(lambda: activities(fresh) == idle)
    fresh.shutdown()
    assert fresh.hang_report() == []


def test_pools_are_not_blamed_for_each_other(fresh: WorkerPool) -> None:
    with WorkerPool(Worker, tp=2) as other:
        held = other.submit("skip_group", 0)
        error = late_error(fresh, "skip_group", 1)
        assert error.blocked_by == (1,)
        assert str(error).count("rank 1 (pid ") == 1
        assert not held.done()
        other.shutdown(0.2)
    workers = dict(fresh._driver._processes.workers)
    workers[2] = RemoteWorker(2, 1, post=Mock())
    workers[2].pid = workers[1].pid
    assert blocked_by(workers)[1] == (1,)
    workers[2].close()


class Meeting(Worker):
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


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The logged lines without numbers of operations, which depend on what a rank did before."""
    return [re.sub(r" #\d+", "", record.getMessage()) for record in caplog.records]


def test_a_late_start_names_the_culprit() -> None:
    given = {"late": 2, "how": "sleeps"}
    with pytest.raises(WorkerStartError, match="not ready after 3 s") as raised:
        WorkerPool(Meeting, tp=3, start_timeout=3.0, worker_kwargs=given)
    assert "(late: 0, 1, 2; rank 2 (pid " in str(raised.value)
    assert " holds up others: it waits for no other process" in str(raised.value)
    assert raised.value.rank == 2
    assert "in __init__" in raised.value.traceback
    assert "barrier" not in raised.value.traceback


def test_a_start_that_takes_longer_than_stuck_after_succeeds_while_a_rank_works() -> None:
    given = {"late": 2, "how": "comes late"}
    with WorkerPool(Meeting, tp=3, stuck_after=0.3, worker_kwargs=given) as pool:
        assert pool.call("echo", 1) == 1


@pytest.mark.parametrize(
    ("how", "ranks", "why"),
    [
        ("is stopped", {2}, "its process is stopped, by a signal or a debugger"),
        ("takes no part", {0, 1}, "it waits in world barrier for rank 2, which has started"),
    ],
)
def test_a_stuck_first_start_fails(how: str, ranks: set[int], why: str) -> None:
    given = {"late": 2, "how": how}
    with pytest.raises(WorkerStartError) as raised:
        WorkerPool(Meeting, tp=3, stuck_after=0.5, worker_kwargs=given)
    assert raised.value.rank in ranks
    assert re.sub(r" #\d+", "", raised.value.reason) == f"stuck for 0.5 s: {why}"


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
def test_a_stuck_replacement_is_replaced(
    how: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"how": how}
    patient = PoolConfig(leave_seconds=PATIENCE_SECONDS)
    with WorkerPool(
        Rejoining, tp=2, worker_kwargs=given, restart="worker", stuck_after=0.5, config=patient
    ) as pool:
        with pytest.raises(WorkerLostError):
            pool.call("exit", [1], 3)
        assert pool.call("total", 2.0, timeout=PATIENCE_SECONDS) == 4.0
        assert pool.generation == 3
    told = messages(caplog)
    assert f"the worker of rank 1 does not start: {why}" in told
    failed = f"the worker of rank 1 did not start: stuck for 0.5 s: {why}"
    assert any(failed in each for each in told)


def test_a_replacement_stopped_at_its_begin_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
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
