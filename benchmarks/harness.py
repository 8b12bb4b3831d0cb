"""What all benchmarks share: rows, ratios, the table, JSON, the plot, the command line.

A benchmark measures each system in turn, several times over, so that a noisy moment of a shared
machine falls on all of them. Reported are the median of all samples, the 99th percentile, and the
spread of the repeats' medians as a share of their median; of one repeat, that of its samples.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.child import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "%": 100.0, "MiB": 2.0**-20}
"""What a sample is multiplied by; samples are seconds, shares or bytes."""


@dataclass(frozen=True)
class Row:
    """One system's figures for one piece of work."""

    work: str
    params: str
    system: str
    median: float
    p99: float
    spread: float
    unit: str


@dataclass(frozen=True)
class Ratio:
    """A peer's median over ours: above 1, ours is better."""

    work: str
    params: str
    ours: str
    peer: str
    ratio: float


@dataclass
class Report:
    """All that a benchmark found out."""

    machine: dict[str, object]
    rows: list[Row] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: dict[str, dict[str, float]] = field(default_factory=dict)
    file: str | None = None
    """Where what is known so far is written after each figure, should the rest never come."""

    def measure(
        self,
        work: str,
        params: str,
        systems: Mapping[str, Callable[[], Sequence[float]]],
        *,
        unit: str = "us",
        repeats: int = 3,
        warm_up: bool = True,
        seconds: float = math.inf,
    ) -> None:
        """Measure each system, in turn; a call returns samples in seconds.

        A peer that fails is left out of this figure.

        Args:
            work: what they do.
            params: how much of it.
            systems: by name.
            unit: of the figures.
            repeats: how often.
            warm_up: whether to do it once more before.
            seconds: a system that has taken as long has no further repeats, but one.
        """
        samples: dict[str, list[Sequence[float]]] = {name: [] for name in systems}
        spent = dict.fromkeys(systems, 0.0)
        for repeat in range(-1 if warm_up else 0, repeats):
            for name in [each for each in samples if not samples[each] or spent[each] < seconds]:
                began = time.monotonic()
                try:
                    taken = systems[name]()
                except PeerError as error:
                    self.left_out[f"{name}, {work} {params}"] = str(error)
                    del samples[name]
                    continue
                spent[name] += time.monotonic() - began
                if repeat >= 0:
                    samples[name].append(taken)
        rows = [summarise(work, params, name, taken, unit) for name, taken in samples.items()]
        self.rows += rows
        for ours in rows:
            if ours.system.startswith("ours"):
                self.ratios += [
                    Ratio(work, params, ours.system, peer.system, peer.median / ours.median)
                    for peer in rows
                    if not peer.system.startswith("ours")
                ]
        self._print(rows)
        self.save()

    def save(self) -> None:
        """Write what is known, if there is a file for it."""
        if self.file:
            known = asdict(self)
            del known["file"]
            Path(self.file).write_text(json.dumps(known, indent=1) + "\n")

    def _print(self, rows: list[Row]) -> None:
        best = rows[0]
        print(f"\n{best.work} {best.params}")
        for row in rows:
            factor = "" if row is best else f"{row.median / best.median:8.2f} x"
            print(
                f"  {row.system:24} {row.median:12.2f} {row.unit:3} p99 {row.p99:12.2f}"
                f"  ±{100 * row.spread / 2:4.0f} % {factor}",
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


def summarise(
    work: str, params: str, system: str, repeats: Sequence[Sequence[float]], unit: str
) -> Row:
    """The figures of one system from its repeats' samples in seconds."""
    scale = UNITS[unit]
    every = sorted(sample * scale for repeat in repeats for sample in repeat)
    medians = [statistics.median(repeat) * scale for repeat in repeats]
    if len(medians) == 1:
        medians = every
    middle = statistics.median(every)
    return Row(
        work,
        params,
        system,
        middle,
        every[min(math.ceil(0.99 * len(every)), len(every)) - 1],
        (max(medians) - min(medians)) / middle,
        unit,
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
