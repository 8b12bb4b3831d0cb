"""Daemon threads: calls in order, one at a time; a forked child starts with an empty queue."""

from __future__ import annotations

import signal
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial

import pytest

from coordinator.daemon_threads import SingleThreadExecutor, is_done_within, submit_in_thread
from shm_broadcast import NEVER, Deadline
from tests.commands import run_code
from tests.forked import in_a_child
from tests.patience import PATIENCE_SECONDS, until
from tests.refused_threads import refusing_threads

NAME = "apart-in-test"


def test_calls_run_in_order_one_at_a_time() -> None:
    apart, total = SingleThreadExecutor(NAME, idle=0.0), [0]

    def add() -> None:
        before = total[0]
        time.sleep(0)
        total[0] = before + 1

    def ask(_: int) -> None:
        for _ in range(200):
            apart.begin(add).result(PATIENCE_SECONDS)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(4)))
    assert total == [800]
    made = list[int]()
    for each in [apart.begin(partial(made.append, number)) for number in range(100)]:
        each.result(PATIENCE_SECONDS)
    assert made == [*range(100)]
    until(lambda: not any(each.name == NAME for each in threading.enumerate()))


def test_an_error_of_a_call_is_raised_and_keeps_nothing_alive() -> None:
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


def test_a_queued_call_can_be_cancelled_and_a_running_one_cannot() -> None:
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


def test_a_timeout_of_a_signal_handler_is_raised() -> None:
    def give_up(*_: object) -> None:
        raise TimeoutError("by the handler")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(TimeoutError, match="by the handler"):
            until(partial(is_done_within, Future(), NEVER))
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_forked_child_starts_with_an_empty_queue() -> None:
    apart, go_on = SingleThreadExecutor(NAME), threading.Event()
    under_way = apart.begin(go_on.wait)
    until(under_way.running)
    in_a_child(lambda: apart.begin(lambda: 1).result(PATIENCE_SECONDS))
    go_on.set()
    assert under_way.result(PATIENCE_SECONDS)


ENDS = """
import os, time
import coordinator.daemon_threads as threads

threads._ENDING_SECONDS = 60.0  # "soon", on a busy machine
threads.submit_in_thread(lambda: (time.sleep(0.1), os.write(1, b"came back")), "apart")
"""


def test_exit_waits_shortly_for_running_calls() -> None:
    """One into torch would abort the process if it returned later."""
    assert run_code(ENDS).stdout == "came back"


def test_a_call_without_a_thread_does_not_run_later() -> None:
    apart, made = SingleThreadExecutor(NAME), list[str]()
    with refusing_threads(NAME), pytest.raises(RuntimeError, match="new thread"):
        apart.begin(lambda: made.append("refused"))
    apart.begin(lambda: made.append("next")).result(PATIENCE_SECONDS)
    assert made == ["next"]
