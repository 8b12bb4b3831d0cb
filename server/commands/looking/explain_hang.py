"""Show which process blocks a program that hangs, with stacks and waiting processes.

On a signal, each process writes the stack of its main thread itself. No debugger is needed, and no
process is stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shm_broadcast.deadline import Deadline

from ...inspection.diagnosis import diagnose, stacks_of
from ...inspection.snapshot import scan
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
    """Check the options, and return them; raise `ValueError` for a wrong pid."""
    check_pid(args.pid)
    return args


def run(args: argparse.Namespace) -> int:
    """Print the explanation; return 1 if no program, or more than one, is found."""
    end_with_reader()
    seen = scan()
    selected = chosen(args.pid, seen)
    if selected is None:
        return 1
    size = screen()
    texts = []
    for program in selected:
        verdict = diagnose(program)
        stacks = stacks_of(verdict.sample[:_MOST_STACKS], Deadline.after(_STACK_SECONDS))
        width = size[0] if size else program_text.UNLIMITED
        texts.append(program_text.explanation(program, verdict, stacks, width))
    print("\n\n".join(texts))
    return 0
