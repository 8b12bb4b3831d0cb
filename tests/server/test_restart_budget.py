"""When a pool may be restarted, and after which pause."""

from __future__ import annotations

from server.driver.pool_driver import RestartBudget


def test_so_many_restarts_are_allowed_within_the_window() -> None:
    budget = RestartBudget(2, 60.0)
    assert budget.take(100.0, worked=True) == 0.0
    assert budget.take(110.0, worked=True) == 0.0
    assert budget.take(159.0, worked=True) is None
    assert budget.take(160.5, worked=True) == 0.0
    assert budget.take(165.0, worked=True) is None


def test_so_many_are_allowed_in_vain_however_long_they_take() -> None:
    budget = RestartBudget(2, 60.0)
    assert budget.take(100.0, worked=True) == 0.0
    assert budget.take(400.0, worked=False) == 0.0
    assert budget.take(700.0, worked=False) == 0.1
    assert budget.take(1000.0, worked=False) is None


def test_each_restart_in_vain_is_followed_by_a_longer_pause() -> None:
    budget = RestartBudget(100, 60.0)
    pauses = [budget.take(100.0 + turn, worked=False) for turn in range(9)]
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert budget.take(120.0, worked=True) == 0.0
    assert budget.take(121.0, worked=False) == 0.0
    assert budget.take(122.0, worked=False) == 0.1
