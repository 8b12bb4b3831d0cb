"""The lock by which threads share an end of a queue."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from shm_broadcast import GroupTimeoutError
from shm_broadcast.deadline import Deadline
from shm_broadcast.eventcount import TimedLock
from tests.patience import PATIENCE_SECONDS, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


@pytest.fixture
def lock() -> TimedLock:
    return TimedLock()


def nothing(_: str) -> None:
    pass


@contextmanager
def another_thread_has(lock: TimedLock) -> Iterator[Callable[[], None]]:
    """Inside, until what it yields is called."""
    has, gives_back = threading.Event(), threading.Event()

    def keep() -> None:
        with lock.owner_lock as mine:
            assert mine
            has.set()
            assert gives_back.wait(PATIENCE_SECONDS)

    thread = threading.Thread(target=keep)
    thread.start()
    assert has.wait(PATIENCE_SECONDS)

    def give_back() -> None:
        gives_back.set()
        thread.join()

    yield give_back
    give_back()


def is_free(lock: TimedLock) -> bool:
    with lock.owner_lock as mine:
        return mine


def test_one_at_a_time(lock: TimedLock) -> None:
    assert is_free(lock)
    with another_thread_has(lock):
        assert not is_free(lock)
    assert is_free(lock)


def test_who_has_it_is_refused(lock: TimedLock) -> None:
    with lock.owner_lock as mine:
        assert mine
        assert lock.owner_lock.is_owned()
        with pytest.raises(RuntimeError, match="in it already"), lock.owner_lock:
            pass
        assert lock.owner_lock.is_owned()
    assert not lock.owner_lock.is_owned()
    assert is_free(lock)


def test_who_did_not_get_it_gives_nothing_back(lock: TimedLock) -> None:
    with another_thread_has(lock):
        with lock.owner_lock as mine:
            assert not mine
        assert not is_free(lock)


def test_what_was_adopted_is_given_back(lock: TimedLock) -> None:
    lock.owner_lock.__enter__()
    thread = threading.Thread(target=lambda: (lock.owner_lock.adopt(), lock.owner_lock.__exit__()))
    thread.start()
    thread.join()
    assert is_free(lock)


def test_a_deadline_ends_the_wait(lock: TimedLock) -> None:
    with another_thread_has(lock):
        for seconds in (0.0, 0.05):
            with pytest.raises(GroupTimeoutError, match="another thread of this process is in it"):
                lock.acquire(Deadline.after(seconds), "enqueue", nothing)
    with lock.owner_lock:
        pass
    lock.acquire(Deadline.after(0.0), "enqueue", nothing)
    assert lock.owner_lock.is_owned()


def test_what_the_check_raises_ends_the_wait(lock: TimedLock) -> None:
    def refuse(operation: str) -> None:
        raise ConnectionError(operation)

    with another_thread_has(lock), pytest.raises(ConnectionError, match="enqueue"):
        lock.acquire(Deadline.after(None), "enqueue", refuse)


def test_a_signal_s_handler_ends_the_wait(lock: TimedLock) -> None:
    def stop(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR2, stop)
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGUSR2))
    try:
        with another_thread_has(lock):
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                lock.acquire(Deadline.after(PATIENCE_SECONDS), "enqueue", nothing)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)
    assert is_free(lock)


def test_who_waits_gets_it_and_others_run_meanwhile(lock: TimedLock) -> None:
    looked, got, done = threading.Event(), threading.Event(), threading.Event()

    def wait() -> None:
        with lock.owner_lock as mine:
            assert not mine
            lock.acquire(Deadline.after(PATIENCE_SECONDS), "dequeue", lambda _: looked.set())
            got.set()
            assert done.wait(PATIENCE_SECONDS)

    thread = threading.Thread(target=wait)
    with another_thread_has(lock) as give_back:
        thread.start()
        until(looked.is_set)
        assert not got.is_set()
        give_back()
        assert got.wait(PATIENCE_SECONDS)
        assert not is_free(lock)
    done.set()
    thread.join()
    assert is_free(lock)


def test_no_two_threads_have_it_at_once(lock: TimedLock) -> None:
    turns = 2000
    inside: list[None] = []
    most: list[int] = []

    def take_turns() -> None:
        for _ in range(turns):
            with lock.owner_lock as mine:
                if not mine:
                    lock.acquire(Deadline.after(PATIENCE_SECONDS), "enqueue", nothing)
                inside.append(None)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=take_turns) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 4 * turns
    assert set(most) == {1}
