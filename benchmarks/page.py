"""A run as a page of Markdown: the machine, each target with what came of it, and all figures."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.harness import STATES, UNITS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from benchmarks.harness import Row
    from benchmarks.targets import Diagnosis

INTRODUCTION = """\
Written by `make bench`. Each figure is the median of all samples, ± half of what lies between the
quickest and the slowest repeat, or, of a single one, its samples. All systems of a line took turns
in one run. *Times* is how many times as fast as the peer ours was: above 1, ours is ahead. Where a
virtual machine's cores were near (N) or apart (A), sharing a cache or not, before each repeat, each
state has its own median, and *times* is that of the worse one.
"""


def page(
    date: str,
    machine: Mapping[str, object],
    verdicts: Sequence[Diagnosis],
    reports: Mapping[str, Sequence[Row]],
    left_out: Mapping[str, str],
    sections: Sequence[str] = (),
    drawn: Collection[str] = (),
) -> str:
    """The whole page; ``sections`` come after the figures, the reports in ``drawn`` have an SVG."""
    told = ", ".join(f"{name} {value}" for name, value in machine.items())
    met = sum(verdict.met for verdict in verdicts)
    measured = sum(verdict.judged for verdict in verdicts)
    parts = [
        f"# Figures of {date}",
        INTRODUCTION,
        f"Machine: {told}.",
        f"## Targets: {met} of {measured} met",
        table(
            ("what", "ours", "beside", "its figure", "times", "target", ""),
            [_line(verdict) for verdict in verdicts],
        ),
    ]
    for name, rows in reports.items():
        drawing = f", [drawn]({name}.svg)" if name in drawn else ""
        parts += [f"## {name}", f"`python -m benchmarks.{name}`{drawing}"]
        for work in dict.fromkeys(row.work for row in rows):
            parts.append(_work(work, [row for row in rows if row.work == work]))
    parts += [section for section in sections if section]
    if left_out:
        parts.append("## Left out")
        parts.append("\n".join(f"- {name}: {why}" for name, why in left_out.items()))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _line(verdict: Diagnosis) -> tuple[str, ...]:
    target = verdict.target
    wanted = f"≥ {target.times:.2g}x" if target.peer else f"≤ {target.at_most:g}"
    wanted = f"none: {target.limit} decides" if target.limit else wanted
    peer = " or ".join(target.peer.systems) if target.peer else ""
    if not verdict.measured:
        return target.what, "", peer, "", "", wanted, "not measured"
    assert verdict.ours is not None
    theirs = figure(verdict.peer) if verdict.peer else ""
    if verdict.peer and target.peer and len(target.peer.systems) > 1:
        peer = verdict.peer.system
    times = f"{verdict.times:.2f}x" if verdict.peer else ""
    met = "met" if verdict.met else "**not met**" if verdict.judged else "shown"
    return target.what, figure(verdict.ours), peer, theirs, times, wanted, met


def _work(work: str, rows: Sequence[Row]) -> str:
    systems = list(dict.fromkeys(row.system for row in rows))
    every = list(dict.fromkeys(row.params for row in rows))
    by_place = {(row.params, row.system): row for row in rows}
    lines = [
        (params, *(figure(by_place.get((params, system))) for system in systems))
        for params in every
    ]
    return f"**{work}**\n\n" + table(("", *systems), lines)


def figure(row: Row | None) -> str:
    """A median with its unit and spread, and those of two states; nothing for no row."""
    if row is None:
        return ""
    both = row.near is not None and row.apart is not None
    medians = [spoken(replace(row, median=getattr(row, state))) for state in STATES if both]
    states = f" ({' / '.join(medians)} {row.states})" if both else ""
    return f"{spoken(row)} {spread(row)}{states}"


def spread(row: Row) -> str:
    """Half of the distance between the quickest and the slowest repeat."""
    return f"±{50 * row.spread:.0f} %"


def spoken(row: Row | None) -> str:
    """A median with its unit; nothing for no row."""
    if row is None:
        return ""
    timed = row.unit in ("us", "ms", "s")
    return duration(row.median / UNITS[row.unit]) if timed else f"{row.median:.3g} {row.unit}"


def duration(seconds: float) -> str:
    """Three digits, and the unit that suits them."""
    for unit, name in ((1e-6, "µs"), (1e-3, "ms")):
        if seconds < 999.5 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)
