"""Fitting measured times to the model, without measuring."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.layout.measure import AlphaBeta, _fit

MOVED = [512.0, 1024.0, 65536.0, 1e6, 4e6]


@given(st.floats(1, 1000), st.floats(1e-5, 1))
def test_exact_times_give_exact_numbers(alpha: float, beta: float) -> None:
    found = _fit(MOVED, [alpha + beta * volume for volume in MOVED])
    assert found.alpha == pytest.approx(alpha, rel=1e-3, abs=1e-3)
    assert found.beta == pytest.approx(beta, rel=1e-3)


def test_nothing_is_negative() -> None:
    falling = _fit([100.0, 1000.0], [20.0, 10.0])
    assert falling.beta == 0
    assert 10 < falling.alpha < 20
    steep = _fit([100.0, 1000.0], [1.0, 100.0])
    assert steep.alpha == 0
    assert steep.beta > 0


def test_times_that_are_all_the_same() -> None:
    assert _fit([1.0, 2.0], [5.0, 5.0]) == AlphaBeta(pytest.approx(5.0), pytest.approx(0, abs=1e-9))
