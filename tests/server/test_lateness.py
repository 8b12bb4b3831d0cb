"""When calls are late, decided without processes or waiting."""

from __future__ import annotations

import math

import pytest

from server.calls.backlog import CallDeadlines
from server.calls.pending_call import PendingCall


class Clock:
    """Stands for ``time.monotonic``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)

    def pending(self, timeout: float | None = None) -> PendingCall:
        return PendingCall("embed", (), {}, 2, None, timeout)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_a_call_is_late_when_none_was_answered_for_long(clock: Clock) -> None:
    times = CallDeadlines(300.0)
    first, second = clock.pending(), clock.pending()
    assert times.watch(first)
    assert times.look() == ([], 300.0)
    assert not times.watch(second)
    clock.now += 200.0
    times.answered(first)
    clock.now += 200.0
    assert times.look() == ([], 100.0)
    clock.now += 100.0
    assert times.look() == ([second], math.inf)
    assert times.look() == ([], math.inf)


def test_a_call_with_a_time_of_its_own_is_late_though_others_are_answered(clock: Clock) -> None:
    times = CallDeadlines(300.0)
    call, others = clock.pending(2.0), clock.pending()
    times.watch(others)
    times.look()
    assert times.watch(call)
    times.answered(others)
    assert times.look() == ([], 2.0)
    clock.now += 2.0
    assert times.look() == ([call], math.inf)
    assert times.due(call).timeout == 2.0


def test_what_is_answered_or_never_late_is_not_kept(clock: Clock) -> None:
    times = CallDeadlines(math.inf)
    assert not times.watch(clock.pending())
    assert not times.watch(clock.pending(math.inf))
    assert times._watched == {}
    short = clock.pending(5.0)
    assert times.watch(short)
    times.answered(short)
    assert times._watched == {}


@pytest.mark.parametrize("wrong", [-1.0, math.nan])
def test_a_time_that_is_none_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="timeout must be 0 or more seconds"):
        PendingCall("embed", (), {}, 2, None, wrong)
