"""The console script ``group-coordinator``; its commands are the modules of `commands`.

A command is three functions: ``add_arguments(parser)``; ``prepare(args)``, which checks everything
that can be checked before a process starts, and returns what `run` needs; ``run(plan)``, which
returns the exit status. If the command's module loads torch, the first is in a module of its own,
so that ``--help`` is quick.

An error in `prepare` ends with status 2, one in `run` with status 1, an interrupt with 130. An
error is one line on stderr.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from shm_broadcast import __version__
from shm_broadcast.errors import CoordinatorError

from .control.output import drop_output, hold_standard_numbers

COMMANDS: Final = {
    "demo": ("demo", "embed sentences with a pool of workers, and check the result"),
    "serve": ("serve", "serve a model over HTTP from a pool of workers"),
    "status": ("looking.status", "show what every process of running pools and groups does"),
    "explain": (
        "looking.explain_hang",
        "say who holds up a program that hangs, and show their stacks",
    ),
    "trace": ("looking.trace", "write down the last operations of every process, on one clock"),
}
"""The module of each command, and what it is for."""

OPTIONS_APART: Final = {"demo": "options.demo_options", "serve": "options.serve_options"}
"""The modules with the options of the commands whose own load torch."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: the process's arguments); return the exit status."""
    hold_standard_numbers()
    alone = argv is None
    if alone:
        gc.disable()
    parser = _Parser(prog="group-coordinator")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {
        name: commands.add_parser(name, help=summary) for name, (_, summary) in COMMANDS.items()
    }
    words = sys.argv[1:] if argv is None else argv
    chosen = next((word for word in words if word in COMMANDS), None)
    if chosen is not None:
        options = _load(OPTIONS_APART.get(chosen, COMMANDS[chosen][0]))
        parsers[chosen].description = options.__doc__
        options.add_arguments(parsers[chosen])
    args, unknown = parser.parse_known_args(words)
    if unknown:
        found = parsers[args.command]
        found.error(f"unrecognized arguments: {' '.join(unknown)}; see {found.prog} --help")
    if args.command in OPTIONS_APART:
        _check_folder(parsers[args.command])
    module = _load(COMMANDS[args.command][0])
    if alone:
        gc.freeze()  # what torch brings along stays: collections pass it by, the last one too
        gc.enable()
    try:
        plan = module.prepare(args)
    except (ValueError, OSError, ImportError, CoordinatorError) as exc:
        parsers[args.command].error(_sentence(exc))
    try:
        status: int = module.run(plan)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except (CoordinatorError, OSError) as exc:
        problem = f"{type(exc).__name__}: {_sentence(exc)}"
        print(f"{parsers[args.command].prog}: {problem}", file=sys.stderr)
        if alone:
            drop_output()
        return 1
    return status


def _check_folder(parser: _Parser) -> None:
    """Torch cannot be loaded in a folder that is gone, and would end the process."""
    try:
        Path.cwd()
    except FileNotFoundError:
        parser.error("the current folder was deleted: go to another one")


def _load(name: str) -> Any:
    """A module of `commands`; only those of the command that was given are ever loaded."""
    return importlib.import_module(f".commands.{name}", __package__)


def _sentence(exc: BaseException) -> str:
    if isinstance(exc, OSError) and exc.filename is not None:
        return f"{exc.filename}: {exc.strerror}"
    return " ".join(str(exc).split())
