"""Write down what every process of a pool or group did last: about 2,000 operations each.

Each has its group, number, bytes, begin and end, on one clock, and how it ended. Shared memory
always keeps them: nothing has to be switched on, and the operations of a killed process stay as
long as its program runs.
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
    """Check the options, and return them.

    Raises:
        ValueError: there is no such process, it is another user's, nothing is to be written, or not
            to a file in a folder.
        OSError: the folder for the dumps cannot be made.
    """
    check_pid(args.pid)
    if args.output is None and args.flight_recorder is None:
        raise ValueError("nothing is to be written: give -o FILE or --flight-recorder DIR")
    if args.output is not None and not args.output.parent.is_dir():
        raise ValueError(f"--output {args.output}: not a file in an existing folder")
    if args.flight_recorder is not None:
        args.flight_recorder.mkdir(parents=True, exist_ok=True)
    return args


def run(args: argparse.Namespace) -> int:
    """Write what is asked for; 1 if there is no such program, or without a pid not one only."""
    seen = scan()
    found = chosen(args.pid, seen)
    if found is None:
        return 1
    boards = [board for program in found for board in histories(seen, program)]
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
    """Write the dumps of each board that has groups, with a folder for each if they are several.

    Returns 1 if there is none.
    """
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
