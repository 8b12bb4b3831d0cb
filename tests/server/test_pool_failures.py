"""The end of a worker or a call breaks the pool, names the culprit, and leaves nothing."""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import psutil
import pytest

from benchmarks.http_served import gone
from benchmarks.memory import shared_bytes
from server.config import PoolConfig
from server.errors import (
    CallTimeoutError,
    PoolClosedError,
    WorkerError,
    WorkerLostError,
    WorkerStartError,
)
from server.pool import WorkerPool
from shm_broadcast import Board, CoordinatorError, MessageQueue, PeerLostError
from tests.pages.blocks import block_of, without_numbers
from tests.patience import NAMED_WITHIN, PATIENCE_SECONDS, STALL_SECONDS, quickest, until
from tests.server.workers import (
    BadInputError,
    Failing,
    FailingLast,
    Gate,
    Restored,
    Worker,
    pids_of,
)
from tests.unshared import run_unshared

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(Worker, tp=2) as pool:
        yield pool


def workers_left() -> list[int]:
    """The workers among this process's children; other tests may have children of their own."""
    left = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            is_zombie = child.status() == psutil.STATUS_ZOMBIE
            if is_zombie or child.name() in ("pool-reaper", "pool-worker"):
                left.append(child.pid)
    return left


def assert_gone(pids: list[int], seconds: float = 5.0 + STALL_SECONDS) -> None:
    end = time.monotonic() + seconds
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < end, f"left after {seconds} s: {left}"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("victim", "call", "argument"), [(0, "sleep", 600.0), (1, "hang_in_group", 1)]
)
def test_a_killed_worker_fails_all_calls_within_a_second(
    victim: int, call: str, argument: float
) -> None:
    def seconds_until_all_failed() -> float:
        with WorkerPool(Worker, tp=2) as pool:
            pids = pids_of(pool)
            waiting = [pool.submit(call, argument) for _ in range(4)]
            until(lambda: pool.status()[0].state == "busy")
            killed = time.monotonic()
            os.kill(pids[victim], signal.SIGKILL)
            errors = [future.exception(timeout=1.0 + STALL_SECONDS) for future in waiting]
            seconds = time.monotonic() - killed
            for error in errors:
                assert isinstance(error, WorkerLostError)
                assert (error.rank, error.pid) == (victim, pids[victim])
                assert error.end == "killed by SIGKILL"
            assert_gone(pids)
            with pytest.raises(WorkerLostError, match=f"rank {victim}") as later:
                pool.call("echo")
            assert "takes no more calls" in later.value.__notes__[-1]
            with pytest.raises(WorkerLostError):
                pool.submit("echo")
            return seconds

    assert quickest(seconds_until_all_failed, NAMED_WITHIN) < NAMED_WITHIN


def test_a_killed_worker_is_named_though_a_peer_sees_it_first(
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


def test_a_workers_traceback_arrives_while_its_peers_wait_for_it() -> None:
    def seconds_until_traceback() -> float:
        with WorkerPool(Worker, tp=2) as pool:
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

    assert quickest(seconds_until_traceback, 1.0) < 1.0


NOT_ME = BadInputError("not me")


@pytest.mark.parametrize(
    ("method", "args", "settle_seconds", "text"),
    [
        ("abort_board", ([1], True), 30.0, "rank 1 .*abort_board: .*DivergenceError"),
        ("abort_board", ([1], False), 30.0, "rank 1 .*abort_board: .*DivergenceError"),
        # The machine may keep a rank from reporting for longer than failed calls may take.
        ("tell_last", (0, NOT_ME), 0.0, "rank 0 .*tell_last: .*: not me"),
        ("tell_last", (2, NOT_ME), 0.0, "rank 2 .*tell_last: .*: not me"),
        # All that it raises itself is that a thread of its own has aborted the group.
        (
            *("tell_last", (1, NOT_ME, True), 30.0),
            "rank 1 .*tell_last: .*GroupAbortedError: .*rank 1 reported: .*not me",
        ),
        ("abort_and_stay", (1,), 0.0, "rank 1 reported: .*nobody says why"),
    ],
)
def test_a_rank_that_aborts_its_group_is_the_first_failure(
    method: str,
    args: tuple[Any, ...],
    settle_seconds: float,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others end before it, and must not be taken for the cause; it may never say why."""
    if method == "abort_and_stay":
        monkeypatch.setattr("server.calls.call_table.REPORT_SECONDS", 0.1)
    with WorkerPool(Worker, tp=3, config=PoolConfig(settle_seconds=settle_seconds)) as pool:
        pids = pids_of(pool)
        with pytest.raises(CoordinatorError, match=text):
            pool.call(method, *args, timeout=PATIENCE_SECONDS)
        with pytest.raises(CoordinatorError, match=text):
            pool.call("echo", timeout=10)
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


def test_a_callback_cannot_wait_for_the_end_of_its_pool(pool: WorkerPool, gate: Gate) -> None:
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


WAITS = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.mark.parametrize(("call", "given"), [("become", (WAITS,)), ("close_all", ())])
def test_a_worker_that_runs_another_program_is_lost(
    pool: WorkerPool, call: str, given: tuple[list[str], ...]
) -> None:
    pids = pids_of(pool)
    pool.call("echo")
    called = time.monotonic()
    with pytest.raises(WorkerLostError, match=r"rank 1 .* another program \(exec\).* it ran /"):
        pool.call(call, 1, *given, timeout=PATIENCE_SECONDS)
    assert time.monotonic() < called + 1.0 + STALL_SECONDS
    assert_gone(pids)


def test_an_unforeseen_end_is_told_without_the_stack_of_an_earlier_call(
    monkeypatch: pytest.MonkeyPatch, pool: WorkerPool, gate: Gate
) -> None:
    """As in a sandbox whose /proc does not show that a process ends."""
    monkeypatch.setattr("server.launchers.local.is_ending", lambda _: False)
    with pytest.raises(CallTimeoutError) as late:
        pool.call("hold", gate, timeout=0.2)
    assert "in hold" in late.value.stacks[1]
    gate.open()
    with pytest.raises(WorkerLostError, match=r"rank 1 .*exit status 7") as raised:
        pool.call("exit", [1], 7, timeout=PATIENCE_SECONDS)
    assert raised.value.stack == ""


@pytest.mark.parametrize("fork", [True, False], ids=["fork", "spawn"])
def test_a_crash_has_its_stack_and_takes_along_what_the_worker_started(
    capfd: pytest.CaptureFixture[str], fork: bool
) -> None:
    with WorkerPool(Worker, config=PoolConfig(fork=fork)) as pool:
        daemon = pool.call("start_daemon")
        os.kill(daemon, signal.SIGKILL)
        assert_gone([daemon])  # nor is it a zombie
        children = [pool.call(start) for start in ("start_child", "start_daemon")]
        assert all(psutil.pid_exists(child) for child in children)
        with pytest.raises(WorkerLostError, match="killed by SIGABRT") as raised:
            pool.call("crash", [0])
        assert "in crash" in raised.value.stack
        assert_gone(children)
    assert capfd.readouterr().err == ""


def test_what_workers_started_goes_with_their_pool(pool: WorkerPool) -> None:
    children = [*pool.collective_rpc("start_child"), *pool.collective_rpc("start_daemon")]
    pool.shutdown()
    assert_gone(children)


def test_a_child_that_a_worker_forks_is_no_worker(pool: WorkerPool) -> None:
    for how, status in (("return", 0), ("leave", 4), ("raise", 1)):
        assert pool.collective_rpc("fork", args=(how,)) == [status] * 2
        assert pool.call("total", 1.0) == 2.0


@pytest.mark.parametrize("written", [b"printed by a library\n", b"\0\0\0\2{}"])
def test_garbage_in_a_control_channel_names_the_worker(pool: WorkerPool, written: bytes) -> None:
    pids = pids_of(pool)
    with pytest.raises(WorkerError, match=r"rank [01] .*control channel"):
        pool.call("scribble", written)
    assert isinstance(pool.failure, WorkerError)
    assert not pool.failure.traceback  # what failed is this process's decoding
    pool.shutdown()
    assert_gone(pids)


@pytest.mark.parametrize("fork", [True, False], ids=["fork", "spawn"])
def test_a_reaper_that_is_killed_takes_its_worker_along(fork: bool) -> None:
    with WorkerPool(Worker, tp=2 if fork else 1, config=PoolConfig(fork=fork)) as pool:
        *others, victim = pids_of(pool)
        reaper = psutil.Process(victim).ppid()
        os.kill(reaper, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="killed by SIGKILL") as raised:
            pool.call("sleep", 600.0)
        assert (raised.value.rank, raised.value.pid) == (len(others), victim)
        assert_gone([reaper, *others])
        assert gone([victim])  # init is its parent now, and reaps in its own time


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
    def run() -> None:
        with WorkerPool(Worker) as pool:
            pids.extend(pids_of(pool))
            pool.submit("sleep", 600.0)
            raise NotImplementedError

    pids: list[int] = []
    with pytest.raises(NotImplementedError):
        run()
    assert_gone(pids, 0.0)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", r"rank 1 did not start: .*BadInputError: no such model"),
        ("exit", "rank 1 did not start: exit status 7"),
        ("hang", r"not ready after 3 s \(late: 0, 1\)"),
    ],
)
def test_a_worker_that_cannot_start_says_why_though_others_still_load(how: str, text: str) -> None:
    seen: list[int] = []
    with pytest.raises(WorkerStartError, match=text) as raised:
        WorkerPool(
            Failing,
            tp=2,
            worker_kwargs={"rank": 1, "how": how},
            on_progress=lambda rank, *_: seen.append(rank),
            start_timeout=3 if how == "hang" else None,
            config=PoolConfig(stack_seconds=30.0),
        )
    if how == "hang":
        assert raised.value.traceback.startswith("Stack (most recent call first):\n  File ")
    else:
        assert raised.value.rank == 1
    if how == "raise":
        assert "in __init__" in raised.value.traceback
        assert isinstance(raised.value.__cause__, BadInputError)
    assert 1 in seen
    assert workers_left() == []


@pytest.mark.parametrize(("rank", "seconds"), [(0, 0.0), (2, PATIENCE_SECONDS)])
def test_a_worker_that_cannot_start_says_why_though_last(rank: int, seconds: float) -> None:
    config = PoolConfig(stack_seconds=seconds)
    with pytest.raises(WorkerStartError, match=f"rank {rank} did not start: .*no such model"):
        WorkerPool(FailingLast, tp=3, worker_kwargs={"rank": rank}, config=config)
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


# The shared memory of a pool: how much, and none of it in /dev/shm.


def test_all_groups_of_a_pool_of_four_share_at_most_64_mib() -> None:
    gc.collect()  # memory that earlier tests' pools had mapped
    with WorkerPool(Worker, tp=2, pp=2) as pool:
        pool.collective_rpc("total", args=(1.0,))
        assert 0 < shared_bytes([os.getpid(), *pids_of(pool)]) <= 64 << 20


LARGE_CALLS = """
import sys, torch
from server.pool import WorkerPool
from tests.server.workers import Worker

if __name__ == "__main__":
    with WorkerPool(Worker, tp=2) as pool:
        x = torch.arange(3 << 20, dtype=torch.int32)
        for reply in pool.collective_rpc("echo", args=(x,)):
            assert torch.equal(reply, x)
        assert pool.collective_rpc("total", args=(1.0,)) == [2.0] * 2
    print("served")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount a small /dev/shm")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare (util-linux) is missing")
def test_a_pool_works_beside_a_full_dev_shm(tmp_path: Path) -> None:
    script = tmp_path / "serve_large_calls.py"
    script.write_text(LARGE_CALLS)
    commands = (
        "mount -t tmpfs -o size=1m tmpfs /dev/shm && "
        "head -c 1M /dev/zero > /dev/shm/full && "
        'exec "$0" "$1"'
    )
    ended = run_unshared(
        ["--mount"],
        *("sh", "-c", commands, sys.executable, str(script)),
        timeout=120,
        OMP_NUM_THREADS="1",
    )
    assert (ended.stdout, ended.stderr) == ("served\n", "")


# The few events that are logged, with fields beside the text.

Events: TypeAlias = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Events:
    for package in ("server", "shm_broadcast"):
        caplog.set_level(logging.INFO, package)
    return lambda text: [each.__dict__ for each in caplog.records if text in each.getMessage()]


def assert_documented(message: str) -> None:
    """It is said like this in docs/debugging.md; three dots stand for anything."""
    lines = block_of("docs/debugging.md", "the pool has started: 2 workers").splitlines()
    known = [re.escape(without_numbers(line)).replace(r"\.\.\.", ".*") for line in lines]
    assert any(re.fullmatch(each, without_numbers(message)) for each in known), message


def test_a_pool_starts_loses_a_worker_and_is_restarted(events: Events) -> None:
    with WorkerPool(Restored, tp=2, restart="worker") as pool:
        pid = pool.status()[1].pid
        os.kill(pid, signal.SIGKILL)
        until(lambda: events("the pool was restarted"))
        (lost,) = events(f"rank 1 (pid {pid}) of the pool was lost: ")
        assert (lost["rank"], lost["generation"]) == (1, 1)
        started = events("the pool has started: 2 workers, generation ")
        assert [each["generation"] for each in started] == [1, 2]
        (broken,) = events("the pool has broken, and is restarted: ")
        (restarted,) = events("the pool was restarted: generation 2")
        assert (broken["generation"], restarted["generation"]) == (1, 2)
    for each in (started[0], lost):
        assert_documented(each["message"])


def test_a_group_is_aborted_once(events: Events) -> None:
    with Board.create(2, 0, "tp", (6, 7)) as board:
        board.abort(ValueError("no"), culprit=1)
        board.abort("later")
    (aborted,) = events("was aborted")
    assert "ValueError: no" in aborted["message"]
    assert (aborted["rank"], aborted["group"]) == (7, "tp")
    assert_documented(aborted["message"])


def test_a_reader_of_a_queue_is_lost(events: Events) -> None:
    with (
        Board.create(2, 0, "tp", (6, 7)) as board,
        MessageQueue.on_board(board, 0, [1], 1 << 16) as queue,
    ):
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                MessageQueue.attach(queue.export_handle(), Board.attach(board.handle(), 1))
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(1)
        os.waitpid(pid, 0)
        with pytest.raises(PeerLostError):
            queue.enqueue(bytes(1 << 20), PATIENCE_SECONDS)
    (lost,) = events("a reader of a queue was lost")
    assert (lost["rank"], lost["group"]) == (7, "tp")
    assert_documented(lost["message"])
