"""All that has to be shown on a GPU, in one command and one report.

    python -m benchmarks.gpu_report --out gpu-report [--only NAME,...] [--quick]

Runs the steps one after the other, each within its own time, whatever becomes of the others:
``make gpu-test``; replays and eager calls with ranks as processes and on streams; memcheck,
initcheck and synccheck; the pool in float32 and float16, with steps in a graph; NCCL; figures;
a profile of the hottest kernels. Writes ``OUT.json`` and ``OUT.md``. Ends with 1 if a step failed
or ran out of time, with 2 if there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gpu_world import device_facts, require_gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TAIL = 4_000
"""Characters of a step's output that the report keeps."""

_FEW = ["--ways", "streams", "--replays", "60", "--eager", "60"]


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: for ``--only`` and the report.
        shows: what it proves.
        command: its words; ``{json}`` stands for a file that it may write.
        seconds: how long it may take.
        tool: the program without which it is left out.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    seconds: float
    tool: str = ""


@dataclass
class Outcome:
    """What became of a step.

    Attributes:
        state: ``"passed"``, ``"failed"``, ``"out of time"`` or ``"left out"``.
        found: what it wrote as JSON.
        tail: the end of its output.
    """

    name: str
    shows: str
    command: str
    state: str
    seconds: float = 0.0
    found: object = None
    tail: str = field(default="", repr=False)


def steps(python: str, quick: bool) -> list[Step]:
    """All steps; with ``quick`` a tenth of the counts."""
    part = 10 if quick else 1
    run = (python, "-m")
    soak = (*run, "benchmarks.gpu_soak", "--json", "{json}")
    pool = (*run, "benchmarks.gpu_pool", "--json", "{json}")
    nccl = "tests/device_comm/cuda/test_nccl_gpu.py"
    figures = (*run, "benchmarks.gpu", "--json", "{json}", *(["--quick"] if quick else []))
    found = [
        Step(
            "gpu-test", "all tests that need a GPU", ("make", "gpu-test", f"PYTHON={python}"), 590
        ),
        Step(
            "processes",
            "captured replays and eager calls, ranks as processes",
            (*soak, *_counts("processes", 10_000 // part)),
            300,
        ),
        Step(
            "streams",
            "captured replays and eager calls, ranks on streams of one process",
            (*soak, *_counts("streams", 100_000 // part)),
            300,
        ),
    ]
    for tool in ("memcheck", "initcheck", "synccheck"):
        checker = ("compute-sanitizer", "--tool", tool, "--error-exitcode", "9")
        command = (*checker, *run, "benchmarks.gpu_soak", *_FEW)
        found.append(Step(tool, f"compute-sanitizer {tool}", command, 300, "compute-sanitizer"))
    for dtype in ("float32", "float16"):
        shows = f"the pool at tp=2 in {dtype}, equal to the CPU, and steps in a graph"
        found.append(Step(f"pool-{dtype}", shows, (*pool, "--dtype", dtype), 240))
    profile = ("ncu", "--replay-mode", "app-range", "--profile-from-start", "off")
    metrics = "gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed"
    profiled = (*run, "benchmarks.gpu_soak", *_FEW, "--profile")
    return [
        *found,
        Step("nccl", "NCCL alone: a graph, an abort, two ranks on a GPU",
             (*run, "pytest", "-m", "gpu", "-s", nccl), 300),
        Step("figures", "times and bandwidths", figures, 590),
        Step("profile", "the replays under Nsight Compute",
             (*profile, "--metrics", metrics, *profiled), 300, "ncu"),
    ]  # fmt: skip


def _counts(way: str, count: int) -> tuple[str, ...]:
    return ("--ways", way, "--replays", str(count), "--eager", str(count))


def carry_out(step: Step, environment: dict[str, str]) -> Outcome:
    """Run one step to its end, or to the end of its time; nothing of it stays behind."""
    if step.tool and shutil.which(step.tool) is None:
        why = f"{step.tool} is not installed"
        return Outcome(step.name, step.shows, shlex.join(step.command), "left out", tail=why)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        command = [word.replace("{json}", str(file)) for word in step.command]
        began = time.monotonic()
        with Path(folder, "output").open("w+b") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                state = "passed" if process.wait(step.seconds) == 0 else "failed"
            except subprocess.TimeoutExpired:
                state = "out of time"
            finally:
                _end(process)
            output.seek(0)
            tail = output.read().decode(errors="replace")[-TAIL:]
        seconds = time.monotonic() - began
        found = json.loads(file.read_text()) if file.exists() and file.stat().st_size else None
    return Outcome(step.name, step.shows, shlex.join(step.command), state, seconds, found, tail)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End all processes of a step's session; it has been waited for, or is out of time."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def markdown(facts: dict[str, object], outcomes: Sequence[Outcome]) -> str:
    """The report for people."""
    lines = ["# On a GPU", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    lines += ["| step | | seconds | shows |", "|---|---|---|---|"]
    lines += [
        f"| {each.name} | {each.state} | {each.seconds:.1f} | {each.shows} |" for each in outcomes
    ]
    for each in outcomes:
        lines += ["", f"## {each.name}: {each.state}", "", f"`{each.command}`", ""]
        lines += ["```", each.tail.rstrip(), "```"]
    return "\n".join(lines) + "\n"


def report(
    chosen: Sequence[Step],
    facts: dict[str, object],
    out: Path,
    say: Callable[[str], None],
) -> int:
    """Carry out ``chosen`` and write the report after each, so that none is lost."""
    outcomes: list[Outcome] = []
    for step in chosen:
        say(f"{step.name}: {step.shows}, at most {step.seconds:.0f} s")
        outcomes.append(carry_out(step, dict(os.environ)))
        say(f"{step.name}: {outcomes[-1].state} after {outcomes[-1].seconds:.1f} s")
        whole = {"facts": facts, "steps": [asdict(each) for each in outcomes]}
        out.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
        out.with_suffix(".md").write_text(markdown(facts, outcomes))
    return 0 if all(each.state in ("passed", "left out") for each in outcomes) else 1


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(prog="python -m benchmarks.gpu_report", description=__doc__)
    options.add_argument("--out", type=Path, default=Path("gpu-report"), help="without a suffix")
    options.add_argument("--only", default="", help="names of steps, with commas between them")
    options.add_argument("--quick", action="store_true", help="a tenth of the counts")
    options.add_argument("--list", action="store_true", help="name the steps, and end")
    arguments = options.parse_args(argv)
    every = steps(sys.executable, arguments.quick)
    if arguments.list:
        for step in every:
            print(f"{step.name:14} {step.seconds:5.0f} s  {step.shows}")
        return 0
    wanted = arguments.only.split(",") if arguments.only else [step.name for step in every]
    unknown = set(wanted) - {step.name for step in every}
    if unknown:
        options.error(f"no such step: {', '.join(sorted(unknown))}")
    missing = require_gpu()
    if missing:
        print(f"benchmarks.gpu_report: error: {missing}", file=sys.stderr)
        return 2
    facts = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **device_facts()}
    chosen = [step for step in every if step.name in wanted]

    def say(text: str) -> None:
        print(text, flush=True)

    return report(chosen, facts, arguments.out, say)


if __name__ == "__main__":
    sys.exit(main())
