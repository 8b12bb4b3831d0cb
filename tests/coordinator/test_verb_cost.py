"""A group costs next to nothing above its communicator."""

from __future__ import annotations

from benchmarks.verb_cost import measure


def test_a_verb_costs_less_than_three_microseconds_above_its_communicator() -> None:
    costs = measure()
    assert {verb for verb, cost in costs.items() if cost.group >= 3} == set()
