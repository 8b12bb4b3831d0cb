"""Targets, judged by rows made by hand; the page that tells of them."""

from __future__ import annotations

import pytest

from benchmarks.harness import Figure as Harness
from benchmarks.harness import Report, Row, summarise
from benchmarks.page import duration, page
from benchmarks.targets import TARGETS, Figure, Target, judge


def row(system: str, median: float, work: str = "echo", unit: str = "us") -> Row:
    return Row(work, "1 reader", system, median, 2 * median, 0.1, unit)


ECHO = Figure("queue", "echo", "1 reader")
REPORTS = {"queue": [row("ours", 20.0), row("quick", 30.0), row("slow", 90.0)]}


def met(target: Target) -> bool:
    (verdict,) = judge([target], REPORTS)
    assert verdict.measured
    return verdict.met


def test_ours_has_to_be_so_many_times_as_fast_as_the_peer() -> None:
    assert met(Target("", ECHO, ECHO.of("slow"), 4.5))
    assert not met(Target("", ECHO, ECHO.of("slow"), 4.6))
    (verdict,) = judge([Target("", ECHO, ECHO.of("slow"))], REPORTS)
    assert verdict.times == 4.5


def test_of_several_peers_the_quickest_counts() -> None:
    assert met(Target("", ECHO, ECHO.of("slow", "quick"), 1.5))
    assert not met(Target("", ECHO, ECHO.of("slow", "quick"), 1.6))


def test_a_bound_needs_no_peer() -> None:
    assert met(Target("", ECHO, at_most=20.0))
    assert not met(Target("", ECHO, at_most=19.9))


def test_what_was_not_measured_is_not_met() -> None:
    elsewhere = Figure("pool", "echo", "1 reader")
    for target in (Target("", ECHO, ECHO.of("absent")), Target("", elsewhere, at_most=1.0)):
        (verdict,) = judge([target], REPORTS)
        assert not verdict.measured
        assert not verdict.met


def in_states(system: str, near: float | None, apart: float | None) -> Row:
    return Row("echo", "1 reader", system, 50.0, 60.0, 0.1, "us", near, apart, "NA")


def test_ours_has_to_be_ahead_of_the_best_peer_in_each_state() -> None:
    rows = [in_states("ours", 10, 60), in_states("a", 20, 70), in_states("b", 15, 50)]
    target = Target("", ECHO, ECHO.of("a", "b"))
    (verdict,) = judge([target], {"queue": rows})
    assert (verdict.times, verdict.met) == (50 / 60, False)
    rows[2] = in_states("b", 15, None)
    (verdict,) = judge([target], {"queue": rows})
    assert (verdict.times, verdict.met) == (70 / 60, True)


def test_what_the_machine_decides_is_shown_and_not_judged() -> None:
    target = Target("waking", ECHO, ECHO.of("quick"), limit="a bare futex")
    verdicts = judge([target], REPORTS)
    assert (verdicts[0].judged, verdicts[0].times) == (False, 1.5)
    lines = page("2026-11-23", {}, verdicts, REPORTS, {}).splitlines()
    assert "## Targets: 0 of 0 met" in lines
    shown = "20 µs ±5 % | quick | 30 µs ±5 % | 1.50x | none: a bare futex decides | shown |"
    assert f"| waking | {shown}" in lines


def test_states_have_their_own_medians() -> None:
    """The second repeat's probe took 1.4 times as long as the least: apart."""
    repeats = [[1e-6, 2e-6, 3e-6], [8e-6, 9e-6], [1e-6, 1e-6, 3e-6]]
    found = summarise("echo", "1 reader", "ours", repeats, "us", "NAN")
    assert (found.near, found.apart, found.states) == (1.5, 8.5, "NAN")
    assert found.spread == pytest.approx(1 / 1.5)
    alone = summarise("echo", "1 reader", "ours", repeats, "us")
    assert (alone.near, alone.apart, alone.states) == (None, None, "")


def test_a_probe_says_in_which_state_each_repeat_was_taken() -> None:
    probes = iter([1.0e-6, 1.2e-6, 1.4e-6])
    report = Report({}, probe=lambda: next(probes))
    report.measure(Harness("echo", "1 reader", {"ours": lambda: [1e-6]}, warm_up=True))
    assert [row.states for row in report.rows] == ["NNA"]


def test_the_page_tells_targets_and_figures() -> None:
    targets = [
        Target("a round trip", ECHO, ECHO.of("slow", "quick"), 2),
        Target("a bound", ECHO, at_most=20),
        Target("of another run", ECHO.of("absent"), at_most=20),
    ]
    told = page(
        "2026-11-23", {"cores": 2}, judge(targets, REPORTS), REPORTS, {"SGLang": "no folder"}
    )
    lines = told.splitlines()
    assert "## Targets: 1 of 2 met" in lines
    assert (
        "| a round trip | 20 µs ±5 % | quick | 30 µs ±5 % | 1.50x | ≥ 2x | **not met** |" in lines
    )
    assert "| a bound | 20 µs ±5 % |  |  |  | ≤ 20 | met |" in lines
    assert "| of another run |  |  |  |  | ≤ 20 | not measured |" in lines
    assert "| 1 reader | 20 µs ±5 % | 30 µs ±5 % | 90 µs ±5 % |" in lines
    assert "- SGLang: no folder" in lines


def test_times_have_the_unit_that_suits_them() -> None:
    seconds = (4.2e-7, 1e-6, 0.0009994, 0.0009996, 0.15, 0.9996, 61.23)
    told = [duration(each) for each in seconds]
    assert told == ["0.42 µs", "1 µs", "999 µs", "1 ms", "150 ms", "1 s", "61.2 s"]


def test_a_report_that_is_drawn_names_its_drawing() -> None:
    told = page("2026-11-23", {}, [], REPORTS, {}, ["## More\n\nof it"], ["queue"])
    assert "`python -m benchmarks.queue`, [drawn](queue.svg)" in told
    assert told.endswith("\n## More\n\nof it\n")


def test_each_target_is_named_once() -> None:
    names = [target.what for target in TARGETS]
    assert len(set(names)) == len(names)
