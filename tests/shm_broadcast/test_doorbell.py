"""Waiting at a doorbell: it ends when it should, and leaves no sleeper counted."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, cast

import pytest

from shm_broadcast._native import Words
from shm_broadcast.deadline import NEVER, Deadline
from shm_broadcast.eventcount import (
    DEFAULT_SPIN_SECONDS,
    LEAST_SPIN_SECONDS,
    LONG_SLICE_SECONDS,
    SHORT_SLICES,
    SLICE_SECONDS,
    AdaptiveSpin,
    EventCount,
    Lookout,
)
from shm_broadcast.layout import EVENTCOUNT_WAITERS
from tests.patience import until

if TYPE_CHECKING:
    from collections.abc import Callable

AT = 64


@pytest.fixture
def words() -> Words:
    return Words(bytearray(128))


@pytest.fixture
def eventcount(words: Words) -> EventCount:
    return EventCount(words, AT)


def nothing() -> None:
    pass


def never() -> bool:
    return False


def test_what_is_there_already_needs_no_sleep(eventcount: EventCount, words: Words) -> None:
    def fail() -> None:
        raise AssertionError("slept")

    assert eventcount.wait(lambda: True, NEVER, between_slices=fail)
    assert eventcount.wait(lambda: True, Deadline.after(0), spin_seconds=0, between_slices=fail)
    assert words.load64(AT) == 0


@pytest.mark.parametrize("timeout", [0, 0.001, 0.1])
def test_a_deadline_ends_the_wait(eventcount: EventCount, words: Words, timeout: float) -> None:
    began = time.monotonic()
    assert not eventcount.wait(never, Deadline.after(timeout), between_slices=nothing)
    assert time.monotonic() - began >= timeout
    assert words.load32(AT + EVENTCOUNT_WAITERS) == 0


def test_it_looks_at_everything_before_each_sleep(eventcount: EventCount) -> None:
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1

    assert eventcount.wait(
        lambda: looks == 5, Deadline.after(10), slice_seconds=0.001, between_slices=look
    )


def test_what_a_look_raises_ends_the_wait(eventcount: EventCount, words: Words) -> None:
    def look() -> None:
        raise KeyError("abort")

    with pytest.raises(KeyError):
        eventcount.wait(never, NEVER, between_slices=look)
    assert words.load32(AT + EVENTCOUNT_WAITERS) == 0


def test_what_the_predicate_raises_ends_the_wait(eventcount: EventCount, words: Words) -> None:
    calls = 0

    def fail_later() -> bool:
        nonlocal calls
        calls += 1
        if calls > 1 and words.load32(AT + EVENTCOUNT_WAITERS):
            raise KeyError("broken")
        return False

    with pytest.raises(KeyError):
        eventcount.wait(fail_later, NEVER, spin_seconds=0, between_slices=nothing)
    assert words.load32(AT + EVENTCOUNT_WAITERS) == 0


def test_a_change_between_the_last_look_and_sleep_is_not_lost(
    eventcount: EventCount, words: Words
) -> None:
    """The change and its ring come in the worst moment: after the predicate was found false."""
    changed = False

    def look() -> None:
        nonlocal changed
        if not changed:
            changed = True
            eventcount.notify()

    began = time.monotonic()
    assert eventcount.wait(lambda: changed, NEVER, slice_seconds=30, between_slices=look)
    assert time.monotonic() - began < 10


def test_a_ring_wakes_every_thread_that_waits(eventcount: EventCount, words: Words) -> None:
    changed = False
    woken: list[bool] = []

    def wait() -> None:
        woken.append(
            eventcount.wait(lambda: changed, NEVER, slice_seconds=30, between_slices=nothing)
        )

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: words.load32(AT + EVENTCOUNT_WAITERS) == 3)
    changed = True
    eventcount.notify()
    for thread in threads:
        thread.join(10)
    assert woken == [True] * 3
    assert words.load32(AT + EVENTCOUNT_WAITERS) == 0


class Unslept:
    """Words that note how long to sleep, and do not."""

    def __init__(self) -> None:
        self._words = Words(bytearray(128))
        self.slept: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._words, name)

    def sleep_on(self, eventcount: int, seen: int, seconds: float, /) -> None:  # noqa: ARG002
        self.slept.append(seconds)


def test_who_has_slept_for_a_second_looks_less_often() -> None:
    words = Unslept()
    eventcount = EventCount(cast("Words", words), AT)
    assert eventcount.wait(lambda: len(words.slept) == 27, NEVER, between_slices=nothing)
    assert words.slept == [SLICE_SECONDS] * SHORT_SLICES + [LONG_SLICE_SECONDS] * 2

    words.slept.clear()
    wait = {"slice_seconds": 0.001, "between_slices": nothing}
    assert eventcount.wait(lambda: len(words.slept) == 40, NEVER, **wait)
    assert words.slept == [0.001] * 40


def test_a_lost_wake_up_costs_one_slice(eventcount: EventCount, words: Words) -> None:
    changed = False

    def change() -> None:
        nonlocal changed
        until(lambda: words.load32(AT + EVENTCOUNT_WAITERS))
        changed = True  # and no ring

    thread = threading.Thread(target=change)
    thread.start()
    assert eventcount.wait(lambda: changed, Deadline.after(10), between_slices=nothing)
    thread.join()


def test_sleepers_that_died_are_forgotten(eventcount: EventCount, words: Words) -> None:
    words.add32(AT + EVENTCOUNT_WAITERS, 5)
    eventcount.reset_waiters()
    eventcount.notify()
    assert words.load64(AT) == 0


def test_a_slice_is_shorter_than_what_is_promised() -> None:
    assert SLICE_SECONDS < 0.05


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


def test_no_window_stays_none() -> None:
    spin = AdaptiveSpin(0)
    spin.observe(0)
    assert spin.window_ns == 0


MS = 1_000_000


def learnt(*waits: float) -> AdaptiveSpin:
    """A spin that has seen waits of so many milliseconds."""
    spin = AdaptiveSpin()
    for wait in waits:
        spin.observe(int(wait * MS))
    return spin


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
def test_regular_waits_are_looked_out_for(waits: tuple[float, ...], usual: float | None) -> None:
    lookout = learnt(*waits).lookout(since_ns=1000 * MS, look=in_vain)
    if usual is None:
        assert lookout is None
    else:
        assert lookout is not None
        assert lookout.at == pytest.approx(1 + usual * 0.95e-3)
        assert lookout.seconds == pytest.approx(usual * 0.1e-3)
        assert lookout.look is in_vain


def in_vain(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def at_once(seconds: float) -> bool:
    """A look that does not wait, as at a queue from another host."""
    return False


@pytest.mark.parametrize("look", [in_vain, at_once])
def test_who_looks_out_needs_no_ring(
    eventcount: EventCount, words: Words, look: Callable[[float], bool]
) -> None:
    """Nor does whoever rings pay for a system call: nobody counts as a sleeper."""
    sleepers: list[int] = []

    def come() -> None:
        until(lambda: words.load32(AT + EVENTCOUNT_WAITERS) != 0)
        until(lambda: words.load32(AT + EVENTCOUNT_WAITERS) == 0)
        sleepers.append(words.load32(AT + EVENTCOUNT_WAITERS))
        there.set()

    there = threading.Event()
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


def test_who_has_looked_out_in_vain_sleeps_again(eventcount: EventCount, words: Words) -> None:
    looks: list[float] = []
    began = time.monotonic()
    deadline = Deadline.after(0.3)
    lookout = Lookout(began + 0.02, 0.01, in_vain)
    assert not eventcount.wait(
        never,
        deadline,
        slice_seconds=60,
        lookout=lookout,
        between_slices=lambda: looks.append(time.monotonic()),
    )
    assert time.monotonic() - began >= 0.3
    assert len(looks) <= 4  # before the lookout and at its begin, after it, at the deadline
    assert words.load32(AT + EVENTCOUNT_WAITERS) == 0


def test_a_look_out_calls_its_look_until_what_it_waits_for_is_there(eventcount: EventCount) -> None:
    asked: list[float] = []

    def look(seconds: float) -> bool:
        asked.append(seconds)
        return len(asked) == 3

    lookout = Lookout(time.monotonic(), 60, look)
    wait = Deadline.after(30)
    assert eventcount.wait(
        lambda: len(asked) >= 3, wait, spin_seconds=0, lookout=lookout, between_slices=nothing
    )
    assert asked == pytest.approx([0.001] * 3)  # of the window's 60 s a millisecond at a time


def spinning(seconds: float) -> bool:
    """A look that takes its time, as at a queue on this host."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    return False


@pytest.mark.parametrize(("look", "pauses"), [(spinning, False), (at_once, True)])
def test_only_a_look_that_does_not_wait_is_followed_by_a_pause(
    look: Callable[[float], bool], pauses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause takes 50 us and more, in which what is waited for may come."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    assert not Lookout(time.monotonic(), 0.01, look).look_until(never, NEVER)
    assert bool(slept) is pauses


def test_a_look_out_ends_with_the_deadline(eventcount: EventCount) -> None:
    began = time.monotonic()
    lookout = Lookout(began, 60, in_vain)
    assert not eventcount.wait(never, Deadline.after(0.02), lookout=lookout, between_slices=nothing)
    assert time.monotonic() - began < 30


def test_a_deadline_before_the_lookout_counts(eventcount: EventCount) -> None:
    began = time.monotonic()
    lookout = Lookout(began + 60, 1, in_vain)
    assert not eventcount.wait(never, Deadline.after(0.02), lookout=lookout, between_slices=nothing)
    assert time.monotonic() - began < 30
