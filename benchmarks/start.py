"""From nothing: python -m benchmarks.start [--quick].

What a fresh interpreter takes to import torch, to import ours, and to have started a pool of two
workers and got its first answer; each is a process of its own, in turn.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness import Figure, Report, machine, parser

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_ANSWER = """
from group_coordinator import WorkerPool

class Nothing:
    def __init__(self, context):
        pass

    def no_op(self):
        return "done"

if __name__ == "__main__":
    with WorkerPool(Nothing, tp=2) as pool:
        assert pool.call("no_op") == "done"
        print("answered", flush=True)
"""
PROGRAMS = {
    "import torch": "import torch; print('answered', flush=True)",
    "import group_coordinator": "from group_coordinator import WorkerPool\n"
    "print('answered', flush=True)",
    "a pool's first answer": FIRST_ANSWER,
}


def until_answer(program: Path) -> list[float]:
    """Seconds from the process's start until it has said that it is done."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - began
    if line != b"answered\n":
        raise RuntimeError(f"{program} failed")
    return [seconds]


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    report = Report(machine(), file=options.json)
    with tempfile.TemporaryDirectory() as folder:
        systems: dict[str, Callable[[], list[float]]] = {}
        for number, (name, code) in enumerate(PROGRAMS.items()):
            program = Path(folder, f"program{number}.py")
            program.write_text(code)
            systems[name] = partial(until_answer, program)
        repeats = 2 if options.quick else 7
        report.measure(Figure("start", "a fresh process", systems, unit="s", repeats=repeats))
    report.finish(options)


if __name__ == "__main__":
    main()
