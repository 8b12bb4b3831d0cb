"""The lock by which threads share an end of a queue: the extension's, and Python's."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING

import pytest

from shm_broadcast import GroupTimeoutError
from shm_broadcast.deadline import Deadline
from shm_broadcast.queue import timed_lock
from shm_broadcast.queue.timed_lock import TimedLock
from tests.patience import PATIENCE_SECONDS, until

if TYPE_CHECKING:
    from types import FrameType


@pytest.fixture(params=["native", "python"])
def lock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> TimedLock:
    if request.param == "python":
        monkeypatch.setattr(timed_lock, "native", None)
    return TimedLock()


def nothing(_: str) -> None:
    pass


def test_one_at_a_time(lock: TimedLock) -> None:
    assert lock.take_now()
    assert not lock.take_now()
    lock.give_back()
    assert lock.take_now()
    lock.give_back()


def test_what_nobody_has_is_not_given_back(lock: TimedLock) -> None:
    with pytest.raises(RuntimeError):
        lock.give_back()
    assert lock.take_now()
    lock.give_back()
    with pytest.raises(RuntimeError):
        lock.give_back()


def test_a_deadline_ends_the_wait(lock: TimedLock) -> None:
    assert lock.take_now()
    for seconds in (0.0, 0.05):
        with pytest.raises(GroupTimeoutError, match="another thread of this process is in it"):
            lock.take(Deadline.after(seconds), "enqueue", nothing)
    lock.give_back()
    lock.take(Deadline.after(0.0), "enqueue", nothing)
    assert not lock.take_now()


def test_what_the_check_raises_ends_the_wait(lock: TimedLock) -> None:
    assert lock.take_now()

    def refuse(operation: str) -> None:
        raise ConnectionError(operation)

    with pytest.raises(ConnectionError, match="enqueue"):
        lock.take(Deadline.after(None), "enqueue", refuse)


def test_a_signal_s_handler_ends_the_wait(lock: TimedLock) -> None:
    def stop(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR2, stop)
    assert lock.take_now()
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGUSR2))
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            lock.take(Deadline.after(PATIENCE_SECONDS), "enqueue", nothing)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)
    lock.give_back()
    assert lock.take_now()


def test_who_waits_gets_it_and_others_run_meanwhile(lock: TimedLock) -> None:
    assert lock.take_now()
    looked, got = threading.Event(), threading.Event()

    def wait() -> None:
        lock.take(Deadline.after(PATIENCE_SECONDS), "dequeue", lambda _: looked.set())
        got.set()

    thread = threading.Thread(target=wait)
    thread.start()
    until(looked.is_set)
    assert not got.is_set()
    lock.give_back()
    assert got.wait(PATIENCE_SECONDS)
    assert not lock.take_now()
    thread.join()


def test_no_two_threads_have_it_at_once(lock: TimedLock) -> None:
    turns = 2000
    inside: list[None] = []
    most: list[int] = []

    def take_turns() -> None:
        for _ in range(turns):
            if not lock.take_now():
                lock.take(Deadline.after(PATIENCE_SECONDS), "enqueue", nothing)
            inside.append(None)
            most.append(len(inside))
            inside.pop()
            lock.give_back()

    threads = [threading.Thread(target=take_turns) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 4 * turns
    assert set(most) == {1}
