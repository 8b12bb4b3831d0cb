"""No call waits for ever, and however one waits, one is told the same."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from server.calls.call_table import CallTable
from server.config import PoolConfig
from server.errors import CallTimeoutError, WorkerLostError
from server.pool import WorkerPool
from shm_broadcast import CoordinatorError
from tests.patience import PATIENCE_SECONDS, STALL_SECONDS, until
from tests.server.workers import Gate, Worker, pids_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SECONDS = 1.5


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    patient = PoolConfig(call_seconds=SECONDS, settle_seconds=30.0, stack_seconds=30.0)
    with WorkerPool(Worker, tp=2, config=patient) as pool:
        yield pool


def assert_says_who_is_late(error: BaseException | None, seconds: float) -> None:
    assert isinstance(error, CallTimeoutError)
    assert str(error).startswith(f"hold: timed out after {seconds:g} s, waiting for rank 1 (pid ")
    assert error.method == "hold"
    assert list(error.stacks) == [1]
    assert "in pass_through" in error.stacks[1]


WAYS: dict[str, Callable[[WorkerPool, Gate], object]] = {
    "call": lambda pool, gate: pool.call("hold", gate, [1]),
    "collective_rpc": lambda pool, gate: pool.collective_rpc("hold", args=(gate, [1])),
    "submit": lambda pool, gate: pool.submit("hold", gate, [1]).result(),
    "exception": lambda pool, gate: _raise(pool.submit("hold", gate, [1]).exception()),
}


def _raise(error: BaseException | None) -> None:
    assert error is not None
    raise error


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_hangs_fails_by_itself(pool: WorkerPool, gate: Gate, way: str) -> None:
    with pytest.raises(CallTimeoutError) as raised:
        WAYS[way](pool, gate)
    assert_says_who_is_late(raised.value, SECONDS)
    gate.open()
    assert pool.call("echo", "the pool goes on", timeout=30) == "the pool goes on"


def test_a_time_of_its_own_ends_a_submitted_call(pool: WorkerPool, gate: Gate) -> None:
    began = time.monotonic()
    future = pool.submit("hold", gate, [1], timeout=0.5)
    error = future.exception()
    gate.open()
    assert_says_who_is_late(error, 0.5)
    assert time.monotonic() - began < SECONDS + STALL_SECONDS


def test_a_time_of_its_own_ends_a_call_also_while_it_is_unknown_why_the_groups_were_aborted(
    gate: Gate,
) -> None:
    with WorkerPool(Worker, tp=2, config=PoolConfig(settle_seconds=30.0)) as pool:
        with pytest.raises(CallTimeoutError, match="timed out after 1 s, waiting for rank "):
            pool.call("abort_and_hold", gate, timeout=1.0)
        gate.open()


def test_who_waits_for_a_future_in_vain_is_told_why_and_may_go_on(
    pool: WorkerPool, gate: Gate
) -> None:
    future = pool.submit("hold", gate, [1], timeout=math.inf)
    until(lambda: gate.reached(1))
    for wait in (future.result, future.exception):
        with pytest.raises(CallTimeoutError) as raised:
            wait(0.3)
        assert_says_who_is_late(raised.value, 0.3)
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


def test_nobody_waits_for_no_time(pool: WorkerPool) -> None:
    future = pool.submit("echo", 1)
    for wait in (future.result, future.exception):
        with pytest.raises(ValueError, match="timeout must be"):
            wait(math.nan)
    assert future.result(PATIENCE_SECONDS) == 1


def test_calls_are_not_late_while_others_are_answered(pool: WorkerPool) -> None:
    futures = [pool.submit("note", number, SECONDS / 5) for number in range(10)]
    assert pool.call("echo", "last") == "last"
    assert [future.exception(PATIENCE_SECONDS) for future in futures] == [None] * 10


def test_a_cancelled_call_fails_with_nothing(pool: WorkerPool, gate: Gate) -> None:
    held = [pool.submit("hold", gate, [1], timeout=60.0) for _ in range(2)]
    queued = [pool.submit("echo", timeout=0.3) for _ in range(2)]
    assert queued[0].cancel()
    assert isinstance(queued[1].exception(), CallTimeoutError)
    gate.open()
    for future in held:
        future.result(timeout=30)


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan])
def test_no_time_at_all_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="call_seconds must be more than 0"):
        PoolConfig(call_seconds=wrong)


@pytest.mark.parametrize("seconds", [3e6, 1e10, 1e300, math.inf])
def test_limits_that_no_system_call_takes_leave_deaths_noticed(seconds: float) -> None:
    """poll(2) takes 24 days at most, a lock 292 years."""
    config = PoolConfig(call_seconds=seconds, settle_seconds=seconds)
    with WorkerPool(
        Worker, tp=2, start_timeout=seconds, stuck_after=seconds, config=config
    ) as pool:
        assert pool.submit("echo", 1, timeout=seconds).result(PATIENCE_SECONDS) == 1
        until(lambda: pool.status()[1].state == "idle")
        os.kill(pool.status()[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="rank 1"):
            pool.submit("sleep", 60).result(PATIENCE_SECONDS)
        pool.shutdown(seconds)


@pytest.mark.parametrize("timeout", [None, math.inf])
def test_workers_may_have_for_ever_to_leave(timeout: float | None) -> None:
    with WorkerPool(Worker, config=PoolConfig(kill_seconds=math.inf)) as pool:
        (pid,) = [status.pid for status in pool.status()]
        last = pool.submit("sleep", 0.2)
        pool.shutdown(timeout)
        assert last.result(0) == 0
        assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("timeout", [-1.0, math.nan, "5"])
def test_a_time_that_is_none_leaves_the_pool_as_it_is(timeout: Any) -> None:
    wrong = pytest.raises((ValueError, TypeError), match=f"timeout must .*; got {timeout!r}")
    with WorkerPool(Worker) as pool:
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
