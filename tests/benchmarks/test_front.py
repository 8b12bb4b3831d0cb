"""The README's table of figures: made by hand from rows, and the one that stands there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.front import BEGIN, COLUMNS, END, LINES, RATES, front, rewrite
from benchmarks.harness import Row

ROOT = Path(__file__).parents[2]


def row(system: str, median: float, unit: str = "us") -> Row:
    return Row("echo", "dict, 1 reader", system, median, median, 0.1, unit)


def test_a_cell_is_the_quickest_of_its_column() -> None:
    rows = [row("ours", 10.16), row("ours (typed)", 7.0), row("vLLM", 31), row("vLLM (arena)", 30)]
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


def test_only_the_table_is_rewritten(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}| old |{END}\nafter\n")
    rewrite(page, "| new |")
    assert page.read_text() == f"before\n{BEGIN}| new |{END}\nafter\n"


def test_a_page_without_a_place_for_it_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}| old |\nafter\n")
    with pytest.raises(ValueError, match=r"page\.md has no place"):
        rewrite(page, "| new |")
    assert page.read_text() == f"before\n{BEGIN}| old |\nafter\n"
