"""Say which processes of a program wait for which, which one holds it up, and at which line.

Each process writes the stack of its main thread itself, on a signal that this library has it
catch. No debugger is needed, and nothing is stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shm_broadcast.deadline import Deadline
from shm_broadcast.inspection.diagnosis import diagnose, stacks_of
from shm_broadcast.inspection.snapshot import scan

from ..terminal import end_with_reader, screen
from . import program_text
from .program_text import check_pid, chosen

if TYPE_CHECKING:
    import argparse

_STACK_SECONDS = 2.0
_MOST_STACKS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("pid", nargs="?", type=int, metavar="PID", help="a process of the "
        "program, or one that has started it (default: the only program)")  # fmt: skip


def prepare(args: argparse.Namespace) -> argparse.Namespace:
    """Check the options, and return them.

    Raises:
        ValueError: there is no such process, or it is another user's.
    """
    check_pid(args.pid)
    return args


def run(args: argparse.Namespace) -> int:
    """Print the explanation; 1 if there is no such program, or without a pid not one only."""
    end_with_reader()
    seen = scan()
    found = chosen(args.pid, seen)
    if found is None:
        return 1
    size = screen()
    texts = []
    for program in found:
        verdict = diagnose(program)
        stacks = stacks_of(verdict.sample[:_MOST_STACKS], Deadline.after(_STACK_SECONDS))
        width = size[0] if size else program_text.UNLIMITED
        texts.append(program_text.explanation(program, verdict, stacks, width))
    print("\n\n".join(texts))
    return 0
