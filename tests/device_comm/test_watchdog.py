"""Threads that end what blocks, and that run it; watching a group without a board."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from device_comm import LoneWatch
from device_comm.torch_waiting import HELPERS, ErrorTranslator, HelperThreads
from device_comm.watchdog import WATCHDOG, Issued, StreamWatch, Subject, call_watched
from shm_broadcast import NEVER, Board, Deadline, GroupAbortedError, GroupTimeoutError
from tests.device_comm.meeting import SOON
from tests.patience import until
from tests.refused_threads import refusing_threads
from tests.shm_broadcast.members import status_of
from tests.shm_broadcast.queues import Running

if TYPE_CHECKING:
    from device_comm.watch import Watch


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "watchdog"]


class Call:
    def __init__(self) -> None:
        self.ended = threading.Event()

    def __call__(self) -> None:
        assert self.ended.wait(10)
        raise RuntimeError("ended")

    def end(self, _: Exception) -> None:
        self.ended.set()

    def watched(self, watch: Watch, deadline: Deadline = NEVER) -> None:
        issued = Issued("receiving", deadline, [1])
        call_watched(self, issued, ErrorTranslator(watch), self.end)


@pytest.mark.parametrize(
    ("end", "raised", "text"),
    [
        ("abort", GroupAbortedError, "why"),
        ("deadline", GroupTimeoutError, r"receiving: timed out after 0\.1 s"),
        ("by itself", RuntimeError, "ended"),
        ("unwatched", OSError, "Too many open files"),
    ],
)
def test_a_call_that_blocks_is_ended_and_raises_the_reason(
    end: str, raised: type[Exception], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, call = LoneWatch(0), Call()
    if end == "abort":
        threading.Timer(0.1, watch.abort, (KeyError("why"),)).start()
    if end == "by itself":
        call.ended.set()
    if end == "unwatched":
        refuse = Mock(side_effect=OSError(24, "Too many open files"))
        monkeypatch.setattr(ErrorTranslator, "wait", refuse)
    with pytest.raises(raised, match=text):
        call.watched(watch, Deadline.after(0.1) if end == "deadline" else NEVER)
    assert call.ended.is_set()


def test_one_thread_watches_all_calls_and_exits_when_there_are_none() -> None:
    calls, watch = [Call() for _ in range(5)], LoneWatch(0)
    running = [Running(call.watched, watch) for call in calls]
    until(lambda: len(WATCHDOG._subjects) >= 5)
    assert len(threads()) == 1
    watch.abort("over")
    for each in running:
        with pytest.raises(GroupAbortedError, match="over"):
            each.result()
    until(lambda: not threads())
    with pytest.raises(GroupAbortedError, match="over"):
        Call().watched(watch)


def test_a_call_that_blocks_is_shown_until_it_ends() -> None:
    with Board.create(2, 0) as board, Board.attach(board.handle(), 1):
        call = Call()
        running = Running(call.watched, board)

        def shown() -> list[tuple[str, tuple[int, ...]]]:
            return [(each.operation, each.members) for each in status_of(board, 0).waits]

        until(lambda: shown() == [("receiving", (1,))])
        call.ended.set()
        until(lambda: not shown())
        with pytest.raises(RuntimeError, match="ended"):
            running.result()


class Broken(Subject):
    def update(self) -> bool:
        raise MemoryError


class Counted(Subject):
    polls = 0

    def update(self) -> bool:
        self.polls += 1
        return True


def test_one_that_cannot_be_polled_leaves_the_others_watched() -> None:
    counted = Counted()
    WATCHDOG.add(Broken())
    WATCHDOG.add(counted)
    until(lambda: counted.polls > 2)
    counted.close()
    polls = counted.polls
    until(lambda: counted not in WATCHDOG._subjects)
    assert counted.polls == polls


def test_a_close_waits_for_a_poll_that_is_under_way() -> None:
    begun, ended = threading.Event(), []

    class Slow(Subject):
        def update(self) -> bool:
            begun.set()
            time.sleep(0.1)
            ended.append(True)
            return True

    slow = Slow()
    WATCHDOG.add(slow)
    assert begun.wait(10)
    slow.close()
    assert ended == [True]


def test_a_forked_child_watches_with_a_thread_of_its_own() -> None:
    counted = Counted()
    WATCHDOG.add(counted)
    child = os.fork()
    if child == 0:
        try:
            assert not WATCHDOG._subjects
            with pytest.raises(GroupTimeoutError):
                Call().watched(LoneWatch(0), Deadline.after(0.1))
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    counted.close()


def test_a_watch_for_which_there_was_no_thread_gets_one_with_the_next_call() -> None:
    until(lambda: not threads())
    with Board.create(1, 0) as board:
        watch = StreamWatch("tp", ErrorTranslator(board), (), lambda: None, lambda _: None)
        with refusing_threads("watchdog"), pytest.raises(RuntimeError, match="new thread"):
            watch.follow_replays()
        watch.follow_replays()
        until(lambda: watch.tick > 0.02)
        watch.close()


# --- Threads that run calls that block -----------------------------------------------------------


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "blocking-call"]


def test_calls_run_side_by_side_and_threads_are_used_again() -> None:
    until(lambda: not names())
    helpers = HelperThreads()
    gate, woken = threading.Event(), threading.Semaphore(0)
    jobs = [helpers.start(gate.wait, woken.release) for _ in range(3)]
    assert len(names()) == 3
    assert not any(job.done for job in jobs)
    gate.set()
    for _ in jobs:
        assert woken.acquire(timeout=10)
    assert all(job.done and job.error is None for job in jobs)
    for _ in range(20):
        helpers.start(int, woken.release)
        assert woken.acquire(timeout=10)
    assert len(names()) < 10  # a thread may not be back yet when the next call comes


def test_a_forked_child_has_threads_of_its_own() -> None:
    woken = threading.Event()
    HELPERS.start(int, woken.set)
    assert woken.wait(10)
    until(lambda: HELPERS._free > 0)
    child = os.fork()
    if child == 0:
        woken.clear()
        HELPERS.start(int, woken.set)
        os._exit(0 if woken.wait(10) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_call_for_which_there_was_no_thread_is_not_made_in_the_place_of_the_next() -> None:
    helpers = HelperThreads()
    made: list[str] = []
    with refusing_threads("blocking-call"), pytest.raises(RuntimeError, match="new thread"):
        helpers.start(lambda: made.append("refused"), int)
    woken = threading.Event()
    helpers.start(lambda: made.append("next"), woken.set)
    assert woken.wait(10)
    assert made == ["next"]


# --- Watching alone ------------------------------------------------------------------------------


def test_a_ring_wakes() -> None:
    watch, done = LoneWatch(0), threading.Event()

    def ring() -> None:
        time.sleep(0.05)
        done.set()
        watch.notify(0)

    began = time.monotonic()
    threading.Thread(target=ring).start()
    watch.wait(done.is_set, Deadline.after(3 * SOON), "waiting", tuple, poll=3 * SOON)
    assert time.monotonic() - began < SOON


class SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(("error", "text"), [(KeyError("why"), "'why'"), (SilentError(), "")])
def test_an_abort_ends_waiting_and_the_first_one_counts(error: Exception, text: str) -> None:
    watch = LoneWatch(2)
    watch.check("before")
    assert watch.aborted is None
    with pytest.raises(GroupTimeoutError, match=r"waiting: timed out after 0\.1 s"):
        watch.wait(bool, Deadline.after(0.1), "waiting", tuple)
    threading.Timer(0.05, watch.abort, (error, 3)).start()
    with pytest.raises(GroupAbortedError) as caught:
        watch.wait(bool, Deadline.after(3 * SOON), "waiting", tuple)
    watch.abort("later")
    failure = caught.value.failure
    assert watch.aborted == failure
    assert (failure.rank, failure.kind, failure.culprit) == (2, type(error).__name__, 3)
    assert text in failure.message
    with pytest.raises(GroupAbortedError):
        watch.check("after")
