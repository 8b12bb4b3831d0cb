"""A pool that is restarted: which workers stay, which calls run again, when it gives up."""

from __future__ import annotations

import gc
import math
import os
import re
import signal
import threading
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from server.config import PoolConfig, ServiceLimits
from server.driver.pool_driver import RestartBudget
from server.driver.worker_processes import WorkerProcesses
from server.errors import (
    CallDivergedError,
    CallStuckError,
    CallTimeoutError,
    PoolClosedError,
    RestartLimitError,
    StreamLostError,
    WorkerError,
    WorkerLostError,
    WorkerStartError,
)
from server.launchers.fork_servers import FORK_SERVERS
from server.pool import WorkerPool
from server.replicas import Replicas
from server.service.metrics import Metrics
from server.service.pool_service import InstrumentedPool
from server.workers.minilm import packaged_model
from shm_broadcast import DivergenceError
from tests.patience import PATIENCE_SECONDS, STALL_SECONDS, until
from tests.server.lean_model import Lean
from tests.server.workers import Gate, Rebuilt, Restored, Unlucky, Unrestorable, Worker, pids_of

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path


PATIENT = PoolConfig(leave_seconds=PATIENCE_SECONDS)
"""Survivors have time to leave, so that none is replaced only because the machine stalls."""


def patient(worker: type = Worker, tp: int = 2, **options: Any) -> WorkerPool:
    return WorkerPool(worker, tp=tp, **{"restart": "worker", "config": PATIENT, **options})


def break_by_death(pool: WorkerPool, victim: int = 1) -> None:
    with pytest.raises(WorkerLostError, match=f"rank {victim}"):
        pool.call("exit", [victim], 3)


@pytest.mark.parametrize(
    ("restart", "number", "text"),
    [
        ("worker", signal.SIGRTMIN + 3, f"signal {signal.SIGRTMIN + 3}"),
        ("pool", signal.SIGSEGV, "SIGSEGV"),
    ],
)
def test_a_killed_worker_is_replaced_and_calls_go_on(restart: str, number: int, text: str) -> None:
    with patient(restart=restart) as pool:
        before = pids_of(pool)
        assert (pool.generation, pool.restarting, pool.failure) == (1, None, None)
        lost = pool.submit("hang_in_group", 1)
        until(lambda: "all_reduce" in pool.status()[0].operation)
        os.kill(before[1], number)
        with pytest.raises(WorkerLostError, match=f"pid {before[1]}.* killed by {text}"):
            lost.result(PATIENCE_SECONDS)
        assert pool.call("total", 2.0, timeout=PATIENCE_SECONDS) == 4.0
        after = pids_of(pool)
        assert (after[0] == before[0], after[1] == before[1]) == (restart == "worker", False)
        assert (pool.generation, pool.restarting, pool.failure) == (2, None, None)
        assert [status.state for status in pool.status()] == ["idle", "idle"]


def test_every_rank_of_a_grid_can_be_replaced() -> None:
    with patient(tp=2, dp=2) as pool:
        before = pids_of(pool)
        for victim in range(4):
            with pytest.raises(WorkerLostError, match=f"rank {victim}"):
                pool.collective_rpc("exit", args=([victim], 3))
            assert pool.collective_rpc("total", args=(1.0,)) == [4.0] * 4
        assert not {*before} & {*pids_of(pool)}


def test_workers_that_can_be_restored_keep_what_they_hold() -> None:
    with patient(Restored) as pool:
        for victim, held in (
            (1, [["made in 1", "restored in 2"], ["made in 2"]]),
            (0, [["made in 3"], ["made in 2", "restored in 3"]]),
        ):
            break_by_death(pool, victim)
            assert pool.collective_rpc("holds") == held


def test_workers_that_cannot_be_restored_are_made_anew_in_their_process(tmp_path: Path) -> None:
    with patient() as pool:
        assert pool.collective_rpc("note", args=(7,)) == [[7], [7]]
        (survivor, _) = pids_of(pool)
        # The caller waits in its own thread meanwhile.
        assert pool.call("exit_once", tmp_path / "one", 1, retry=True) == "fine"
        assert pool.collective_rpc("note", args=(8,)) == [[8], [8]]
        assert pids_of(pool)[0] == survivor
        given = (tmp_path / "two", 0)
        assert pool.collective_rpc("exit_once", args=given, retry=True) == ["fine", "fine"]
        assert pool.generation == 3


@pytest.mark.parametrize(
    ("method", "arguments", "error"),
    [
        ("fail_in_group", ([1],), WorkerError),
        ("diverge", (), (CallDivergedError, DivergenceError, WorkerError)),
        ("send_then_fail", (), WorkerError),
    ],
)
def test_a_divided_group_ends_no_process(
    method: str, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    with patient(Restored) as pool:
        before = pids_of(pool)
        with pytest.raises(error):
            pool.call(method, *arguments)
        until(lambda: pool.generation == 2)
        assert pool.call("total", 2.0) == 4.0
        assert pids_of(pool) == before


def lose_in_the_second_of_five(pool: WorkerPool, gate: Gate, *, retry: bool) -> list[Future[Any]]:
    """Queue five calls of `append`; kill rank 1 in the second, in which rank 0 waits for it."""
    pid = pool.status()[1].pid
    calls = [pool.submit("append", 1)]
    calls.append(pool.submit("append", 2, gate, retry=retry))
    calls += [pool.submit("append", number, retry=retry) for number in (3, 4, 5)]
    until(lambda: gate.reached(1))
    until(lambda: "all_reduce" in pool.status()[0].operation)
    os.kill(pid, signal.SIGKILL)
    gate.open()
    return calls


def test_queued_calls_fail_with_the_workers_that_they_were_accepted_for(gate: Gate) -> None:
    """Else calls 4 and 5 run on a rank that lacks what calls 1 and 2 have left on the other."""
    with patient(Restored) as pool:
        first, *lost = lose_in_the_second_of_five(pool, gate, retry=False)
        assert first.result(PATIENCE_SECONDS) == [1]
        for call in lost:
            with pytest.raises(WorkerLostError, match=r"rank 1 .*SIGKILL"):
                call.result(PATIENCE_SECONDS)
        assert pool.collective_rpc("note", args=(6,)) == [[1, 2, 6], [6]]
        assert pool.generation == 2


def test_calls_that_may_be_made_again_run_in_order_on_workers_that_were_rebuilt(gate: Gate) -> None:
    with patient(Rebuilt) as pool:
        first, *again = lose_in_the_second_of_five(pool, gate, retry=True)
        answers = [call.result(PATIENCE_SECONDS) for call in again]
        assert first.result(0) == [1]
        assert answers == [[2], [2, 3], [2, 3, 4], [2, 3, 4, 5]]
        assert pool.collective_rpc("note", args=(6,)) == [[2, 3, 4, 5, 6]] * 2


def test_calls_that_may_be_made_again_outlive_what_their_neighbour_breaks() -> None:
    """Rank 0 waits in a collective that rank 1 leaves out, and meets there the next call's."""
    with patient(max_restarts=100) as pool:
        for turn in range(1, 3):
            before = [pool.submit("total", float(number), retry=True) for number in range(3)]
            slip = pool.submit("skip_group", 1)
            after = [pool.submit("total", float(number), retry=True) for number in range(3, 9)]
            with pytest.raises((CallDivergedError, WorkerError)):
                slip.result(PATIENCE_SECONDS)
            answers = [call.result(PATIENCE_SECONDS) for call in (*before, *after)]
            assert answers == [2.0 * number for number in range(9)]
            assert pool.restarts == turn


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_rank_that_hangs_is_replaced(is_stopped: bool, caplog: pytest.LogCaptureFixture) -> None:
    config = PoolConfig(leave_seconds=2.0 + STALL_SECONDS)
    with patient(Restored, stuck_after=0.5, config=config) as pool:
        before = pids_of(pool)
        if is_stopped:
            os.kill(before[1], signal.SIGSTOP)
        method, argument = ("total", 1.0) if is_stopped else ("hold_python", [1])
        with pytest.raises(CallStuckError, match=r"timed out after 0.5 s.*rank 1") as raised:
            pool.call(method, argument)
        assert pool.call("total", 2.0, timeout=PATIENCE_SECONDS) == 4.0
        after = pids_of(pool)
        assert (after[0] == before[0], after[1] == before[1]) == (True, False)
    if not is_stopped:
        assert "in hold_python" in raised.value.stacks[1]
        assert any("in hold_python" in record.getMessage() for record in caplog.records)


def test_a_service_logs_the_stack_of_a_stuck_call_once(caplog: pytest.LogCaptureFixture) -> None:
    limits = ServiceLimits(16, 16, 600.0, 600.0)
    with patient(tp=3, stuck_after=0.5, config=PoolConfig()) as pool:
        watched = InstrumentedPool(pool, Metrics(list, "embedding"), limits)
        with pytest.raises(CallStuckError) as raised, watched.counted([1]):
            pool.call("hang_in_group", 1)
        until(lambda: pool.generation == 2)
    assert raised.value.blocked_by == (1,)
    assert sorted(raised.value.stacks) == [0, 1, 2]
    assert re.findall("Stack of (.*):\n", caplog.text) == ["rank 1"]
    assert caplog.text.count("in hang_in_group\n") == 1
    assert "in all_reduce" not in caplog.text


@pytest.mark.parametrize("stuck_after", [None, math.inf])
def test_a_pool_does_not_stay_with_a_rank_that_hangs(stuck_after: float | None) -> None:
    """Without ``stuck_after`` it has `PoolConfig.call_seconds`; with infinity it has for ever."""
    config = PoolConfig(call_seconds=1.0)
    with patient(stuck_after=stuck_after, config=config) as pool:
        with pytest.raises(CallTimeoutError, match=r"timed out after 1 s.*rank 1"):
            pool.call("sleep", 600.0, [1])
        if stuck_after is None:
            until(lambda: pool.generation == 2)
            assert pool.call("total", 2.0, timeout=PATIENCE_SECONDS) == 4.0
            assert pool.last_failure is not None
            assert isinstance(pool.last_failure[1], CallStuckError)
        else:
            with pytest.raises(CallTimeoutError, match=r"timed out after 1 s.*rank 1"):
                pool.call("total", 2.0)
            assert (pool.generation, pool.last_failure) == (1, None)
            pool.shutdown(0.5)


def test_a_restart_in_vain_counts_once_the_pool_has_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    worked: list[bool] = []
    take = RestartBudget.take

    def note(budget: RestartBudget, now: float, has_worked: bool) -> float | None:
        worked.append(has_worked)
        return take(budget, now, has_worked)

    with patient(max_restarts=3) as pool:
        assert pool.call("echo", 1) == 1
        monkeypatch.setattr(RestartBudget, "take", note)
        monkeypatch.setattr(
            WorkerProcesses, "assemble", Mock(side_effect=OSError("no process is left"))
        )
        with pytest.raises(WorkerLostError):
            pool.call("exit", [1], 3)
        until(lambda: isinstance(pool.failure, RestartLimitError))
    assert worked == [True, False, False, False]


def test_a_pool_that_breaks_too_often_says_why_and_leaves_nothing() -> None:
    with patient(max_restarts=2) as pool:
        for _ in range(2):
            break_by_death(pool)
        pids = pids_of(pool)
        with pytest.raises(WorkerLostError):
            pool.call("exit", [0], 3)
        with pytest.raises(RestartLimitError, match=r"after 2 restarts within 60 s.*rank 0") as end:
            pool.call("echo", timeout=PATIENCE_SECONDS)
        assert isinstance(end.value.__cause__, WorkerLostError)
        assert isinstance(pool.failure, RestartLimitError)
        assert pool.restarting is None
        until(lambda: not any(map(psutil.pid_exists, pids)))
    with WorkerPool(Worker, tp=2, stuck_after=0.3) as pool:
        with pytest.raises(CallStuckError):
            pool.call("hang_in_group", 1)
        assert isinstance(pool.failure, CallStuckError)  # it has no restart at all


def test_a_start_that_fails_is_tried_again_unless_it_is_the_first() -> None:
    with pytest.raises(WorkerStartError, match="no luck in 1"):
        patient(Unlucky, worker_kwargs={"raises": [1], "hangs": []})
    with patient(Unlucky, worker_kwargs={"raises": [2, 3], "hangs": []}) as pool:
        break_by_death(pool, 0)
        assert pool.call("total", 2.0, timeout=PATIENCE_SECONDS) == 4.0


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_where_a_worker_cannot_be_restored_all_are_made_anew(how: str) -> None:
    limits: dict[str, Any] = {"start_timeout": 2.0 + STALL_SECONDS} if how == "hangs" else {}
    with patient(Unrestorable, 3, worker_kwargs={"how": how}, **limits) as pool:
        break_by_death(pool)
        assert pool.call("total", 1.0, timeout=PATIENCE_SECONDS) == 3.0
        assert pool.restarts == 1


def test_calls_wait_for_a_restart_during_which_the_pool_can_be_shut_down() -> None:
    hangs, given = threading.Event(), {"raises": [], "hangs": [2]}
    pool = patient(Unlucky, worker_kwargs=given, on_progress=lambda *_: hangs.set())
    break_by_death(pool, 0)
    assert isinstance(pool.restarting, WorkerLostError)
    assert pool.failure is None
    with pytest.raises(CallTimeoutError, match=r"the pool is being restarted after .*rank 0"):
        pool.call("echo", timeout=0.3)
    late = pool.submit("echo", timeout=0.3)
    assert isinstance(late.exception(PATIENCE_SECONDS), CallTimeoutError)
    waiting = pool.submit("echo")
    assert hangs.wait(PATIENCE_SECONDS)
    shut_down_soon(pool)
    assert isinstance(waiting.exception(0), PoolClosedError)
    left = [child for child in psutil.Process().children() if child.name() == "pool-reaper"]
    assert left == []


def shut_down_soon(pool: WorkerPool) -> None:
    ending = threading.Thread(target=pool.shutdown, args=(0.5,), daemon=True)
    ending.start()
    ending.join(5.0 + STALL_SECONDS)
    assert not ending.is_alive()


def test_a_shutdown_ends_the_start_of_a_fork_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module, hangs = tmp_path / "loaded_slowly.py", tmp_path / "hangs"
    module.write_text("")
    pool = WorkerPool(Worker, restart="worker", config=PoolConfig(preload=("loaded_slowly",)))
    module.write_text(
        f"import pathlib, time; pathlib.Path({str(hangs)!r}).touch(); time.sleep(600)"
    )
    FORK_SERVERS.close()
    break_by_death(pool, 0)
    until(hangs.exists)
    shut_down_soon(pool)


def test_a_stream_does_not_outlive_its_generators() -> None:
    with patient() as pool:
        stream = pool.stream("count", 100)
        assert next(stream) == 0
        assert next(stream) == 1
        break_by_death(pool)
        with pytest.raises((StreamLostError, WorkerLostError)):
            for _ in stream:
                pass
        with pool.stream("count", 3) as another:
            assert list(another) == [0, 1, 2]


def test_a_model_goes_on_where_it_was_and_starts_without_torchs_compiler() -> None:
    tokens = [np.array([101, 2, 3]), np.array([101])]
    options = {"model": str(packaged_model()), "threads": 1}
    with patient(Lean, worker_kwargs=options) as pool:
        expected = pool.call("embed", tokens)
        assert pool.collective_rpc("has", args=("torch._dynamo",)) == [False, False]
        before = [placed.pid for placed in pool.collective_rpc("placed")]
        os.kill(before[1], signal.SIGKILL)
        assert np.abs(pool.call("embed", tokens, retry=True) - expected).max() <= 1e-6
        after = [placed.pid for placed in pool.collective_rpc("placed")]
        assert (after[0] == before[0], after[1] == before[1]) == (True, False)


def test_restarts_leave_nothing_behind() -> None:
    def dispatching() -> list[str]:
        names = [thread.name for thread in threading.enumerate()]
        return sorted(name for name in names if name in ("pool-sender", "pool-collector"))

    def held() -> tuple[int, int, int]:
        # Those of the generation before end by themselves, and hold its memory until then.
        until(lambda: dispatching() == ["pool-collector", "pool-sender"])
        gc.collect()
        process = psutil.Process()
        return process.num_fds(), process.num_threads(), len(process.children(recursive=True))

    def worker_holds(pool: WorkerPool) -> tuple[int, int]:
        pool.call("hang_in_group", 1, 0.3)  # who waits looks whether the other lives
        process = psutil.Process(pool.collective_rpc("where")[0][1])
        return process.num_fds(), process.num_threads()

    with patient(Restored, max_restarts=100) as pool:
        for _ in range(2):
            break_by_death(pool)
        inside = worker_holds(pool)
        before = held()
        for _ in range(4):
            break_by_death(pool)
            assert pool.call("total", 1.0) == 2.0
        until(lambda: held() == before, f"{before} became {held()}")
        assert worker_holds(pool) == inside


# How often a pool may be restarted, and after which pause.


def test_restarts_are_counted_within_a_window_and_in_vain_however_long_they_take() -> None:
    budget = RestartBudget(2, 60.0)
    taken = [budget.take(now, worked=True) for now in (100.0, 110.0, 159.0, 160.5, 165.0)]
    assert taken == [0.0, 0.0, None, 0.0, None]
    budget = RestartBudget(2, 60.0)
    assert budget.take(100.0, worked=True) == 0.0
    taken = [budget.take(now, worked=False) for now in (400.0, 700.0, 1000.0)]
    assert taken == [0.0, 0.1, None]


def test_each_restart_in_vain_is_followed_by_a_longer_pause() -> None:
    budget = RestartBudget(100, 60.0)
    pauses = [budget.take(100.0 + turn, worked=False) for turn in range(9)]
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert budget.take(120.0, worked=True) == 0.0
    assert [budget.take(now, worked=False) for now in (121.0, 122.0)] == [0.0, 0.1]


# The operations of a pool's workers, counted through their replacement.


def counted(pool: WorkerPool | Replicas) -> list[tuple[int, int, int]]:
    found = []
    for totals in pool.totals().values():
        told = [each for each in totals if (each.group, each.verb) == ("world", "all_reduce")]
        found.append((told[0].ended, told[0].failed, told[0].size) if told else (0, 0, 0))
    return found


def test_all_operations_count_also_failed_ones_and_those_of_replaced_workers() -> None:
    with patient() as pool:
        for _ in range(5):
            pool.call("total", 1.0)
        size = counted(pool)[0][2]
        assert counted(pool) == [(5, 0, size)] * 2
        assert size > 0
        hangs = pool.submit("hang_in_group", 1)
        until(lambda: pool.status()[0].operation.endswith("all_reduce"))
        os.kill(pool.status()[1].pid, signal.SIGKILL)
        assert hangs.exception(PATIENCE_SECONDS) is not None
        until(lambda: pool.generation == 2 and pool.restarting is None)
        assert [each[:2] for each in counted(pool)] == [(6, 1), (5, 0)]
        for _ in range(3):
            pool.call("total", 1.0)
        assert [each[:2] for each in counted(pool)] == [(9, 1), (8, 0)]
        assert counted(pool)[1][2] == size * 8 // 5
    with pytest.raises(PoolClosedError):
        pool.totals()
