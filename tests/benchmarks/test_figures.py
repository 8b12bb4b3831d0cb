"""Figures: measured in repeats, judged by targets, modelled, and shown in README and pages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.child import PeerError
from benchmarks.front import BEGIN, COLUMNS, END, LINES, RATES, front
from benchmarks.harness import Figure as Measured
from benchmarks.harness import Report, Row, summarise
from benchmarks.model import (
    Level,
    Link,
    flat,
    hierarchical,
    many_rings,
)
from benchmarks.page import page
from benchmarks.targets import Figure, Target, judge
from tests.commands import ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.quick


def row(system: str, median: float, unit: str = "us") -> Row:
    return Row("echo", "1 reader", system, median, 2 * median, 0.1, unit)


def test_only_a_failing_peer_is_left_out_of_its_figure() -> None:
    report = Report({})

    def fails() -> list[float]:
        raise PeerError("it has ended")

    report.measure(Measured("echo", "1 reader", {"ours": lambda: [1.0, 2.0], "theirs": fails}))
    assert [(row.system, row.median) for row in report.rows] == [("ours", 1.5e6)]
    assert report.left_out == {"theirs, echo 1 reader": "it has ended"}
    with pytest.raises(ZeroDivisionError):
        report.measure(Measured("echo", "1 reader", {"ours": lambda: [1 / 0]}))


def test_the_report_is_written_after_each_figure(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    report = Report({"cores": 2}, file=str(file))
    samples = [1.0, 2.0, 4.0]
    report.measure(Measured("echo", "1 reader", {"ours": lambda: samples}, repeats=1))
    assert report.rows[0].spread == 1.5  # of one repeat: that of its samples
    assert '"echo"' in file.read_text()
    assert '"file"' not in file.read_text()


def test_states_have_their_own_medians() -> None:
    """The second repeat's probe took 1.4 times as long as the least: apart."""
    repeats = [[1e-6, 2e-6, 3e-6], [8e-6, 9e-6], [1e-6, 1e-6, 3e-6]]
    found = summarise("echo", "1 reader", "ours", repeats, "us", "NAN")
    assert (found.near, found.apart, found.states) == (1.5, 8.5, "NAN")
    assert found.spread == pytest.approx(1 / 1.5)
    alone = summarise("echo", "1 reader", "ours", repeats, "us")
    assert (alone.near, alone.apart, alone.states) == (None, None, "")


# --- Targets ------------------------------------------------------------------------------

ECHO = Figure("queue", "echo", "1 reader")
REPORTS = {"queue": [row("ours", 20.0), row("quick", 30.0), row("slow", 90.0)]}


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target("", ECHO, ECHO.of("slow"), 4.5), True),
        (Target("", ECHO, ECHO.of("slow"), 4.6), False),
        (Target("", ECHO, ECHO.of("slow", "quick"), 1.5), True),  # the quickest counts
        (Target("", ECHO, ECHO.of("slow", "quick"), 1.6), False),
        (Target("", ECHO, at_most=20.0), True),
        (Target("", ECHO, at_most=19.9), False),
    ],
)
def test_a_target_is_a_ratio_to_peers_or_a_bound(target: Target, met: bool) -> None:
    (verdict,) = judge([target], REPORTS)
    assert (verdict.measured, verdict.met) == (True, met)


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


# --- Pages --------------------------------------------------------------------------------


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


def test_a_cell_is_the_quickest_of_its_column() -> None:
    made = {"ours": 10.16, "ours (typed)": 7.0, "vLLM": 31, "vLLM (arena)": 30}
    rows = [
        Row("echo", "dict, 1 reader", name, median, median, 0.1, "us")
        for name, median in made.items()
    ]
    _, _, line, *others = front({"message_queue": rows}).splitlines()
    assert line == "| queue: a dict to a reader, and back | 10.2 µs ±5 % | 30 µs ±5 % |  |  |  |  |"
    assert others == [f"| {what} |  |  |  |  |  |  |" for what in [*LINES][1:]]


def test_a_rate_is_shown_a_second() -> None:
    (what,) = RATES
    work, params = LINES[what].work, LINES[what].params
    rows = [Row(work, params, name, ms, ms, 0.2, "ms") for name, ms in (("ours", 8), ("gloo", 20))]
    last = front({"decoder": rows}).splitlines()[-1]
    assert last == f"| {what} | 125 tokens/s ±10 % |  |  | 50 tokens/s ±10 % |  |  |"


def test_the_readme_has_the_figures_of_the_last_run() -> None:
    reports = {
        line.report: json.loads((ROOT / f"benchmarks/results/{line.report}.json").read_text())
        for line in LINES.values()
    }
    shown = front(
        {name: [Row(**each) for each in found["rows"]] for name, found in reports.items()}
    )
    assert f"{BEGIN}{shown}{END}" in (ROOT / "README.md").read_text()
    assert len(shown.splitlines()) == 2 + len(LINES)
    assert all(f"| {column} |" in shown for column in COLUMNS)


# --- The model of all-reduces, against numbers by hand ------------------------------------

KIB, MIB = 1 << 10, 1 << 20
LEVEL = Level(alpha=1e-6, beta=1e-9)
TRANSPORT = Level(alpha=100e-6, beta=1e-9)
LINK = Link("8 Gbit/s", latency=10e-6, bandwidth=1e9 / 2)
"""Half as quick as the transport."""


def test_hosts_by_hand() -> None:
    # 4 hosts of 2 ranks, 16 KiB: a ring of 8 sends 14 times, 28,672 bytes in all
    assert flat(TRANSPORT, LINK, 4, 2, 16 * KIB) == pytest.approx(14 * 110e-6 + 57.344e-6)
    # within a host 2 meetings and 16 KiB twice; a ring of 4 sends 6 times, 24,576 bytes
    found = hierarchical(LEVEL, TRANSPORT, LINK, 4, 2, 16 * KIB)
    assert found == pytest.approx(2e-6 + 32.768e-6 + 6 * 110e-6 + 49.152e-6)
    # 2 meetings and 16 KiB within; the same ring, whose bytes the link carries, not the transport
    found = many_rings(LEVEL, TRANSPORT, LINK, 4, 2, 16 * KIB)
    assert found == pytest.approx(2e-6 + 16.384e-6 + 6 * 110e-6 + 49.152e-6)
