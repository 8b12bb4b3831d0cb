"""What all benchmarks share: rows, ratios, the table, JSON, the plot, the command line.

A benchmark measures each system in turn, so that a noisy moment of a shared machine falls on all of
them. A figure is repeated only when all others have had their turn: a noisy minute falls on one
repeat of each, not on all repeats of one. Reported are the median of all samples, the 99th
percentile, and the spread of the repeats' medians as a share of their median; of one repeat, that
of its samples.

A virtual machine's host moves its cores: they share a cache for some seconds, and then none. Where
a report has a probe, it is asked before each repeat, and each state has a median of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.child import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "%": 100.0, "MiB": 2.0**-20}
"""What a sample is multiplied by; samples are seconds, shares or bytes."""


APART = 1.3
"""Cores are apart when the probe takes so many times the least that it has taken in this run."""
STATES = ("near", "apart")


@dataclass(frozen=True)
class Row:
    """One system's figures for one piece of work.

    Attributes:
        work: what was done.
        params: how much of it.
        system: by which.
        median: of all samples.
        p99: the 99th percentile.
        spread: of the repeats' medians, as a share; the larger one of two states.
        unit: of the figures.
        near: the median of repeats while cores shared a cache; ``None``: there were none.
        apart: the same, while they did not.
        states: that of each repeat: N or A.
    """

    work: str
    params: str
    system: str
    median: float
    p99: float
    spread: float
    unit: str
    near: float | None = None
    apart: float | None = None
    states: str = ""


@dataclass(frozen=True)
class Ratio:
    """A peer's median over ours: above 1, ours is better."""

    work: str
    params: str
    ours: str
    peer: str
    ratio: float


@dataclass(frozen=True)
class Figure:
    """What systems are asked to do for one figure.

    Attributes:
        work: what they do.
        params: how much of it.
        systems: by name; a call returns samples in seconds.
        unit: of the figures.
        repeats: how often.
        warm_up: whether to do it once more before.
        seconds: a system that has taken as long has no further repeats, but one.
    """

    work: str
    params: str
    systems: Mapping[str, Callable[[], Sequence[float]]]
    unit: str = "us"
    repeats: int = 3
    warm_up: bool = True
    seconds: float = math.inf


class Taken:
    """The samples of a figure so far.

    Attributes:
        samples: of each repeat, by system.
        probes: the probe's seconds before each, by system.
        left_out: the systems that failed, and why.
    """

    def __init__(self, figure: Figure, probe: Callable[[], float] | None = None) -> None:
        self.figure = figure
        self._probe = probe
        self.probes: dict[str, list[float]] = {name: [] for name in figure.systems}
        self.samples: dict[str, list[Sequence[float]]] = {name: [] for name in figure.systems}
        self.left_out: dict[str, str] = {}
        self._spent = dict.fromkeys(figure.systems, 0.0)

    def ask(self, *, keep: bool) -> None:
        """Ask each system once more that has not taken too long."""
        for name, samples in list(self.samples.items()):
            if samples and self._spent[name] >= self.figure.seconds:
                continue
            probed = self._probe() if self._probe and keep else 0.0
            began = time.monotonic()
            try:
                taken = self.figure.systems[name]()
            except PeerError as error:
                self.left_out[name] = str(error)
                del self.samples[name]
                continue
            self._spent[name] += time.monotonic() - began
            if keep:
                samples.append(taken)
                self.probes[name].append(probed)

    def rows(self, least: float = 0.0) -> list[Row]:
        """What it comes to; ``least`` is what the probe has taken at least, 0 without one."""
        of = self.figure
        return [
            summarise(of.work, of.params, name, repeats, of.unit, self._states(name, least))
            for name, repeats in self.samples.items()
            if repeats
        ]

    def _states(self, name: str, least: float) -> str:
        return "".join("NA"[each > APART * least] for each in self.probes[name]) if least else ""


@dataclass
class Report:
    """All that a benchmark found out."""

    machine: dict[str, object]
    rows: list[Row] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: dict[str, dict[str, float]] = field(default_factory=dict)
    probe: Callable[[], float] | None = None
    """A cache line's way to another core and back, in seconds."""
    file: str | None = None
    """Where what is known so far is written after each figure, should the rest never come."""

    def measure(self, *figures: Figure) -> None:
        """Measure the figures, a repeat of each in turn.

        A peer that fails is left out of its figure. Of figures that are interrupted there is what
        their repeats came to by then.
        """
        taken = [Taken(each, self.probe) for each in figures]
        try:
            for each in taken:
                if each.figure.warm_up:
                    each.ask(keep=False)
            for repeat in range(max((each.repeats for each in figures), default=0)):
                for each in taken:
                    if repeat < each.figure.repeats:
                        each.ask(keep=True)
        finally:
            probes = [some for each in taken for some in each.probes.values()]
            least = min((seconds for some in probes for seconds in some), default=0.0)
            for each in taken:
                self._add(each, least)

    def _add(self, taken: Taken, least: float) -> None:
        figure = taken.figure
        for name, why in taken.left_out.items():
            self.left_out[f"{name}, {figure.work} {figure.params}"] = why
        rows = taken.rows(least)
        self.rows += rows
        for ours in rows:
            if ours.system.startswith("ours"):
                self.ratios += [
                    Ratio(
                        figure.work,
                        figure.params,
                        ours.system,
                        peer.system,
                        peer.median / ours.median,
                    )
                    for peer in rows
                    if not peer.system.startswith("ours")
                ]
        if rows:
            self._print(rows)
        self.save()

    def save(self) -> None:
        """Write what is known, if there is a file for it."""
        if self.file:
            known = asdict(replace(self, probe=None))
            del known["file"], known["probe"]
            Path(self.file).write_text(json.dumps(known, indent=1) + "\n")

    def _print(self, rows: list[Row]) -> None:
        best = rows[0]
        print(f"\n{best.work} {best.params}")
        for row in rows:
            factor = "" if row is best else f"{row.median / best.median:8.2f} x"
            print(
                f"  {row.system:24} {row.median:12.2f} {row.unit:3} p99 {row.p99:12.2f}"
                f"  ±{100 * row.spread / 2:4.0f} % {factor}{by_state(row)}",
                flush=True,
            )

    def finish(
        self, options: argparse.Namespace, draw: Callable[[Sequence[Row], str], None] | None = None
    ) -> None:
        """Name what was left out, and write what the command line asks for.

        Args:
            options: of the command line.
            draw: draws rows to a file; ``None``: as bars.
        """
        for system, reason in self.left_out.items():
            print(f"left out: {system}: {reason}")
        self.file = options.json
        self.save()
        if options.plot:
            (draw or plot)(self.rows, options.plot)


def by_state(row: Row) -> str:
    """The median in each state, and the state of each repeat; empty without a probe."""
    medians = ", ".join(
        f"{state} {getattr(row, state):.2f}" for state in STATES if getattr(row, state) is not None
    )
    return f"  {medians} ({row.states})" if row.states else ""


def summarise(
    work: str,
    params: str,
    system: str,
    repeats: Sequence[Sequence[float]],
    unit: str,
    states: str = "",
) -> Row:
    """The figures of one system from its repeats' samples in seconds, and the state of each."""
    scale = UNITS[unit]
    every = sorted(sample * scale for repeat in repeats for sample in repeat)
    of_state = {
        state: [each for each, its in zip(repeats, states, strict=True) if its == letter]
        for state, letter in zip(STATES, "NA", strict=True)
        if states
    }
    medians = {
        state: scale * statistics.median(sample for repeat in its for sample in repeat)
        for state, its in of_state.items()
        if its
    }
    return Row(
        work,
        params,
        system,
        statistics.median(every),
        every[min(math.ceil(0.99 * len(every)), len(every)) - 1],
        max(_spread(each) for each in of_state.values() or [repeats] if each),
        unit,
        medians.get("near"),
        medians.get("apart"),
        states,
    )


def _spread(repeats: Sequence[Sequence[float]]) -> float:
    medians = [statistics.median(repeat) for repeat in repeats]
    if len(medians) == 1:
        medians = list(repeats[0])
    return (max(medians) - min(medians)) / statistics.median(
        sample for repeat in repeats for sample in repeat
    )


def machine() -> dict[str, object]:
    """What the figures were taken on."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--quick", action="store_true", help="end within 45 s")
    options.add_argument("--json", metavar="FILE", help="write the report as JSON")
    options.add_argument("--plot", metavar="FILE.svg", help="draw the medians (needs matplotlib)")
    options.add_argument(
        "--peers",
        metavar="DIR",
        help="what `make bench-peers` has installed: see benchmarks/peers.py",
    )
    options.add_argument("--only", metavar="TEXT", default="", help="only work that contains TEXT")
    return options


def drawing() -> Any:
    """matplotlib's pyplot, which draws SVG with text that stays text."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    return pyplot


def plot(rows: Sequence[Row], path: str) -> None:
    """Draw one panel for each piece of work, a bar for each system, on a log scale."""
    pyplot = drawing()
    works = list(dict.fromkeys((row.work, row.params) for row in rows))
    figure, axes = pyplot.subplots(len(works), 1, figsize=(8, 1.6 * len(works) + 1), squeeze=False)
    for axis, (work, params) in zip(axes[:, 0], works, strict=True):
        shown = [row for row in rows if (row.work, row.params) == (work, params)]
        names = [row.system for row in shown]
        colours = ["tab:blue" if name.startswith("ours") else "tab:grey" for name in names]
        axis.barh(names, [row.median for row in shown], color=colours)
        axis.set_xscale("log")
        axis.set_title(f"{work} {params} ({shown[0].unit})", fontsize=9)
        axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)
