"""Export the last operations of every process of a program: about 2,000 of each process.

Each operation has its group, number, bytes, begin, end and outcome, on one clock. The flight
recorder in shared memory is always on. Operations of a killed process remain while its program
runs.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...inspection.snapshot import scan
from ...inspection.trace import chrome_trace, histories
from .program_text import check_pid, chosen

if TYPE_CHECKING:
    import argparse


_STANDARD_OUTPUT = Path("-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("pid", nargs="?", type=int, metavar="PID", help="a process of the "
        "program, or one that has started it (default: the only program)")  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write a trace that "
        "ui.perfetto.dev and chrome://tracing show; -: to standard output")  # fmt: skip


def prepare(args: argparse.Namespace) -> argparse.Namespace:
    """Check the options, and return them."""
    check_pid(args.pid)
    if args.output is None:
        raise ValueError("no output: give -o FILE")
    if not args.output.parent.is_dir():
        raise ValueError(f"--output {args.output}: not a file in an existing folder")
    return args


def run(args: argparse.Namespace) -> int:
    """Write the trace; return 1 if no program, or more than one, is selected."""
    seen = scan()
    selected = chosen(args.pid, seen)
    if selected is None:
        return 1
    boards = [board for program in selected for board in histories(seen, program)]
    trace = json.dumps(chrome_trace(boards, time.monotonic_ns()))
    if args.output == _STANDARD_OUTPUT:
        print(trace)
    else:
        args.output.write_text(trace)
        operations = sum(len(member.past) for board in boards for member in board)
        print(f"{args.output}: {operations} operations")
    return 0
