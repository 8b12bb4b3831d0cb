"""The one timeout type."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_broadcast.deadline import NEVER, Deadline
from shm_broadcast.errors import GroupTimeoutError


def test_never() -> None:
    assert Deadline.after(None) is NEVER
    assert not NEVER.expired
    assert NEVER.remaining() == math.inf
    assert NEVER.remaining(0.5) == 0.5
    NEVER.check("wait")


def test_a_deadline_is_passed_down_as_it_is() -> None:
    deadline = Deadline.after(3)
    assert Deadline.after(deadline) is deadline


@pytest.mark.parametrize("timeout", [-1, -1e-9, -math.inf, math.nan])
def test_what_is_no_time_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        Deadline.after(timeout)


@pytest.mark.parametrize("timeout", ["5", [], 1j])
def test_what_is_no_number_is_refused_by_what_it_is(timeout: Any) -> None:
    with pytest.raises(TypeError) as refused:
        Deadline.after(timeout)
    wanted = f"timeout must be a number of seconds, or None; got {timeout!r}"
    assert str(refused.value) == wanted


def test_zero_has_passed_at_once() -> None:
    deadline = Deadline.after(0)
    assert deadline.expired
    assert deadline.remaining() == 0
    with pytest.raises(GroupTimeoutError, match="all_reduce: timed out after 0 s") as caught:
        deadline.check("all_reduce")
    assert caught.value.timeout == 0


@given(st.floats(0, 1e9), st.floats(0, 1e9))
def test_remaining_is_never_negative_nor_more_than_asked(timeout: float, at_most: float) -> None:
    deadline = Deadline.after(timeout)
    assert 0 <= deadline.remaining(at_most) <= min(timeout, at_most)


def test_it_counts_down_from_one_moment() -> None:
    deadline = Deadline(time.monotonic() - 1, 5)
    assert deadline.expired
    assert deadline.remaining() == 0
    later = Deadline(time.monotonic() + 100, 5)
    assert 90 < later.remaining() <= 100
    assert not later.expired


def test_infinite_seconds_never_pass() -> None:
    deadline = Deadline.after(math.inf)
    assert not deadline.expired
    assert deadline.remaining(0.04) == 0.04


def test_more_seconds_than_a_float_holds_never_pass() -> None:
    deadline = Deadline.after(10**400)
    assert not deadline.expired
    assert deadline.remaining(at_most=3) == 3
