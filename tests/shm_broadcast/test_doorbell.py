"""Waiting at a doorbell: it ends when it should, and leaves no sleeper counted."""

from __future__ import annotations

import threading
import time

import pytest

from shm_broadcast import _native
from shm_broadcast.atomics import PythonWords, WordsLike
from shm_broadcast.deadline import NEVER, Deadline
from shm_broadcast.doorbell import (
    DEFAULT_SPIN_SECONDS,
    LONG_SLICE_SECONDS,
    SHORT_SLICES,
    SLICE_SECONDS,
    AdaptiveSpin,
    Doorbell,
)
from shm_broadcast.layout import DOORBELL_SLEEPERS

AT = 64


@pytest.fixture(params=[_native.Words, PythonWords], ids=["native", "twin"])
def words(request: pytest.FixtureRequest) -> WordsLike:
    made: WordsLike = request.param(bytearray(128))
    return made


@pytest.fixture
def doorbell(words: WordsLike) -> Doorbell:
    return Doorbell(words, AT)


def nothing() -> None:
    pass


def never() -> bool:
    return False


def test_what_is_there_already_needs_no_sleep(doorbell: Doorbell, words: WordsLike) -> None:
    def fail() -> None:
        raise AssertionError("slept")

    assert doorbell.wait(lambda: True, NEVER, between_slices=fail)
    assert doorbell.wait(lambda: True, Deadline.after(0), spin_seconds=0, between_slices=fail)
    assert words.load64(AT) == 0


@pytest.mark.parametrize("timeout", [0, 0.001, 0.1])
def test_a_deadline_ends_the_wait(doorbell: Doorbell, words: WordsLike, timeout: float) -> None:
    began = time.monotonic()
    assert not doorbell.wait(never, Deadline.after(timeout), between_slices=nothing)
    assert time.monotonic() - began >= timeout
    assert words.load32(AT + DOORBELL_SLEEPERS) == 0


def test_it_looks_at_everything_before_each_sleep(doorbell: Doorbell) -> None:
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1

    assert doorbell.wait(
        lambda: looks == 5, Deadline.after(10), slice_seconds=0.001, between_slices=look
    )


def test_what_a_look_raises_ends_the_wait(doorbell: Doorbell, words: WordsLike) -> None:
    def look() -> None:
        raise KeyError("abort")

    with pytest.raises(KeyError):
        doorbell.wait(never, NEVER, between_slices=look)
    assert words.load32(AT + DOORBELL_SLEEPERS) == 0


def test_what_the_predicate_raises_ends_the_wait(doorbell: Doorbell, words: WordsLike) -> None:
    calls = 0

    def fail_later() -> bool:
        nonlocal calls
        calls += 1
        if calls > 1 and words.load32(AT + DOORBELL_SLEEPERS):
            raise KeyError("broken")
        return False

    with pytest.raises(KeyError):
        doorbell.wait(fail_later, NEVER, spin_seconds=0, between_slices=nothing)
    assert words.load32(AT + DOORBELL_SLEEPERS) == 0


def test_a_change_between_the_last_look_and_sleep_is_not_lost(
    doorbell: Doorbell, words: WordsLike
) -> None:
    """The change and its ring come in the worst moment: after the predicate was found false."""
    changed = False

    def look() -> None:
        nonlocal changed
        if not changed:
            changed = True
            doorbell.ring()

    began = time.monotonic()
    assert doorbell.wait(lambda: changed, NEVER, slice_seconds=30, between_slices=look)
    assert time.monotonic() - began < 10


def test_a_ring_wakes_every_thread_that_waits(doorbell: Doorbell, words: WordsLike) -> None:
    changed = False
    woken: list[bool] = []

    def wait() -> None:
        woken.append(
            doorbell.wait(lambda: changed, NEVER, slice_seconds=30, between_slices=nothing)
        )

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    while words.load32(AT + DOORBELL_SLEEPERS) < 3:
        time.sleep(0.001)
    changed = True
    doorbell.ring()
    for thread in threads:
        thread.join(10)
    assert woken == [True] * 3
    assert words.load32(AT + DOORBELL_SLEEPERS) == 0


class Unslept(PythonWords):
    """Notes how long it should sleep, and does not."""

    def __init__(self) -> None:
        super().__init__(bytearray(128))
        self.slept: list[float] = []

    def sleep_on(self, doorbell: int, seen: int, seconds: float, /) -> None:  # noqa: ARG002
        self.slept.append(seconds)


def test_who_has_slept_for_a_second_looks_less_often() -> None:
    words = Unslept()
    doorbell = Doorbell(words, AT)
    assert doorbell.wait(lambda: len(words.slept) == 27, NEVER, between_slices=nothing)
    assert words.slept == [SLICE_SECONDS] * SHORT_SLICES + [LONG_SLICE_SECONDS] * 2

    words.slept.clear()
    wait = {"slice_seconds": 0.001, "between_slices": nothing}
    assert doorbell.wait(lambda: len(words.slept) == 40, NEVER, **wait)
    assert words.slept == [0.001] * 40


def test_a_lost_wake_up_costs_one_slice(doorbell: Doorbell, words: WordsLike) -> None:
    changed = False

    def change() -> None:
        nonlocal changed
        while not words.load32(AT + DOORBELL_SLEEPERS):
            time.sleep(0.001)
        changed = True  # and no ring

    thread = threading.Thread(target=change)
    thread.start()
    assert doorbell.wait(lambda: changed, Deadline.after(10), between_slices=nothing)
    thread.join()


def test_sleepers_that_died_are_forgotten(doorbell: Doorbell, words: WordsLike) -> None:
    words.add32(AT + DOORBELL_SLEEPERS, 5)
    doorbell.reset_sleepers()
    doorbell.ring()
    assert words.load64(AT) == 0


def test_a_slice_is_shorter_than_what_is_promised() -> None:
    assert SLICE_SECONDS < 0.05


def test_the_spin_window_adapts() -> None:
    spin = AdaptiveSpin()
    largest = int(DEFAULT_SPIN_SECONDS * 1e9)
    assert spin.window_ns == largest
    for _ in range(20):
        spin.observe(10**9)
    assert spin.window_ns == 0
    spin.observe(largest)
    assert spin.window_ns == largest
    spin.observe(2 * largest + 1)
    assert spin.window_ns == largest // 2


def test_no_window_stays_none() -> None:
    spin = AdaptiveSpin(0)
    spin.observe(0)
    assert spin.window_ns == 0
