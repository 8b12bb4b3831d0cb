"""Inspect running programs from outside: the commands ``status``, ``explain`` and ``trace``."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from shm_broadcast.deadline import Deadline

from ..inspection.diagnosis import diagnose, stacks_of
from ..inspection.snapshot import Program, Scan, of_process, programs, scan
from ..inspection.trace import chrome_trace, histories
from . import program_text
from .options import ExplainOptions, StatusOptions, TraceOptions

_STACK_SECONDS: Final = 2.0
_MOST_STACKS: Final = 8
_WATCH_SECONDS: Final = 1.0
_CLEAR: Final = "\x1b[H\x1b[J"
_STANDARD_OUTPUT: Final = Path("-")


@dataclass(frozen=True, slots=True)
class _StatusRecord:
    """Program as ``--json`` prints it; ``held_up``: whether the program hangs."""

    program: Program
    held_up: bool
    sentences: tuple[str, ...]


def show_status(options: StatusOptions) -> int:
    """Print the status; return 1 if the pid is in no program."""
    _end_with_reader()
    while True:
        seen = scan()
        selected = _of_pid(options.pid, seen)
        if options.pid is not None and not selected:
            return 1
        _print_status(options, seen, selected)
        if not options.watch:
            return 0
        time.sleep(_WATCH_SECONDS)


def explain_hang(options: ExplainOptions) -> int:
    """Print the explanation; return 1 if no program, or more than one, is found."""
    _end_with_reader()
    texts = []
    for program in _selected(options.pid, scan()):
        verdict = diagnose(program)
        stacks = stacks_of(verdict.sample[:_MOST_STACKS], Deadline.after(_STACK_SECONDS))
        texts.append(program_text.explanation(program, verdict, stacks, _screen()[0]))
    if texts:
        print("\n\n".join(texts))
    return 0 if texts else 1


def write_trace(options: TraceOptions) -> int:
    """Write the trace; return 1 if no program, or more than one, is selected."""
    seen = scan()
    selected = _selected(options.pid, seen)
    if not selected:
        return 1
    boards = [board for program in selected for board in histories(seen, program)]
    text = json.dumps(chrome_trace(boards, time.monotonic_ns()))
    if options.output == _STANDARD_OUTPUT:
        print(text)
    else:
        options.output.write_text(text)
        operations = sum(len(member.past) for board in boards for member in board)
        print(f"{options.output}: {operations} operations")
    return 0


def _of_pid(pid: int | None, seen: Scan) -> list[Program]:
    """Return the programs of ``pid``, by default all; print to stderr if there is none."""
    if pid is None:
        return programs(seen)
    selected = of_process(pid, seen, programs(seen))
    if not selected:
        refused = pid in seen.unseen
        why = "it may not be inspected" if refused else "it is in no pool or group of ours"
        sys.stderr.write(f"pid {pid}: {why}, and has started no process that is\n")
    return selected


def _selected(pid: int | None, seen: Scan) -> list[Program]:
    """Return the programs of ``pid``, or the only program; none after a message on stderr."""
    selected = _of_pid(pid, seen)
    if pid is not None or len(selected) == 1:
        return selected
    pids = ", ".join(str(each.pid) for each in selected)
    which = f"Which one? There are programs with pid {pids}."
    sys.stderr.write(f"{which if selected else program_text.NO_PROGRAM}\n")
    return []


def _print_status(options: StatusOptions, seen: Scan, selected: list[Program]) -> None:
    width, height = _screen()
    if options.json:
        records = [
            _StatusRecord(each, (verdict := diagnose(each)).is_hang, verdict.sentences)
            for each in selected
        ]
        record = {"programs": records, "unseen_processes": len(seen.unseen)}
        text = msgspec.json.encode(record).decode()
    else:
        text = _status_text(options, seen, selected, width)
        if options.watch and height:
            text = _CLEAR + "\n".join(text.splitlines()[: height - 1])
        elif options.watch:
            text = f"{time.strftime('%H:%M:%S')}\n{text}\n"
    print(text, flush=True)


def _status_text(options: StatusOptions, seen: Scan, selected: list[Program], width: int) -> str:
    if not selected:
        unseen = len(seen.unseen)
        hint = f"\n{unseen} of its processes may not be inspected." if unseen else ""
        return program_text.NO_PROGRAM + hint
    if len(selected) == 1 or options.all or options.pid is not None:
        return "\n\n".join(program_text.program(each, width) for each in selected)
    hint = "`group-coordinator status PID` shows one of them, `--all` each."
    return f"{program_text.overview(selected, width)}\n{hint}"


def _screen() -> tuple[int, int]:
    """Return the columns and lines of the terminal on stdout; without one, unlimited and 0."""
    if sys.stdout is None or not sys.stdout.isatty():
        return program_text.UNLIMITED, 0
    return shutil.get_terminal_size()


def _end_with_reader() -> None:
    """Let a closed pipe end this process silently, as in ``... | head``."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
