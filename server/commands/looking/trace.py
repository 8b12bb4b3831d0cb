"""Export the last operations of every process of a program: about 2,000 of each process.

Each operation has its group, number, bytes, begin, end and outcome, on one clock. The flight
recorder in shared memory is always on. Operations of a killed process remain while its program
runs.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shm_broadcast.inspection.snapshot import scan
from shm_broadcast.inspection.trace import MemberHistory, chrome_trace, flight_dumps, histories

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
    parser.add_argument("--flight-recorder", type=Path, metavar="DIR", help="write a dump for each "
        "rank, rank_0 and so on, for torch.distributed.flight_recorder.fr_trace")  # fmt: skip


def prepare(args: argparse.Namespace) -> argparse.Namespace:
    """Check the options, make the folder for dumps, and return the options."""
    check_pid(args.pid)
    if args.output is None and args.flight_recorder is None:
        raise ValueError("no output: give -o FILE or --flight-recorder DIR")
    if args.output is not None and not args.output.parent.is_dir():
        raise ValueError(f"--output {args.output}: not a file in an existing folder")
    if args.flight_recorder is not None:
        args.flight_recorder.mkdir(parents=True, exist_ok=True)
    return args


def run(args: argparse.Namespace) -> int:
    """Write the outputs; return 1 if no program, or more than one, is selected."""
    seen = scan()
    selected = chosen(args.pid, seen)
    if selected is None:
        return 1
    boards = [board for program in selected for board in histories(seen, program)]
    if args.output is not None:
        trace = json.dumps(chrome_trace(boards, time.monotonic_ns()))
        if args.output == _STANDARD_OUTPUT:
            print(trace)
        else:
            args.output.write_text(trace)
            operations = sum(len(member.past) for board in boards for member in board)
            print(f"{args.output}: {operations} operations")
    return 0 if args.flight_recorder is None else _dump(args.flight_recorder, boards)


def _dump(folder: Path, boards: Sequence[Sequence[MemberHistory]]) -> int:
    epoch = time.time_ns() - time.monotonic_ns()
    dumps = [dump for board in boards if (dump := flight_dumps(board, epoch))]
    for number, dump in enumerate(dumps, 1):
        home = folder / f"board_{number}" if len(dumps) > 1 else folder
        home.mkdir(exist_ok=True)
        for rank, entries in dump.items():
            (home / f"rank_{rank}").write_bytes(pickle.dumps(entries))
        print(f"{home}: {len(dump)} ranks")
    if not dumps:
        sys.stderr.write("no group whose members are all on this host\n")
    return 0 if dumps else 1
