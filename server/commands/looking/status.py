"""Show the state of every process of this user's pools and groups on this host.

No process is stopped or waited for, so the command works while all are stuck.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ...inspection.diagnosis import diagnose
from ...inspection.snapshot import Program, Scan, of_process, programs, scan
from ..terminal import end_with_reader, screen
from . import program_text
from .program_text import check_pid, say_none_of

if TYPE_CHECKING:
    import argparse


_WATCH_SECONDS = 1.0
_CLEAR = "\x1b[H\x1b[J"


@dataclass(frozen=True, slots=True)
class _StatusRecord:
    """Program as ``--json`` prints it; ``held_up``: whether the program hangs."""

    program: Program
    held_up: bool
    sentences: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("pid", nargs="?", type=int, metavar="PID", help="a process of the program, "
        "or one that has started it (default: the only program, or a line for each)")  # fmt: skip
    which.add_argument("--all", action="store_true", help="show all of every program")
    parser.add_argument("--watch", action="store_true", help="show it again every second")
    parser.add_argument("--json", action="store_true", help="print an object, in one line")


def prepare(args: argparse.Namespace) -> argparse.Namespace:
    """Check the options, and return them; raise `ValueError` for a wrong pid."""
    check_pid(args.pid)
    return args


def run(args: argparse.Namespace) -> int:
    """Print the status; return 1 if the pid is in no program."""
    end_with_reader()
    while True:
        seen = scan()
        selected = programs(seen)
        if args.pid is not None:
            selected = of_process(args.pid, seen, selected)
            if not selected:
                say_none_of(args.pid, seen)
                return 1
        _print(args, seen, selected)
        if not args.watch:
            return 0
        time.sleep(_WATCH_SECONDS)


def _print(args: argparse.Namespace, seen: Scan, selected: list[Program]) -> None:
    if args.json:
        unseen = len(seen.unseen)
        records = [
            _StatusRecord(each, (verdict := diagnose(each)).is_hang, verdict.sentences)
            for each in selected
        ]
        text = msgspec.json.encode({"programs": records, "unseen_processes": unseen}).decode()
    else:
        size = screen()
        text = _text(args, seen, selected, size[0] if size else program_text.UNLIMITED)
        if args.watch and size:
            lines = text.splitlines()[: size[1] - 1]
            text = _CLEAR + "\n".join(lines)
        elif args.watch:
            text = f"{time.strftime('%H:%M:%S')}\n{text}\n"
    print(text, flush=True)


def _text(args: argparse.Namespace, seen: Scan, selected: list[Program], width: int) -> str:
    if not selected:
        unseen = len(seen.unseen)
        hint = f"\n{unseen} of its processes may not be inspected." if unseen else ""
        return program_text.NO_PROGRAM + hint
    if len(selected) == 1 or args.all or args.pid is not None:
        return "\n\n".join(program_text.program(each, width) for each in selected)
    hint = "`group-coordinator status PID` shows one of them, `--all` each."
    return f"{program_text.overview(selected, width)}\n{hint}"
