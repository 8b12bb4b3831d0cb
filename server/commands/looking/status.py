"""Show what every process of this user's pools and groups on this host is doing.

Nothing is stopped or waited for, so it works even when everything is stuck.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from shm_broadcast.inspection.diagnosis import diagnose
from shm_broadcast.inspection.snapshot import Program, Scan, of_process, programs, scan

from ..terminal import end_with_reader, screen
from . import program_text
from .program_text import check_pid, say_none_of

if TYPE_CHECKING:
    import argparse


_WATCH_SECONDS = 1.0
_CLEAR = "\x1b[H\x1b[J"


@dataclass(frozen=True, slots=True)
class _StatusRecord:
    """A program as ``--json`` prints it.

    Attributes:
        program: what was seen.
        held_up: whether somebody waits who should not have to.
        sentences: what `explain` says about it.
    """

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
    """Check the options, and return them.

    Raises:
        ValueError: there is no such process, or it is another user's.
    """
    check_pid(args.pid)
    return args


def run(args: argparse.Namespace) -> int:
    """Print the status; 1 if the given process has nothing to do with this library."""
    end_with_reader()
    while True:
        seen = scan()
        found = programs(seen)
        if args.pid is not None:
            found = of_process(args.pid, seen, found)
            if not found:
                say_none_of(args.pid, seen)
                return 1
        _print(args, seen, found)
        if not args.watch:
            return 0
        time.sleep(_WATCH_SECONDS)


def _print(args: argparse.Namespace, seen: Scan, found: list[Program]) -> None:
    if args.json:
        unseen = len(seen.unseen)
        told = [
            _StatusRecord(each, (verdict := diagnose(each)).is_hang, verdict.sentences)
            for each in found
        ]
        text = msgspec.json.encode({"programs": told, "unseen_processes": unseen}).decode()
    else:
        size = screen()
        text = _text(args, seen, found, size[0] if size else program_text.UNLIMITED)
        if args.watch and size:
            lines = text.splitlines()[: size[1] - 1]
            text = _CLEAR + "\n".join(lines)
        elif args.watch:
            text = f"{time.strftime('%H:%M:%S')}\n{text}\n"
    print(text, flush=True)


def _text(args: argparse.Namespace, seen: Scan, found: list[Program], width: int) -> str:
    if not found:
        unseen = len(seen.unseen)
        hint = f"\n{unseen} of its processes may not be looked into." if unseen else ""
        return program_text.NO_PROGRAM + hint
    if len(found) == 1 or args.all or args.pid is not None:
        return "\n\n".join(program_text.program(each, width) for each in found)
    hint = "`group-coordinator status PID` shows one of them, `--all` each."
    return f"{program_text.overview(found, width)}\n{hint}"
