"""A group costs next to nothing above its communicator."""

from __future__ import annotations

from benchmarks.verb_cost import measure


def too_dear() -> set[str]:
    return {verb for verb, cost in measure().items() if cost.group >= 3}


def test_a_verb_costs_less_than_three_microseconds_above_its_communicator() -> None:
    dear = too_dear()
    for _ in range(4):  # whatever else the machine does, it does not make the same verb dear again
        dear = dear and dear & too_dear()
    assert dear == set()
