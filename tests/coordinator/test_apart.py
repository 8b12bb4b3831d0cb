"""Calls in a thread apart: in order, one at a time, and none for a forked child of what was."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future
from functools import partial

import pytest

from coordinator.daemon_threads import SingleThreadExecutor, is_done_within, submit_in_thread
from shm_broadcast import NEVER, Deadline
from tests.forked import in_a_child
from tests.patience import PATIENCE_SECONDS, until
from tests.refused_threads import refusing_threads

NAME = "apart-in-test"


def n_threads() -> int:
    return sum(each.name == NAME for each in threading.enumerate())


def test_calls_are_made_in_order_in_one_thread() -> None:
    apart, made = SingleThreadExecutor(NAME), list[tuple[int, str]]()

    def note(number: int) -> int:
        made.append((number, threading.current_thread().name))
        return number

    def begin(number: int) -> Future[int]:
        return apart.begin(lambda: note(number))

    futures = [begin(number) for number in range(100)]
    assert [each.result(PATIENCE_SECONDS) for each in futures] == list(range(100))
    assert made == [(number, NAME) for number in range(100)]


def test_many_threads_may_ask() -> None:
    apart, total = SingleThreadExecutor(NAME, idle=0.0), [0]

    def add() -> None:
        before = total[0]
        time.sleep(0)
        total[0] = before + 1

    def ask() -> None:
        for _ in range(200):
            apart.begin(add).result(PATIENCE_SECONDS)

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for each in askers:
        each.start()
    for each in askers:
        each.join()
    assert total == [800]


def test_the_thread_ends_when_nothing_is_asked_and_another_begins() -> None:
    apart = SingleThreadExecutor(NAME, idle=0.01)
    for number in range(3):
        assert apart.begin(partial(abs, number)).result(PATIENCE_SECONDS) == number
        until(lambda: n_threads() == 0)


def test_an_error_is_that_of_the_call_and_keeps_nothing_alive() -> None:
    class Kept:
        def fail(self) -> None:
            raise TimeoutError("no")

    kept = Kept()
    gone = weakref.ref(kept)
    future = submit_in_thread(kept.fail, NAME)
    until(partial(is_done_within, future, NEVER))
    with pytest.raises(TimeoutError, match="no"):
        future.result()
    assert submit_in_thread(lambda: 1, NAME).result(PATIENCE_SECONDS) == 1
    del kept
    assert future.done()
    del future
    until(lambda: gone() is None)


def test_what_waits_can_be_cancelled_and_what_is_under_way_cannot() -> None:
    apart, go_on, made = SingleThreadExecutor(NAME), threading.Event(), list[str]()
    under_way = apart.begin(go_on.wait)
    until(under_way.running)
    waits = apart.begin(lambda: made.append("waits"))
    assert not is_done_within(waits, Deadline.after(0.01))
    assert waits.cancel()
    assert not under_way.cancel()
    go_on.set()
    assert under_way.result(PATIENCE_SECONDS)
    assert apart.begin(lambda: made).result(PATIENCE_SECONDS) == []
    with pytest.raises(CancelledError):
        waits.result()


def test_a_signal_handler_s_time_out_is_no_future_s() -> None:
    def give_up(*_: object) -> None:
        raise TimeoutError("by the handler")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(TimeoutError, match="by the handler"):
            until(partial(is_done_within, Future(), NEVER))
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_forked_child_begins_anew() -> None:
    apart, go_on = SingleThreadExecutor(NAME), threading.Event()
    under_way = apart.begin(go_on.wait)
    until(under_way.running)
    in_a_child(lambda: apart.begin(lambda: 1).result(PATIENCE_SECONDS))
    go_on.set()
    assert under_way.result(PATIENCE_SECONDS)


ENDS = """
import os, time
import coordinator.daemon_threads
from coordinator.daemon_threads import submit_in_thread

coordinator.daemon_threads._ENDING_SECONDS = 60.0  # "soon", on a busy machine

def call():
    time.sleep(0.1)
    os.write(1, b"came back")

submit_in_thread(call, "apart")
"""


def test_a_call_that_comes_back_soon_is_waited_for_at_the_end() -> None:
    """One into torch would abort the process if it came back later."""
    assert subprocess.check_output([sys.executable, "-c", ENDS], text=True) == "came back"


def test_a_call_for_which_there_was_no_thread_is_not_made_before_the_next() -> None:
    apart, made = SingleThreadExecutor(NAME), list[str]()
    with refusing_threads(NAME), pytest.raises(RuntimeError, match="new thread"):
        apart.begin(lambda: made.append("refused"))
    apart.begin(lambda: made.append("next")).result(PATIENCE_SECONDS)
    assert made == ["next"]
