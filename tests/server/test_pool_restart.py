"""A pool that is restarted when it breaks: who stays, which calls go on, and when it gives up."""

from __future__ import annotations

import gc
import math
import os
import re
import signal
import threading
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from server.calls.call_table import CallTable
from server.calls.dispatcher import Dispatcher
from server.config import PoolConfig, ServiceLimits
from server.driver import pool_driver
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
from server.service.metrics import Metrics
from server.service.pool_service import InstrumentedPool
from shm_broadcast import DivergenceError
from tests.patience import PATIENCE_SECONDS, STALL_SECONDS, until
from tests.server.lean_model import Lean
from tests.server.tiny_bert import make_model
from tests.server.workers import Gate, Rebuilt, Restored, Unlucky, Unrestorable, Worker, pids_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from pathlib import Path

PATIENT = PoolConfig(leave_seconds=PATIENCE_SECONDS)
"""Survivors have time to leave, so that none is replaced only because the machine stalls."""


def break_by_death(pool: WorkerPool, victim: int = 1) -> None:
    with pytest.raises(WorkerLostError, match=f"rank {victim}"):
        pool.call("exit", [victim], 3)


@pytest.mark.parametrize(("restart", "stays"), [("worker", True), ("pool", False)])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_worker_is_replaced_and_calls_go_on(
    restart: str, stays: bool, number: signal.Signals
) -> None:
    with WorkerPool(Worker, tp=2, restart=restart, config=PATIENT) as pool:
        before = pids_of(pool)
        assert (pool.generation, pool.restarting, pool.failure) == (1, None, None)
        lost = pool.submit("hang_in_group", 1)
        until(lambda: "all_reduce" in pool.status()[0].operation)
        os.kill(before[1], number)
        with pytest.raises(WorkerLostError, match=f"pid {before[1]}.*{number.name}"):
            lost.result(PATIENCE_SECONDS)
        assert pool.call("total", 2.0, timeout=PATIENCE_SECONDS) == 4.0
        after = pids_of(pool)
        assert (after[0] == before[0], after[1] == before[1]) == (stays, False)
        assert (pool.generation, pool.restarting, pool.failure) == (2, None, None)
        assert [status.state for status in pool.status()] == ["idle", "idle"]


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 2, 1), (1, 1, 2)])
def test_every_rank_of_every_grid_can_be_replaced(tp: int, pp: int, dp: int) -> None:
    n = tp * pp * dp
    with WorkerPool(Worker, tp=tp, pp=pp, dp=dp, restart="worker", config=PATIENT) as pool:
        before = pids_of(pool)
        for victim in range(n):
            with pytest.raises(WorkerLostError, match=f"rank {victim}"):
                pool.collective_rpc("exit", args=([victim], 3))
            assert pool.collective_rpc("total", args=(1.0,)) == [float(n)] * n
        assert not {*before} & {*pids_of(pool)}


def test_workers_that_can_be_restored_keep_what_they_hold() -> None:
    with WorkerPool(Restored, tp=2, restart="worker", config=PATIENT) as pool:
        break_by_death(pool)
        assert pool.collective_rpc("holds") == [
            ["made in 1", "restored in 2"],
            ["made in 2"],
        ]
        break_by_death(pool, 0)
        assert pool.collective_rpc("holds") == [["made in 3"], ["made in 2", "restored in 3"]]


def test_workers_that_cannot_be_restored_are_made_anew_in_their_process() -> None:
    with WorkerPool(Worker, tp=2, restart="worker", config=PATIENT) as pool:
        assert pool.collective_rpc("note", args=(7,)) == [[7], [7]]
        (survivor, _) = pids_of(pool)
        break_by_death(pool)
        assert pool.collective_rpc("note", args=(8,)) == [[8], [8]]
        assert pids_of(pool)[0] == survivor


@pytest.mark.parametrize(
    ("method", "arguments", "error"),
    [
        ("fail_in_group", ([1],), WorkerError),
        ("diverge", (), (CallDivergedError, DivergenceError, WorkerError)),
        ("send_then_fail", (), WorkerError),
    ],
)
def test_a_failure_that_leaves_a_group_divided_ends_no_process(
    method: str, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    with WorkerPool(Restored, tp=2, restart="worker", config=PATIENT) as pool:
        before = pids_of(pool)
        with pytest.raises(error):
            pool.call(method, *arguments)
        until(lambda: pool.generation == 2)
        assert pool.call("total", 2.0) == 4.0
        assert pids_of(pool) == before


def test_calls_behind_one_that_leaves_a_group_divided_fail_with_it_or_are_made_again() -> None:
    """The others hang in the first, and the pool breaks only when they had time to answer."""
    with WorkerPool(
        *(Worker,), tp=2, restart="worker", config=PoolConfig(in_flight=3, settle_seconds=0.5)
    ) as pool:
        with pytest.raises(WorkerError, match="not me"):
            pool.call("fail_in_group", [0])
        behind = [pool.submit("total", 3.0, retry=retry) for retry in (False, True)]
        with pytest.raises(WorkerError, match=r"rank 0 .*fail_in_group.*not me"):
            behind[0].result(PATIENCE_SECONDS)
        assert behind[1].result(PATIENCE_SECONDS) == 6.0
        assert pool.restarts == 1


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


def test_queued_calls_fail_with_the_workers_that_they_were_accepted_for(tmp_path: Path) -> None:
    """Else calls 4 and 5 run on a rank that lacks what calls 1 and 2 have left on the other."""
    with WorkerPool(Restored, tp=2, restart="worker", config=PATIENT) as pool:
        first, *lost = lose_in_the_second_of_five(pool, Gate(tmp_path), retry=False)
        assert first.result(PATIENCE_SECONDS) == [1]
        for call in lost:
            with pytest.raises(WorkerLostError, match=r"rank 1 .*SIGKILL"):
                call.result(PATIENCE_SECONDS)
        assert pool.collective_rpc("note", args=(6,)) == [[1, 2, 6], [6]]
        assert pool.generation == 2


def test_calls_that_may_be_made_again_run_in_order_on_workers_that_were_rebuilt(
    tmp_path: Path,
) -> None:
    with WorkerPool(Rebuilt, tp=2, restart="worker", config=PATIENT) as pool:
        first, *again = lose_in_the_second_of_five(pool, Gate(tmp_path), retry=True)
        answers = [call.result(PATIENCE_SECONDS) for call in again]
        assert first.result(0) == [1]
        assert answers == [[2], [2, 3], [2, 3, 4], [2, 3, 4, 5]]
        assert pool.collective_rpc("note", args=(6,)) == [[2, 3, 4, 5, 6]] * 2


def test_calls_that_may_be_made_again_outlive_what_their_neighbour_breaks() -> None:
    """Rank 0 waits in a collective that rank 1 leaves out, and meets there the next call's."""
    with WorkerPool(Worker, tp=2, restart="worker", max_restarts=100, config=PATIENT) as pool:
        for turn in range(1, 6):
            before = [pool.submit("total", float(number), retry=True) for number in range(3)]
            slip = pool.submit("skip_group", 1)
            after = [pool.submit("total", float(number), retry=True) for number in range(3, 9)]
            with pytest.raises((CallDivergedError, WorkerError)):
                slip.result(PATIENCE_SECONDS)
            answers = [call.result(PATIENCE_SECONDS) for call in (*before, *after)]
            assert answers == [2.0 * number for number in range(9)]
            assert pool.restarts == turn


def test_a_call_waiting_in_its_own_thread_is_made_again(tmp_path: Path) -> None:
    with WorkerPool(Worker, tp=2, restart="worker", config=PATIENT) as pool:
        assert pool.call("exit_once", tmp_path / "one", 1, retry=True) == "fine"
        arguments = (tmp_path / "two", 0)
        assert pool.collective_rpc("exit_once", args=arguments, retry=True) == ["fine", "fine"]
        assert pool.generation == 3


def test_a_call_that_kills_its_workers_is_made_three_times() -> None:
    with WorkerPool(Worker, tp=2, restart="worker", config=PATIENT) as pool:
        other = pool.submit("echo", "fine", retry=True)
        with pytest.raises(WorkerLostError):
            pool.call("exit", [1], 3, retry=True)
        assert pool.call("echo", "still") == "still"
        assert other.result(PATIENCE_SECONDS) == "fine"
        assert pool.generation == 4


def hang_in_python(pool: WorkerPool, _: int) -> None:
    pool.call("hold_python", [1])


def hang_stopped(pool: WorkerPool, pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    pool.call("total", 1.0)


@pytest.mark.parametrize("hang", [hang_in_python, hang_stopped])
def test_a_rank_that_hangs_is_replaced_and_its_peers_stay(
    hang: Callable[[WorkerPool, int], None], caplog: pytest.LogCaptureFixture
) -> None:
    config = PoolConfig(leave_seconds=2.0 + STALL_SECONDS)
    with WorkerPool(Restored, tp=2, restart="worker", stuck_after=0.5, config=config) as pool:
        before = pids_of(pool)
        with pytest.raises(CallStuckError, match=r"timed out after 0.5 s.*rank 1") as raised:
            hang(pool, before[1])
        assert pool.call("total", 2.0, timeout=PATIENCE_SECONDS) == 4.0
        after = pids_of(pool)
        assert after[0] == before[0]
        assert after[1] != before[1]
    if hang is hang_in_python:
        assert "in hold_python" in raised.value.stacks[1]
        assert any("in hold_python" in record.getMessage() for record in caplog.records)


def test_a_service_logs_the_stack_of_the_culprit_of_a_stuck_call_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = ServiceLimits(16, 16, 600.0, 600.0)
    with WorkerPool(Worker, tp=3, restart="worker", stuck_after=0.5) as pool:
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
def test_a_pool_that_is_restarted_does_not_stay_with_a_rank_that_hangs(
    stuck_after: float | None,
) -> None:
    """Without ``stuck_after`` it has `PoolConfig.call_seconds`; with infinity it has for ever."""
    config = PoolConfig(call_seconds=1.0)
    with WorkerPool(Worker, tp=2, restart="worker", stuck_after=stuck_after, config=config) as pool:
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


def test_a_stuck_pool_that_is_not_restarted_breaks() -> None:
    with WorkerPool(Worker, tp=2, stuck_after=0.3) as pool:
        with pytest.raises(CallStuckError):
            pool.call("hang_in_group", 1)
        assert isinstance(pool.failure, CallStuckError)


def test_a_restart_in_vain_is_counted_as_one_though_the_pool_has_worked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worked: list[bool] = []
    take = RestartBudget.take

    def note(budget: RestartBudget, now: float, has_worked: bool) -> float | None:
        worked.append(has_worked)
        return take(budget, now, has_worked)

    with WorkerPool(Worker, tp=2, restart="worker", max_restarts=3, config=PATIENT) as pool:
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
    with WorkerPool(Worker, tp=2, restart="worker", max_restarts=2, config=PATIENT) as pool:
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


def test_a_start_that_fails_is_tried_again() -> None:
    unlucky = {"raises": [2, 3], "hangs": []}
    with WorkerPool(Unlucky, tp=2, worker_kwargs=unlucky, restart="worker", config=PATIENT) as pool:
        break_by_death(pool, 0)
        assert pool.call("total", 2.0, timeout=PATIENCE_SECONDS) == 4.0


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_where_a_worker_cannot_be_restored_all_are_made_anew(how: str) -> None:
    limits: dict[str, Any] = {"start_timeout": 3.0 + STALL_SECONDS} if how == "hangs" else {}
    with WorkerPool(
        Unrestorable, tp=3, worker_kwargs={"how": how}, restart="worker", config=PATIENT, **limits
    ) as pool:
        break_by_death(pool)
        assert pool.call("total", 1.0, timeout=PATIENCE_SECONDS) == 3.0
        assert pool.restarts == 1


def test_a_first_start_that_fails_is_not_tried_again() -> None:
    unlucky = {"raises": [1], "hangs": []}
    with pytest.raises(WorkerStartError, match="no luck in 1"):
        WorkerPool(Unlucky, tp=2, worker_kwargs=unlucky, restart="worker")


def test_calls_wait_while_the_pool_is_restarted_and_say_so_when_they_are_late() -> None:
    unlucky = {"raises": [], "hangs": [2]}
    with WorkerPool(Unlucky, tp=2, worker_kwargs=unlucky, restart="worker") as pool:
        break_by_death(pool, 0)
        assert isinstance(pool.restarting, WorkerLostError)
        assert pool.failure is None
        with pytest.raises(CallTimeoutError, match=r"the pool is being restarted after .*rank 0"):
            pool.call("echo", timeout=0.3)
        late = pool.submit("echo", timeout=0.3)
        assert isinstance(late.exception(PATIENCE_SECONDS), CallTimeoutError)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_pool_can_be_shut_down_while_a_worker_does_not_start(tp: int) -> None:
    hangs = threading.Event()
    pool = WorkerPool(
        Unlucky,
        tp=tp,
        worker_kwargs={"raises": [], "hangs": [2]},
        restart="worker",
        on_progress=lambda *_: hangs.set(),
    )
    break_by_death(pool, 0)
    waiting = pool.submit("echo")
    assert hangs.wait(PATIENCE_SECONDS)
    shut_down_soon(pool)
    assert isinstance(waiting.exception(0), PoolClosedError)
    left = [child for child in psutil.Process().children() if child.name() == "pool-reaper"]
    assert left == []


def test_a_pool_can_be_shut_down_while_a_fork_server_does_not_start(
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


def shut_down_soon(pool: WorkerPool) -> None:
    """Shut a pool down, in a thread that is left behind where it hangs."""
    ending = threading.Thread(target=pool.shutdown, args=(0.5,), daemon=True)
    ending.start()
    ending.join(5.0 + STALL_SECONDS)
    assert not ending.is_alive()


def test_a_stream_does_not_outlive_its_generators() -> None:
    with WorkerPool(Worker, tp=2, restart="worker", config=PATIENT) as pool:
        stream = pool.stream("count", 100)
        assert next(stream) == 0
        assert next(stream) == 1
        break_by_death(pool)
        with pytest.raises((StreamLostError, WorkerLostError)):
            for _ in stream:
                pass
        with pool.stream("count", 3) as another:
            assert list(another) == [0, 1, 2]


def test_a_lost_worker_takes_a_stream_that_is_closed_with_it_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(tmp_path)
    with WorkerPool(Worker, restart="worker", config=PATIENT) as pool:
        (pid,) = pids_of(pool)
        stream = pool.stream("count", 9)
        assert next(stream) == 0
        held = pool.submit("hold", gate)
        until(lambda: gate.reached(0))
        stream.close()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            held.result(PATIENCE_SECONDS)
        until(lambda: pool.restarts == 1)
    assert "could not be closed" not in caplog.text


def test_many_callers_get_their_own_results_or_a_typed_error_while_workers_die() -> None:
    wrong: list[Any] = []
    counted = {"right": 0, "lost": 0}
    over = threading.Event()

    def call(pool: WorkerPool, base: int) -> None:
        for turn in range(base, base + 100_000):
            if over.is_set():
                return
            try:
                if pool.call("echo", turn, retry=turn % 2 == 0) != turn:
                    wrong.append(turn)
                counted["right"] += 1
            except WorkerLostError:
                counted["lost"] += 1
            except Exception as error:  # noqa: BLE001 - the test shows it
                wrong.append(error)

    def more_than(calls: int) -> bool:
        return counted["right"] > calls

    def generation_is(number: int) -> bool:
        return pool.generation == number

    with WorkerPool(Worker, tp=2, restart="worker", max_restarts=100, config=PATIENT) as pool:
        threads = [threading.Thread(target=call, args=(pool, n * 1_000_000)) for n in range(6)]
        for thread in threads:
            thread.start()
        for turn in range(6):
            answered = counted["right"]
            until(partial(more_than, answered + 100))
            os.kill(pool.status()[turn % 2].pid, signal.SIGKILL)
            until(partial(generation_is, turn + 2))
        over.set()
        for thread in threads:
            thread.join(PATIENCE_SECONDS)
    assert wrong == []


def test_who_gets_an_answer_finds_the_restart_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def dispatch(*arguments: Any) -> Dispatcher:
        made = Dispatcher(*arguments)
        answered.wait(PATIENCE_SECONDS)
        return made

    with WorkerPool(Worker, restart="worker", config=PATIENT) as pool:
        monkeypatch.setattr(pool_driver, "Dispatcher", dispatch)
        break_by_death(pool, 0)
        assert pool.submit("total", 1.0).result(PATIENCE_SECONDS) == 1.0
        restarts = pool.restarts
        answered.set()
        assert restarts == 1


def test_a_restart_counts_once_the_pool_takes_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def begin(ledger: CallTable, *arguments: Any) -> None:
        seen.append((pool.restarts, pool.restarting is None))
        really_open(ledger, *arguments)
        seen.append((pool.restarts, pool.restarting is None))

    with WorkerPool(Worker, restart="worker", config=PATIENT) as pool:
        really_open = CallTable.open
        monkeypatch.setattr(CallTable, "open", begin)
        break_by_death(pool, 0)
        assert pool.submit("total", 1.0).result(PATIENCE_SECONDS) == 1.0
    assert seen == [(0, False), (1, True)]


def test_a_model_goes_on_where_it_was_and_starts_without_torchs_compiler(tmp_path: Path) -> None:
    make_model(tmp_path, heads=4)
    tokens = [np.array([1, 2, 3]), np.array([4])]
    options = {"model": str(tmp_path), "threads": 1}
    with WorkerPool(Lean, tp=2, worker_kwargs=options, restart="worker", config=PATIENT) as pool:
        expected = pool.call("embed", tokens)
        assert pool.collective_rpc("has", args=("torch._dynamo",)) == [False, False]
        for victim in (1, 0):
            before = [placed.pid for placed in pool.collective_rpc("placed")]
            os.kill(before[victim], signal.SIGKILL)
            assert np.abs(pool.call("embed", tokens, retry=True) - expected).max() <= 1e-6
            after = [placed.pid for placed in pool.collective_rpc("placed")]
            assert (after[victim], after[1 - victim]) != (before[victim], before[1 - victim])
            assert after[1 - victim] == before[1 - victim]


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

    with WorkerPool(Restored, tp=2, restart="worker", max_restarts=100, config=PATIENT) as pool:
        for _ in range(3):
            break_by_death(pool)
        inside = worker_holds(pool)
        before = held()
        for _ in range(10):
            break_by_death(pool)
            assert pool.call("total", 1.0) == 2.0
        until(lambda: held() == before, f"{before} became {held()}")
        assert worker_holds(pool) == inside
