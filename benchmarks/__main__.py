"""All benchmarks in one go: python -m benchmarks [--peers DIR] [--out DIR] [--only NAME ...].

Each runs in a process of its own, one after another; then a page tells what each target came to.
Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.front import front, rewrite
from benchmarks.harness import Row, machine
from benchmarks.model_page import section
from benchmarks.page import page
from benchmarks.targets import TARGETS, judge

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[1] / "README.md"
STEPS = {
    "start": 90.0,
    "message_queue": 840.0,
    "pool": 420.0,
    "costs": 210.0,
    "tensor_dict": 90.0,
    "collectives": 540.0,
    "growth": 180.0,
}
"""How many seconds each benchmark may take: 40 minutes in all, less half a minute."""
BY_HAND = ("between_hosts", "decoder")
"""What needs root, and what takes minutes: their last figures are taken."""
DRAWN = ("collectives", "growth")
END_SECONDS = 30.0
"""How long one may take to end its processes when its time is up."""


def run(name: str, options: argparse.Namespace) -> str:
    """Run one benchmark; why it has not all its figures, empty if it has.

    One whose time is up is interrupted; what it has measured by then is there.
    """
    file = Path(options.out, f"{name}.json")
    drawing = file.with_suffix(".svg")
    for old in (file, drawing):
        old.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(file)]
    command += ["--plot", str(drawing)] if name in DRAWN else []
    command += ["--peers", options.peers] if options.peers else []
    command += ["--quick"] if options.quick else []
    with subprocess.Popen(command) as benchmark:
        try:
            status = benchmark.wait(STEPS[name])
        except subprocess.TimeoutExpired:
            benchmark.send_signal(signal.SIGINT)
            try:
                benchmark.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                benchmark.kill()
            return f"interrupted after {STEPS[name]:g} s"
    return "" if status == 0 else f"ended with status {status}"


def load(out: Path, name: str) -> dict[str, Any]:
    """The report that a benchmark wrote, now or in an earlier run; empty if there is none."""
    file = out / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def main() -> None:
    """Run what is asked for, and write the page of all results that are there."""
    options = argparse.ArgumentParser(description=__doc__)
    add = options.add_argument
    add("--peers", metavar="DIR", help="what `make bench-peers` has installed")
    add("--out", metavar="DIR", default=str(RESULTS), help="for results (benchmarks/results)")
    add(
        "--only",
        nargs="+",
        choices=STEPS,
        default=list(STEPS),
        metavar="NAME",
        help=", ".join(STEPS),
    )
    add("--quick", action="store_true", help="fewer samples: to see that all runs")
    chosen = options.parse_args()
    out = Path(chosen.out)
    out.mkdir(parents=True, exist_ok=True)
    left_out = {}
    for number, name in enumerate(chosen.only, start=1):
        began = time.monotonic()
        told = f"== {name}, {number} of {len(chosen.only)}"
        print(f"\n{told}, for at most {STEPS[name]:.0f} s", flush=True)
        why = run(name, chosen)
        if why:
            left_out[name] = why
        print(f"{told}: {why or 'done'} after {time.monotonic() - began:.0f} s", flush=True)
    found = {name: load(out, name) for name in (*STEPS, *BY_HAND)}
    reports = {
        name: [Row(**row) for row in report["rows"]] for name, report in found.items() if report
    }
    for report in found.values():
        left_out |= report.get("left_out", {})
    verdicts = judge(TARGETS, reports)
    cores = len(os.sched_getaffinity(0))
    today = datetime.now(UTC).date().isoformat()
    drawn = [name for name in DRAWN if (out / f"{name}.svg").exists()]
    told = page(today, machine(), verdicts, reports, left_out, [section(reports, cores)], drawn)
    (out / "bench.md").write_text(told)
    if out.resolve() == RESULTS.resolve() and not chosen.quick:
        rewrite(README, front(reports))
    met = sum(each.met for each in verdicts)
    measured = sum(each.judged for each in verdicts)
    print(f"\n{met} of {measured} targets met: {out / 'bench.md'}")
    sys.exit(bool(left_out.keys() & STEPS.keys()))


if __name__ == "__main__":
    main()
