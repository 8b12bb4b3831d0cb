"""The thread that ends calls that block, and work on streams, when a group fails."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING

import pytest

from device_comm import LoneWatch
from device_comm.torch_waiting import ErrorTranslator
from device_comm.watchdog import WATCHDOG, Issued, StreamWatch, Subject, call_watched
from shm_broadcast import NEVER, Board, Deadline, GroupAbortedError, GroupTimeoutError
from tests.patience import until
from tests.refused_threads import refusing_threads
from tests.shm_broadcast.members import status_of
from tests.shm_broadcast.queues import Running

if TYPE_CHECKING:
    from device_comm.watch import Watch


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "watchdog"]


class Call:
    """A call that blocks until it is ended."""

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


def test_an_abort_ends_the_call_and_is_what_it_raises() -> None:
    watch = LoneWatch(0)
    threading.Timer(0.1, watch.abort, (KeyError("why"),)).start()
    with pytest.raises(GroupAbortedError, match="why") as caught:
        Call().watched(watch)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_deadline_ends_the_call_and_is_what_it_raises() -> None:
    with pytest.raises(GroupTimeoutError, match=r"receiving: timed out after 0\.1 s"):
        Call().watched(LoneWatch(0), Deadline.after(0.1))


def test_what_the_call_raises_by_itself_is_left_alone() -> None:
    call = Call()
    call.ended.set()
    with pytest.raises(RuntimeError, match="ended"):
        call.watched(LoneWatch(0))


def test_a_call_that_cannot_be_watched_over_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(ErrorTranslator, "wait", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        Call().watched(LoneWatch(0))


def test_one_thread_for_all_calls_that_leaves_when_there_are_none() -> None:
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


def test_a_call_that_was_ended_leaves_nothing() -> None:
    watch, call = LoneWatch(0), Call()
    watch.abort(KeyError("why"))
    gc.disable()
    try:
        with pytest.raises(GroupAbortedError) as caught:
            call.watched(watch)
        left = weakref.ref(call)
        del caught, call
        until(lambda: left() is None)
    finally:
        gc.enable()


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
    """Cannot be polled."""

    def update(self) -> bool:
        raise MemoryError


class Counted(Subject):
    """Counts its polls."""

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
