"""Figures: measured in repeats, judged by targets, modelled, and shown in README and pages."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import pytest

from benchmarks.child import PeerError
from benchmarks.front import BEGIN, COLUMNS, END, LINES, RATES, front, rewrite
from benchmarks.harness import Figure as Measured
from benchmarks.harness import Report, Row, summarise
from benchmarks.model import (
    Level,
    Link,
    chunks,
    flat,
    hierarchical,
    many_rings,
    meetings,
    over,
    read,
)
from benchmarks.model_page import section
from benchmarks.page import duration, page
from benchmarks.targets import TARGETS, Figure, Target, judge
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


def test_a_slow_system_has_fewer_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("benchmarks.harness.time.monotonic", lambda: clock[0])
    asked = []

    def taking(name: str, seconds: float) -> list[float]:
        clock[0] += seconds
        asked.append(name)
        return [seconds]

    systems = {"ours": lambda: taking("ours", 0.5), "slow": lambda: taking("slow", 9.0)}
    Report({}).measure(Measured("echo", "1 reader", systems, repeats=4, seconds=2.0))
    assert asked == ["ours", "slow", "ours", "slow", "ours", "ours"]


def test_the_report_is_written_after_each_figure(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    report = Report({"cores": 2}, file=str(file))
    samples = [1.0, 2.0, 4.0]
    report.measure(Measured("echo", "1 reader", {"ours": lambda: samples}, repeats=1))
    assert report.rows[0].spread == 1.5  # of one repeat: that of its samples
    assert '"echo"' in file.read_text()
    assert '"file"' not in file.read_text()


def test_a_figure_is_repeated_after_all_others() -> None:
    asked = []

    def asking(name: str) -> list[float]:
        asked.append(name)
        return [1.0]

    systems = [{name: partial(asking, name)} for name in ("first", "second")]
    short = Measured("echo", "1 reader", systems[0], repeats=1)
    long = Measured("echo", "2 readers", systems[1], repeats=3, warm_up=False)
    Report({}).measure(short, long)
    assert asked == ["first", "first", "second", "second", "second"]


def test_an_interruption_keeps_what_was_measured() -> None:
    report, asked = Report({}), []

    def asking() -> list[float]:
        asked.append(1)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return [float(len(asked))]

    figure = Measured("echo", "1 reader", {"ours": asking}, warm_up=False)
    with pytest.raises(KeyboardInterrupt):
        report.measure(figure)
    assert [row.median for row in report.rows] == [1.5e6]


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
    report.measure(Measured("echo", "1 reader", {"ours": lambda: [1e-6]}, warm_up=True))
    assert [row.states for row in report.rows] == ["NNA"]


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


def test_only_the_table_of_a_page_is_rewritten(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}| old |{END}\nafter\n")
    rewrite(page, "| new |")
    assert page.read_text() == f"before\n{BEGIN}| new |{END}\nafter\n"
    page.write_text(f"before\n{BEGIN}| old |\nafter\n")
    with pytest.raises(ValueError, match=r"page\.md has no place"):
        rewrite(page, "| new |")
    assert page.read_text() == f"before\n{BEGIN}| old |\nafter\n"


# --- The model of all-reduces, against numbers by hand ------------------------------------

KIB, MIB = 1 << 10, 1 << 20
LEVEL = Level(alpha=1e-6, beta=1e-9)
TRANSPORT = Level(alpha=100e-6, beta=1e-9)
LINK = Link("8 Gbit/s", latency=10e-6, bandwidth=1e9 / 2)
"""Half as quick as the transport."""


def test_ranks_meet_so_often() -> None:
    assert [meetings(2, size) for size in (64, 128 * KIB, MIB)] == [1, 1, 9]
    assert [meetings(4, size) for size in (16 * KIB, 17 * KIB, MIB)] == [1, 2, 9]
    assert chunks(64, 64 * MIB) == 1024  # steps of 64 KiB: of 16 MiB / 64, a quarter


def test_a_rank_reads_so_much() -> None:
    assert read(2, 64 * KIB) == 64 * KIB
    assert read(2, MIB) == MIB
    assert read(4, 16 * KIB) == 48 * KIB
    assert read(4, MIB) == 1.5 * MIB


def test_a_link_adds_its_latency_and_the_lower_rate_counts() -> None:
    assert over(TRANSPORT, LINK) == Level(pytest.approx(110e-6), pytest.approx(2e-9))
    quick = Link("80 Gbit/s", 10e-6, 10e9)
    assert over(TRANSPORT, quick).beta == pytest.approx(1e-9)
    assert over(TRANSPORT, quick, rings=4).beta == pytest.approx(0.25e-9)
    assert over(TRANSPORT, quick, rings=64).beta == pytest.approx(0.1e-9)


def test_hosts_by_hand() -> None:
    # 4 hosts of 2 ranks, 16 KiB: a ring of 8 sends 14 times, 28,672 bytes in all
    assert flat(TRANSPORT, LINK, 4, 2, 16 * KIB) == pytest.approx(14 * 110e-6 + 57.344e-6)
    # within a host 2 meetings and 16 KiB twice; a ring of 4 sends 6 times, 24,576 bytes
    found = hierarchical(LEVEL, TRANSPORT, LINK, 4, 2, 16 * KIB)
    assert found == pytest.approx(2e-6 + 32.768e-6 + 6 * 110e-6 + 49.152e-6)
    # 2 meetings and 16 KiB within; the same ring, whose bytes the link carries, not the transport
    found = many_rings(LEVEL, TRANSPORT, LINK, 4, 2, 16 * KIB)
    assert found == pytest.approx(2e-6 + 16.384e-6 + 6 * 110e-6 + 49.152e-6)


def rows_of(**microseconds: float) -> dict[str, list[Row]]:
    return {
        "collectives": [
            Row("all_reduce_", f"fp32 {size} 2 ranks", "ours", median, median, 0.0, "us")
            for size, median in microseconds.items()
        ]
    }


def test_the_section_shows_fits_and_predictions() -> None:
    # 1 µs and 1 ns through the cache, 2 ns through memory
    seen = {"1KiB": 2.024, "128KiB": 132.072, "64MiB": 513 + 134_217.728, "16KiB": 34.768}
    lines = section(rows_of(**seen), 2).splitlines()
    assert (
        "alpha 1.00 µs, beta 1000 ps through the shared cache and 2000 ps through memory." in lines
    )
    assert "| 1KiB | fitted | 2.02 µs | 2.02 µs | +0 % |" in lines
    assert "| 16KiB | predicted | 34.8 µs | 17.4 µs | -50 % |" in lines
    # Of 64 ranks: 2 meetings of 1 + 62 * 0.05 µs, 2,016 bytes; on 8 sockets 0.15 µs, 2 ns.
    # Sockets first: 2 of 1.3 µs and 1,792 bytes, then 2 of 1.9 and 224.
    assert "| 1KiB | 10.2 µs | 24.6 µs | 8.64 µs |" in lines
    assert not any("hosts of 64" in line for line in lines)


def test_hosts_are_in_the_section() -> None:
    reports = rows_of(**{"1KiB": 2.024, "128KiB": 132.072, "64MiB": 134_730.728})
    # 100 µs and 1 ns for the transport
    seen = {"1KiB": 201.024, "64MiB": 67_308.864, "64KiB": 531.072}
    reports["between_hosts"] = [
        Row("all_reduce_ over two hosts", f"{size} {n} ranks", way, median, median, 0.0, "us")
        for size, median in seen.items()
        for n, way in ((2, "ours"), (4, "ours"), (4, "ours, hierarchical"))
    ]
    lines = section(reports, 2).splitlines()
    assert any("alpha 100 µs, beta 1000 ps, which is 8.0 Gbit/s" in line for line in lines)
    assert "| one, 64MiB | fitted | 67.3 ms | 67.3 ms | +0 % |" in lines
    assert "| one, 64KiB | predicted | 531 µs | 266 µs | -50 % |" in lines
    # a ring of 4 sends 6 times, and one and a half of the tensor
    assert "| two, 64KiB | one ring | 531 µs | 698 µs | +31 % |" in lines
    # two meetings, and twice the tensor within the host; a ring of 2
    assert "| two, 64KiB | `hierarchical=True` | 531 µs | 399 µs | -25 % |" in lines
    # 2,046 times 110 µs; to a root and back 73.7 µs, and 30 times 110; 10.2 and 30 times 110
    assert "| 1KiB | 16 | 225 ms | 3.38 ms | 3.31 ms |" in lines
    # 30 times 120, 110 and 102 µs
    assert "| 1KiB | `hierarchical=True` | 3.68 ms | 3.38 ms | 3.14 ms |" in lines


def test_ranks_that_share_cores_are_in_the_section() -> None:
    reports = rows_of(**{"1KiB": 2.024, "128KiB": 132.072, "64MiB": 134_730.728})
    reports["growth"] = [
        Row(f"{verb} of n ranks", n, "ours", median, median, 0.0, "us")
        for verb, n, median in (
            *(("barrier", "2", 900.0), ("barrier", "4", 8.0), ("barrier", "8", 16.0)),
            *(("all_reduce", "2", 900.0), ("all_reduce", "8", 40.0)),
        )
    ]
    lines = section(reports, 2).splitlines()
    assert "| 8 | 40 µs | 32 µs | -20 % |" in lines
    assert not any(line.startswith("| 2 |") for line in lines)


def test_without_its_figures_there_is_no_section() -> None:
    assert section({}, 2) == section(rows_of(**{"1KiB": 2.0}), 2) == ""
