"""All benchmarks in one go: python -m benchmarks [--peers DIR] [--out DIR] [--only NAME ...].

Each runs in a process of its own, one after another; then a page tells what each target came to.
Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, machine
from benchmarks.page import page
from benchmarks.targets import TARGETS, judge

RESULTS = Path(__file__).parent / "results"
STEPS = ("start", "message_queue", "pool", "costs", "tensor_dict", "collectives", "growth")
STEP_SECONDS = 1200.0
"""How long a benchmark may take."""


def run(name: str, options: argparse.Namespace) -> str:
    """Run one benchmark; why it has no result, empty if it has one."""
    out = Path(options.out)
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(out / f"{name}.json")]
    command += ["--plot", str(out / f"{name}.svg")] if name in ("collectives", "growth") else []
    command += ["--peers", options.peers] if options.peers else []
    command += ["--quick"] if options.quick else []
    try:
        ended = subprocess.run(command, timeout=STEP_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"did not end within {STEP_SECONDS:g} s"
    return "" if ended.returncode == 0 else f"ended with status {ended.returncode}"


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
    add("--only", nargs="+", choices=STEPS, default=STEPS, metavar="NAME", help=", ".join(STEPS))
    add("--quick", action="store_true", help="fewer samples: to see that all runs")
    chosen = options.parse_args()
    out = Path(chosen.out)
    out.mkdir(parents=True, exist_ok=True)
    left_out = {}
    for name in chosen.only:
        began = time.monotonic()
        print(f"\n== {name}", flush=True)
        why = run(name, chosen)
        if why:
            left_out[name] = why
        print(f"== {name}: {why or 'done'} after {time.monotonic() - began:.0f} s", flush=True)
    found = {name: load(out, name) for name in STEPS}
    reports = {
        name: [Row(**row) for row in report["rows"]] for name, report in found.items() if report
    }
    for report in found.values():
        left_out |= report.get("left_out", {})
    verdicts = judge(TARGETS, reports)
    today = datetime.now(UTC).date().isoformat()
    (out / "bench.md").write_text(page(today, machine(), verdicts, reports, left_out))
    met = sum(each.met for each in verdicts)
    measured = sum(each.measured for each in verdicts)
    print(f"\n{met} of {measured} targets met: {out / 'bench.md'}")
    sys.exit(bool(left_out.keys() & set(STEPS)))


if __name__ == "__main__":
    main()
