"""Deadlines, event counts, wake descriptors, and the lock by which threads share an end."""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_broadcast import eventcount as module
from shm_broadcast._native import Words
from shm_broadcast.deadline import NEVER, Deadline
from shm_broadcast.errors import GroupTimeoutError
from shm_broadcast.eventcount import (
    DEFAULT_SPIN_SECONDS,
    LEAST_SPIN_SECONDS,
    AdaptiveSpin,
    EventCount,
    Lookout,
    TimedLock,
    WakeFd,
)
from shm_broadcast.layout import EVENTCOUNT_WAITERS
from tests.forked import in_a_child
from tests.patience import PATIENCE_SECONDS, until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.quick

AT = 64
MS = 1_000_000


@pytest.fixture
def words() -> Words:
    return Words(bytearray(128))


@pytest.fixture
def eventcount(words: Words) -> EventCount:
    return EventCount(words, AT)


@pytest.fixture
def lock() -> TimedLock:
    return TimedLock()


def nothing(*_: object) -> None:
    pass


def never() -> bool:
    return False


# --- deadlines -------------------------------------------------------------------------------


def test_no_limit_never_expires() -> None:
    for unlimited in (NEVER, Deadline.after(math.inf), Deadline.after(10**400)):
        assert not unlimited.expired
        assert unlimited.remaining() == math.inf
        assert unlimited.remaining(0.5) == 0.5
        unlimited.check("wait")
    assert Deadline.after(None) is NEVER
    deadline = Deadline.after(3)
    assert Deadline.after(deadline) is deadline


@pytest.mark.parametrize("timeout", [-1, -1e-9, -math.inf, math.nan, "5", [], 1j])
def test_a_wrong_timeout_is_refused(timeout: Any) -> None:
    number = isinstance(timeout, int | float)
    wanted = "0 or more seconds" if number else "a number of seconds"
    with pytest.raises(ValueError if number else TypeError) as refused:
        Deadline.after(timeout)
    assert str(refused.value) == f"timeout must be {wanted}, or None; got {timeout!r}"


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_remaining_is_never_negative_nor_more_than_asked(timeout: float, at_most: float) -> None:
    assert 0 <= Deadline.after(timeout).remaining(at_most) <= min(timeout, at_most)


# --- event counts ----------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0, 0.001, 0.1])
def test_a_deadline_ends_the_wait(eventcount: EventCount, words: Words, timeout: float) -> None:
    began = time.monotonic()
    assert not eventcount.wait(never, Deadline.after(timeout), between_slices=nothing)
    assert time.monotonic() - began >= timeout
    assert words.load32(AT + EVENTCOUNT_WAITERS) == 0


@pytest.mark.parametrize("who", ["check", "condition"])
def test_an_error_ends_the_wait(eventcount: EventCount, words: Words, who: str) -> None:
    def fail() -> bool:
        if words.load32(AT + EVENTCOUNT_WAITERS):
            raise KeyError(who)
        return False

    ready, check = (never, fail) if who == "check" else (fail, nothing)
    with pytest.raises(KeyError):
        eventcount.wait(ready, NEVER, spin_seconds=0, between_slices=cast("Any", check))
    assert words.load32(AT + EVENTCOUNT_WAITERS) == 0


def test_a_change_between_the_last_check_and_the_sleep_is_not_lost(eventcount: EventCount) -> None:
    changed = False

    def change() -> None:
        nonlocal changed
        if not changed:
            changed = True
            eventcount.notify()

    began = time.monotonic()
    assert eventcount.wait(lambda: changed, NEVER, slice_seconds=30, between_slices=change)
    assert time.monotonic() - began < 10


# --- the spin before a sleep, and the lookout for what recurs --------------------------------


def test_the_spin_window_adapts() -> None:
    spin = AdaptiveSpin()
    largest = int(DEFAULT_SPIN_SECONDS * 1e9)
    assert spin.window_ns == largest
    for _ in range(20):
        spin.observe(10**9)
    assert spin.window_ns == int(LEAST_SPIN_SECONDS * 1e9)
    spin.observe(largest)
    assert spin.window_ns == largest
    spin.observe(2 * largest + 1)
    assert spin.window_ns == largest // 2
    none = AdaptiveSpin(0)
    none.observe(0)
    assert none.window_ns == 0


def in_vain(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def at_once(seconds: float) -> bool:
    """A look that does not wait, as at a queue from another host."""
    return False


@pytest.mark.parametrize(
    ("waits", "usual"),
    [
        ((20, 20, 20, 20), 20),
        ((20, 20.4, 20, 20), 20.05625),  # a quarter of each difference is learnt
        ((20, 20, 20), None),  # too few
        ((20, 22, 20, 22, 20), None),  # not alike
        ((0.5,) * 9, None),  # too short
        ((150,) * 9, None),  # too long
        ((20, 20, 20, 20, 20, 50, 20), 20),  # one differs
        ((20, 20, 20, 20, 50, 50), None),
        ((20, 20, 20, 20, 50, 50, 50, 50, 50), 50),  # another rhythm
    ],
)
def test_regular_waits_are_expected_to_recur(waits: tuple[float, ...], usual: float | None) -> None:
    spin = AdaptiveSpin()
    for wait in waits:
        spin.observe(int(wait * MS))
    lookout = spin.lookout(since_ns=1000 * MS, look=in_vain)
    if usual is None:
        assert lookout is None
    else:
        assert lookout is not None
        assert lookout.at == pytest.approx(1 + usual * 0.95e-3)
        assert lookout.seconds == pytest.approx(usual * 0.1e-3)
        assert lookout.look is in_vain


@pytest.mark.parametrize("look", [in_vain, at_once])
def test_a_lookout_needs_no_notify(
    eventcount: EventCount, words: Words, look: Callable[[float], bool]
) -> None:
    """Nor does `notify` pay for a system call: no waiter is counted."""
    sleepers: list[int] = []
    there = threading.Event()

    def come() -> None:
        until(lambda: words.load32(AT + EVENTCOUNT_WAITERS) != 0)
        until(lambda: words.load32(AT + EVENTCOUNT_WAITERS) == 0)
        sleepers.append(words.load32(AT + EVENTCOUNT_WAITERS))
        there.set()

    thread = threading.Thread(target=come)
    thread.start()
    began = time.monotonic()
    lookout = Lookout(began + 0.1, 60, look)
    assert eventcount.wait(
        there.is_set, NEVER, slice_seconds=60, lookout=lookout, between_slices=nothing
    )
    assert 0.1 <= time.monotonic() - began < 30
    thread.join()
    assert sleepers == [0]


@pytest.mark.parametrize("begins_in", [0, 60])
def test_a_lookout_ends_with_the_deadline(eventcount: EventCount, begins_in: float) -> None:
    began = time.monotonic()
    lookout = Lookout(began + begins_in, 60, in_vain)
    assert not eventcount.wait(never, Deadline.after(0.02), lookout=lookout, between_slices=nothing)
    assert time.monotonic() - began < 30


# --- wake descriptors ------------------------------------------------------------------------


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_wake_descriptor_is_readable_from_notify_until_clear() -> None:
    def readable() -> bool:
        return bool(select.select([wake], [], [], 0)[0])

    wake = WakeFd()
    assert not readable()
    wake.clear()
    wake.notify()
    wake.notify()
    assert readable()
    wake.clear()
    assert not readable()
    wake.close()


def in_its_own_process(test: Callable[..., None]) -> Callable[..., None]:
    """Where no other thread opens or closes descriptors."""

    @wraps(test)
    def run() -> None:
        in_a_child(test)

    return run


@in_its_own_process
def test_notify_after_close_writes_to_no_other_file() -> None:
    wake = WakeFd()
    wake.close()
    wake.close()
    reused = os.eventfd(0, os.EFD_NONBLOCK)
    assert reused == wake.fileno()
    wake.notify()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(reused)
    os.close(reused)


@in_its_own_process
def test_a_close_within_notify_takes_effect_after_it() -> None:
    """By a signal handler that interrupts it just before it writes."""
    wake = WakeFd()
    seen: list[bool] = []

    class InterruptedOs:
        @staticmethod
        def eventfd_write(fd: int, value: int) -> None:
            wake.close()
            wake.notify()
            seen.append(is_open(fd))
            os.eventfd_write(fd, value)

    vars(module)["os"] = InterruptedOs
    wake.notify()
    assert seen == [True]
    assert not is_open(wake.fileno())


@in_its_own_process
def test_threads_that_notify_beside_a_close_write_nowhere_else() -> None:
    for _ in range(200):
        wake = WakeFd()
        begin = threading.Barrier(3)
        does: list[Callable[[], None]] = [wake.notify, wake.notify, wake.close]

        def run(do: Callable[[], None], begin: threading.Barrier = begin) -> None:
            begin.wait()
            do()

        threads = [threading.Thread(target=run, args=(do,)) for do in does]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not is_open(wake.fileno())


# --- the lock of an end ----------------------------------------------------------------------


@contextmanager
def another_thread_has(lock: TimedLock) -> Iterator[None]:
    has, gives_back = threading.Event(), threading.Event()

    def keep() -> None:
        with lock.owner_lock as mine:
            assert mine
            has.set()
            assert gives_back.wait(PATIENCE_SECONDS)

    thread = threading.Thread(target=keep)
    thread.start()
    assert has.wait(PATIENCE_SECONDS)

    yield
    gives_back.set()
    thread.join()


def test_a_deadline_or_the_check_ends_the_wait_for_the_lock(lock: TimedLock) -> None:
    def refuse(operation: str) -> None:
        raise ConnectionError(operation)

    with another_thread_has(lock):
        for seconds in (0.0, 0.05):
            with pytest.raises(GroupTimeoutError, match="another thread of this process is in it"):
                lock.acquire(Deadline.after(seconds), "enqueue", nothing)
        with pytest.raises(ConnectionError, match="enqueue"):
            lock.acquire(NEVER, "enqueue", refuse)
    lock.acquire(Deadline.after(0.0), "enqueue", nothing)
    assert lock.owner_lock.is_owned()


def test_a_signal_handler_ends_the_wait_for_the_lock(lock: TimedLock) -> None:
    def stop(*_: object) -> None:
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
    with lock.owner_lock as mine:
        assert mine


def test_no_two_threads_have_the_lock_at_once(lock: TimedLock) -> None:
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
    assert most == [1] * (4 * turns)
