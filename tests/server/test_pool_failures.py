"""What breaks a pool: each test has one of its own, and nothing of it may be left."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from benchmarks.http_served import gone
from server.config import PoolConfig
from server.errors import (
    CallTimeoutError,
    PoolClosedError,
    WorkerError,
    WorkerLostError,
    WorkerStartError,
)
from server.pool import WorkerPool
from shm_broadcast import CoordinatorError
from tests.patience import NAMED_WITHIN, PATIENCE_SECONDS, STALL_SECONDS, quickest, until
from tests.server.workers import BadInputError, Failing, FailingLast, Gate, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(Worker, tp=2) as pool:
        yield pool


@pytest.fixture(params=["fork", "spawn"])
def either_pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """However its workers were started."""
    with WorkerPool(Worker, tp=2, config=PoolConfig(fork=request.param == "fork")) as pool:
        yield pool


@pytest.fixture
def patient_pool() -> Iterator[WorkerPool]:
    """Ranks may be late to answer a call that another one has failed."""
    with WorkerPool(Worker, tp=2, config=PoolConfig(settle_seconds=30.0)) as pool:
        yield pool


def pids_of(pool: WorkerPool) -> list[int]:
    return [status.pid for status in pool.status()]


def workers_left() -> list[int]:
    """The workers among this process's children; other tests may have children of their own."""
    return [child.pid for child in psutil.Process().children() if may_be_worker(child)]


def may_be_worker(child: psutil.Process) -> bool:
    try:
        return child.name() in ("pool-reaper", "pool-worker")
    except psutil.ZombieProcess:
        return True
    except psutil.NoSuchProcess:
        return False


def assert_gone(pids: list[int], seconds: float = 5.0 + STALL_SECONDS) -> None:
    """Of ``pids`` nothing is left: neither running nor a zombie."""
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < end, f"left after {seconds} s: {left}"
        time.sleep(0.02)


def after(seconds: float, act: Callable[[], Any]) -> list[float]:
    """Run ``act`` later, in a thread; the list gets the time of it."""
    acted: list[float] = []

    def wait() -> None:
        time.sleep(seconds)
        acted.append(time.monotonic())
        act()

    threading.Thread(target=wait, daemon=True).start()
    return acted


@pytest.mark.parametrize(("victim", "call"), [(0, "sleep"), (1, "hang_in_group")])
def test_a_killed_worker_fails_all_calls_within_a_second_and_nothing_is_left(
    victim: int, call: str
) -> None:
    def attempt() -> float:
        with WorkerPool(Worker, tp=2) as pool:
            return seconds_until_all_failed(pool, victim, call)

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


def seconds_until_all_failed(pool: WorkerPool, victim: int, call: str) -> float:
    pids = pids_of(pool)
    queued = [pool.submit("echo", turn) for turn in range(5)]
    assert [future.result(timeout=30) for future in queued] == list(range(5))
    argument = 600.0 if call == "sleep" else victim
    waiting = [pool.submit(call, argument) for _ in range(4)]
    killed = after(0.3, lambda: os.kill(pids[victim], signal.SIGKILL))
    with pytest.raises(WorkerLostError) as raised:
        pool.call(call, argument)
    seconds = time.monotonic() - killed[0]
    assert raised.value.rank == victim
    assert raised.value.pid == pids[victim]
    assert raised.value.end == "killed by SIGKILL"
    for future in waiting:
        error = future.exception(timeout=1.0 + STALL_SECONDS)
        assert isinstance(error, WorkerLostError)
        assert error.rank == victim
    assert_gone(pids)
    with pytest.raises(WorkerLostError, match=f"rank {victim}") as later:
        pool.call("echo")
    assert "takes no more calls" in later.value.__notes__[-1]
    with pytest.raises(WorkerLostError):
        pool.submit("echo")
    return seconds


def test_a_killed_worker_is_named_though_a_peer_noticed_before_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.calls.call_table.REPORT_SECONDS", 60.0)
    driver_looks = threading.Event()
    with WorkerPool(Worker, tp=2, on_progress=lambda *_: driver_looks.wait(60)) as pool:
        pids = pids_of(pool)
        pool.call("progress", 1)
        waiting = pool.submit("hang_in_group", 1)
        until(lambda: "all_reduce" in pool.status()[0].operation)
        os.kill(pids[1], signal.SIGKILL)
        until(lambda: pool.status()[0].state == "lost")
        driver_looks.set()
        error = waiting.exception(timeout=30)
        assert isinstance(error, WorkerLostError)
        assert (error.rank, error.pid, error.end) == (1, pids[1], "killed by SIGKILL")
    assert_gone(pids, 0.0)


def test_a_worker_killed_between_calls_fails_the_next_one(pool: WorkerPool) -> None:
    pids = pids_of(pool)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerLostError, match="rank 1"):
        pool.call("total", 1.0)
    assert_gone(pids)


def test_a_signal_without_a_name_is_said_by_its_number() -> None:
    with WorkerPool(Worker, tp=2, restart="worker") as pool:
        os.kill(pids_of(pool)[1], signal.SIGRTMIN + 3)
        with pytest.raises(WorkerLostError, match=f"killed by signal {signal.SIGRTMIN + 3}"):
            pool.call("sleep", 60.0)
        assert pool.call("total", 1.0, timeout=60) == 2.0


def test_a_workers_traceback_arrives_while_its_peers_wait_for_it() -> None:
    def attempt() -> float:
        with WorkerPool(Worker, tp=2) as pool:
            return seconds_until_traceback(pool)

    assert quickest(attempt, 1.0) < 1.0


def seconds_until_traceback(pool: WorkerPool) -> float:
    pids = pids_of(pool)
    began = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 .*fail_in_group: .*not me") as raised:
        pool.call("fail_in_group", [1])
    seconds = time.monotonic() - began
    assert isinstance(raised.value.__cause__, BadInputError)
    assert "in fail_in_group" in raised.value.traceback
    with pytest.raises(WorkerError, match=r"rank 1 .*fail_in_group"):
        pool.call("echo", timeout=10)
    assert_gone(pids)
    return seconds


@pytest.mark.parametrize("wait", [True, False])
def test_a_rank_that_aborts_its_group_is_the_first_failure(
    patient_pool: WorkerPool, wait: bool
) -> None:
    """The others end at once, and quietly; they must not be taken for the cause."""
    pids = pids_of(patient_pool)
    with pytest.raises(WorkerError, match=r"rank 1 .*abort_board: .*DivergenceError"):
        patient_pool.call("abort_board", [1], wait)
    with pytest.raises(WorkerError, match=r"rank 1 .*abort_board"):
        patient_pool.call("echo", timeout=10)
    assert_gone(pids)


@pytest.mark.parametrize("rank", [0, 2])
def test_who_aborts_its_group_is_the_first_failure_though_it_tells_last(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may keep it from telling, for longer than failed calls may take."""
    with WorkerPool(Worker, tp=3, config=PoolConfig(settle_seconds=0.0)) as pool:
        pids = pids_of(pool)
        failing = BadInputError("not me")
        with pytest.raises(WorkerError, match=rf"rank {rank} .*tell_last: .*: not me"):
            pool.call("tell_last", rank, failing)
        with pytest.raises(WorkerError, match=rf"rank {rank} .*tell_last: .*: not me"):
            pool.call("echo", timeout=10)
        assert_gone(pids)


def test_whose_own_thread_has_aborted_its_group_is_the_first_failure() -> None:
    """Though all that it raises itself is that the group was aborted."""
    with WorkerPool(Worker, tp=3, config=PoolConfig(settle_seconds=30.0)) as pool:
        pids = pids_of(pool)
        told = r"rank 1 .*tell_last: .*GroupAbortedError: .*rank 1 reported: .*not me"
        with pytest.raises(WorkerError, match=told):
            pool.call("tell_last", 1, BadInputError("not me"), apart=True)
        assert_gone(pids)


def test_who_aborts_its_group_and_never_says_why_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.calls.call_table.REPORT_SECONDS", 0.1)
    with WorkerPool(Worker, tp=3, config=PoolConfig(settle_seconds=0.0)) as pool:
        pids = pids_of(pool)
        with pytest.raises(CoordinatorError, match=r"rank 1 reported: .*nobody says why"):
            pool.call("abort_and_stay", 1, timeout=PATIENCE_SECONDS)
        assert_gone(pids)


def test_a_call_that_the_first_stage_refuses_fails_alone() -> None:
    """Also while later stages are busy, for longer than failed calls may take, with others."""
    with WorkerPool(Worker, pp=3, config=PoolConfig(settle_seconds=2.5)) as pool:
        busy = [3.0, *[0.0] * 5]
        futures = [pool.submit("relay", turn % 2 == 1, busy[turn]) for turn in range(6)]
        for turn, future in enumerate(futures):
            if turn % 2:
                error = future.exception(timeout=30)
                assert isinstance(error, WorkerError)
                assert (error.rank, error.message) == (0, "no")
                assert isinstance(error.__cause__, BadInputError)
            else:
                assert future.result(timeout=30) == "done"
        assert pool.call("relay", False) == "done"


def test_failing_calls_among_others_fail_alone(patient_pool: WorkerPool) -> None:
    """What a rank tells of a failure may overtake its replies to earlier calls."""
    futures = [patient_pool.submit("fail", [0, 1] if turn % 2 else []) for turn in range(400)]
    for turn, future in enumerate(futures):
        if turn % 2:
            assert isinstance(future.exception(timeout=30), WorkerError)
        else:
            assert future.result(timeout=30) == "fine"


def test_a_callback_cannot_wait_for_the_end_of_its_pool(pool: WorkerPool, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    caught: list[BaseException] = []

    def callback(_: Any) -> None:
        try:
            pool.shutdown()
        except RuntimeError as error:
            caught.append(error)

    pool.submit("hold", gate).add_done_callback(callback)
    gate.open()
    pool.shutdown()
    assert "callback of its own" in str(caught[0])


def test_a_pool_breaks_when_a_message_was_left_half_done(pool: WorkerPool) -> None:
    """Going on would give the next receiver what was sent in the failed call."""
    with pytest.raises(WorkerError, match="before it received"):
        pool.call("send_then_fail")
    with pytest.raises(WorkerError, match="before it received"):
        pool.call("echo", timeout=10)


def test_an_answer_that_ends_the_thread_that_reads_it_breaks_the_pool(pool: WorkerPool) -> None:
    told = r"the thread pool-collector has failed: SystemExit\('left when unpickled'\)"
    with pytest.raises(CoordinatorError, match=told) as raised:
        pool.submit("make", "leaving").result(PATIENCE_SECONDS)
    assert isinstance(raised.value.__cause__, SystemExit)
    with pytest.raises(CoordinatorError, match=told):
        pool.call("echo")


def test_a_worker_that_leaves_says_how(pool: WorkerPool) -> None:
    with pytest.raises(WorkerLostError, match=r"rank 1 \(pid \d+\): exit status 3"):
        pool.call("exit", [1], 3)


SLEEPS = ["/bin/sleep", "600"]
WAITS = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.mark.parametrize(
    ("call", "given"), [("become", (SLEEPS,)), ("become", (WAITS,)), ("close_all", ())]
)
def test_a_worker_that_becomes_another_program_is_lost_at_once(
    either_pool: WorkerPool, call: str, given: tuple[list[str], ...]
) -> None:
    pids = pids_of(either_pool)
    either_pool.call("echo")
    called = time.monotonic()
    with pytest.raises(WorkerLostError, match=r"rank 1 .* another program \(exec\).* it ran /"):
        either_pool.call(call, 1, *given, timeout=PATIENCE_SECONDS)
    assert time.monotonic() < called + 1.0 + STALL_SECONDS
    assert_gone(pids)


def test_an_ordinary_end_that_is_not_seen_coming_is_told_as_one(
    monkeypatch: pytest.MonkeyPatch, either_pool: WorkerPool
) -> None:
    """As in a sandbox whose /proc does not show that a process ends."""
    monkeypatch.setattr("server.launchers.local.is_ending", lambda _: False)
    with pytest.raises(WorkerLostError, match=r"rank 1 .*exit status 7"):
        either_pool.call("exit", [1], 7, timeout=PATIENCE_SECONDS)


def test_a_worker_that_becomes_another_program_is_replaced() -> None:
    with WorkerPool(Worker, tp=2, restart="worker") as pool:
        with pytest.raises(WorkerLostError, match=r"rank 1 .* it ran .*/sleep$"):
            pool.call("become", 1, SLEEPS, timeout=PATIENCE_SECONDS)
        assert pool.call("total", 1.0, timeout=PATIENCE_SECONDS) == 2.0


def test_a_crash_comes_with_the_stack(
    capfd: pytest.CaptureFixture[str], either_pool: WorkerPool
) -> None:
    with pytest.raises(WorkerLostError, match="killed by SIGABRT") as raised:
        either_pool.call("crash", [0])
    assert "in crash" in raised.value.stack
    assert capfd.readouterr().err == ""


def test_a_worker_that_ends_comes_without_the_stack_of_an_earlier_call(
    either_pool: WorkerPool, tmp_path: Path
) -> None:
    gate = Gate(tmp_path)
    with pytest.raises(CallTimeoutError) as late:
        either_pool.call("hold", gate, timeout=0.2)
    assert "in hold" in late.value.stacks[1]
    gate.open()
    with pytest.raises(WorkerLostError, match=r"rank 1 .*exit status 7") as raised:
        either_pool.call("exit", [1], 7, timeout=PATIENCE_SECONDS)
    assert raised.value.stack == ""


def test_a_stack_shows_though_python_is_locked(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.open()
    config = PoolConfig(kill_seconds=0.2, stack_seconds=30.0)
    with WorkerPool(Worker, tp=2, config=config) as pool:
        pids = pids_of(pool)
        pool.submit("hold_python", [1], gate)
        until(lambda: gate.reached(1))
        with pytest.raises(TimeoutError) as raised:
            pool.call("echo", timeout=0.3)
        assert "in hold_python" in raised.value.stacks[1]  # type: ignore[attr-defined]
        pool.shutdown(timeout=1.0)
        assert_gone(pids, 0.0)


@pytest.mark.parametrize("how", ["killed", "shut down"])
def test_what_a_worker_started_goes_with_it(either_pool: WorkerPool, how: str) -> None:
    started = [either_pool.collective_rpc(start) for start in ("start_child", "start_daemon")]
    children = [child for each in started for child in each]
    assert all(psutil.pid_exists(child) for child in children)
    if how == "killed":
        os.kill(pids_of(either_pool)[0], signal.SIGKILL)
    else:
        either_pool.shutdown()
    assert_gone(children)


@pytest.mark.parametrize(("how", "status"), [("return", 0), ("leave", 4), ("raise", 1)])
def test_a_child_that_a_worker_forks_is_no_worker(pool: WorkerPool, how: str, status: int) -> None:
    """However it leaves the method, it answers no call and reports no failure."""
    assert pool.collective_rpc("fork", args=(how,)) == [status] * 2
    assert pool.call("total", 1.0) == 2.0


@pytest.mark.parametrize("written", [b"printed by a library\n", b"\0\0\0\2{}"])
def test_a_control_channel_that_is_written_to_breaks_the_pool_and_names_the_worker(
    pool: WorkerPool, written: bytes
) -> None:
    pids = pids_of(pool)
    with pytest.raises(WorkerError, match=r"rank [01] .*control channel"):
        pool.call("scribble", written)
    assert isinstance(pool.failure, WorkerError)
    assert not pool.failure.traceback  # what failed is this process's decoding
    pool.shutdown()
    assert_gone(pids)


def test_a_reaper_that_is_killed_takes_its_worker_along(either_pool: WorkerPool) -> None:
    pids = pids_of(either_pool)
    reaper = psutil.Process(pids[1]).ppid()
    os.kill(reaper, signal.SIGKILL)
    with pytest.raises(WorkerLostError, match=r"rank 1 \(pid \d+\): killed by SIGKILL") as raised:
        either_pool.call("sleep", 600.0)
    assert raised.value.pid == pids[1]
    assert_gone([reaper, pids[0]])
    assert gone(pids)  # init is the parent of rank 1 now, and reaps in its own time


def test_what_a_worker_adopted_is_not_left_as_a_zombie(pool: WorkerPool) -> None:
    daemon = pool.call("start_daemon")
    os.kill(daemon, signal.SIGKILL)
    assert_gone([daemon])
    assert pool.call("echo", 1) == 1


def test_a_stopped_worker_can_be_shut_down(pool: WorkerPool) -> None:
    pids = pids_of(pool)
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(TimeoutError, match="rank 1"):
        pool.call("echo", timeout=0.3)
    pool.shutdown(timeout=1.0)
    assert_gone(pids, 0.0)


def test_shutdown_lets_calls_finish_and_refuses_new_ones(pool: WorkerPool) -> None:
    pids = pids_of(pool)
    futures = [pool.submit("note", turn, 0.1) for turn in range(6)]
    pool.shutdown()
    assert [len(future.result(timeout=0)) for future in futures] == [1, 2, 3, 4, 5, 6]
    assert_gone(pids, 0.0)
    for refused in (lambda: pool.call("echo"), lambda: pool.submit("echo"), pool.status):
        with pytest.raises(PoolClosedError):
            refused()
    pool.shutdown()


def test_shutdown_ends_calls_that_do_not_finish(pool: WorkerPool) -> None:
    pids = pids_of(pool)
    futures = [pool.submit("hang_in_group", 1), pool.submit("echo")]
    began = time.monotonic()
    pool.shutdown(timeout=1.0)
    assert time.monotonic() - began < 4.0 + STALL_SECONDS
    for future in futures:
        assert isinstance(future.exception(timeout=0), PoolClosedError)
    assert_gone(pids, 0.0)


def test_a_block_that_raises_ends_its_pool_at_once() -> None:
    class OddError(Exception):
        pass

    pids: list[int] = []

    def run() -> None:
        with WorkerPool(Worker) as pool:
            pids.extend(pids_of(pool))
            pool.submit("sleep", 600.0)
            raise OddError

    with pytest.raises(OddError):
        run()
    assert_gone(pids, 0.0)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", r"rank 1 did not start: .*BadInputError: no such model"),
        ("exit", "rank 1 did not start: exit status 7"),
    ],
)
def test_a_worker_that_cannot_start_says_why_though_others_still_load(how: str, text: str) -> None:
    heard: list[int] = []
    with pytest.raises(WorkerStartError, match=text) as raised:
        WorkerPool(
            Failing,
            tp=2,
            worker_kwargs={"rank": 1, "how": how},
            on_progress=lambda rank, *_: heard.append(rank),
        )
    assert raised.value.rank == 1
    if how == "raise":
        assert "in __init__" in raised.value.traceback
        assert isinstance(raised.value.__cause__, BadInputError)
    assert 1 in heard
    assert workers_left() == []


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("seconds", [0.0, PATIENCE_SECONDS])
def test_who_cannot_start_says_why_though_others_have_ended_before(
    rank: int, seconds: float
) -> None:
    config = PoolConfig(stack_seconds=seconds)
    with pytest.raises(WorkerStartError, match=f"rank {rank} did not start: .*no such model"):
        WorkerPool(FailingLast, tp=3, worker_kwargs={"rank": rank}, config=config)
    assert workers_left() == []


def test_a_start_that_takes_too_long_shows_where_it_is() -> None:
    with pytest.raises(WorkerStartError, match=r"not ready after 3 s \(late: 0, 1\)") as raised:
        WorkerPool(
            Failing,
            tp=2,
            worker_kwargs={"rank": 1, "how": "hang"},
            start_timeout=3,
            config=PoolConfig(stack_seconds=30.0),
        )
    assert raised.value.traceback.startswith("Stack (most recent call first):\n  File ")
    assert workers_left() == []


def test_what_on_progress_raises_ends_the_start() -> None:
    def refuse(*_: object) -> None:
        raise KeyError("no progress, please")

    with pytest.raises(KeyError, match="no progress, please"):
        WorkerPool(Failing, tp=2, worker_kwargs={"rank": 0, "how": "hang"}, on_progress=refuse)
    assert workers_left() == []


def test_a_worker_whose_loop_has_ended_is_lost_though_a_thread_of_it_goes_on() -> None:
    with WorkerPool(Worker) as pool:
        pool.call("break_its_loop")
        until(lambda: pool.failure is not None)
        assert isinstance(pool.failure, WorkerLostError)
        assert pool.failure.end == "exit status 1"
        assert pool.failure.stack.endswith("RuntimeError: out of the blue\n")
