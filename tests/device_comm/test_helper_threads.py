from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest

from device_comm.torch_waiting import HELPERS, HelperThreads
from tests.patience import until
from tests.refused_threads import refusing_threads


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


def test_an_error_is_kept_for_whoever_waits() -> None:
    woken = threading.Event()
    job = HelperThreads().start(lambda: [][1], woken.set)
    assert woken.wait(10)
    assert job.done
    assert isinstance(job.error, IndexError)


def test_threads_do_not_hold_up_the_process() -> None:
    HelperThreads().start(int, int)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "blocking-call")


def test_idle_threads_exit() -> None:
    helpers = HelperThreads()
    gate, woken = threading.Event(), threading.Semaphore(0)
    for _ in range(2):
        helpers.start(gate.wait, woken.release)
    helpers.start(int, woken.release)
    assert woken.acquire(timeout=10)
    until(lambda: len(names()) == 2)
    gate.set()
    until(lambda: not names())
    helpers.start(int, woken.release)
    for _ in range(3):
        assert woken.acquire(timeout=10)


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


def test_a_job_that_has_failed_is_not_kept_by_its_error() -> None:
    woken = threading.Event()
    helpers = HelperThreads()
    gc.disable()
    try:
        job = helpers.start(lambda: [][1], woken.set)
        assert woken.wait(10)
        until(lambda: not names())
        left = weakref.ref(job)
        del job
        assert left() is None
    finally:
        gc.enable()


def test_a_call_for_which_there_was_no_thread_is_not_made_in_the_place_of_the_next() -> None:
    helpers = HelperThreads()
    made: list[str] = []
    with refusing_threads("blocking-call"), pytest.raises(RuntimeError, match="new thread"):
        helpers.start(lambda: made.append("refused"), int)
    woken = threading.Event()
    helpers.start(lambda: made.append("next"), woken.set)
    assert woken.wait(10)
    assert made == ["next"]
