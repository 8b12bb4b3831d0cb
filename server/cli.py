"""Run the console script ``group-coordinator``; its commands are the modules of `commands`.

A command has three functions: ``add_arguments(parser)``; ``prepare(args)``, which checks everything
before a process starts, and returns a plan; ``run(plan)``, which returns the exit status. If the
command's module imports torch, ``add_arguments`` is in a module of `commands.options`, so that
``--help`` is quick.

`prepare` raises `ValueError`, `OSError`, `ImportError` or `CoordinatorError`, which end with status
2. An error of `run` ends with status 1, an interrupt with 130. An error is one line on stderr.
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
    "serve": ("serve", "serve a model over HTTP from a pool of workers"),
    "status": ("looking.status", "show what every process of running pools and groups does"),
    "explain": (
        "looking.explain_hang",
        "show which process blocks a program that hangs, with stacks",
    ),
    "trace": ("looking.trace", "export the last operations of every process, on one clock"),
}
"""Module and summary of each command."""

OPTIONS_APART: Final = {"serve": "options.serve_options"}
"""Modules with the options of commands whose modules import torch."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of ``argv``, by default the process's arguments; return the exit status."""
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
    arguments = sys.argv[1:] if argv is None else argv
    chosen = next((each for each in arguments if each in COMMANDS), None)
    if chosen is not None:
        options = _load(OPTIONS_APART.get(chosen, COMMANDS[chosen][0]))
        parsers[chosen].description = options.__doc__
        options.add_arguments(parsers[chosen])
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        subparser = parsers[args.command]
        subparser.error(f"unrecognized arguments: {' '.join(unknown)}; see {subparser.prog} --help")
    if args.command in OPTIONS_APART:
        _check_folder(parsers[args.command])
    module = _load(COMMANDS[args.command][0])
    if alone:
        gc.freeze()  # no collection visits torch's objects, not even at exit
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
    """Exit with an error: torch ends a process whose working directory was deleted."""
    try:
        Path.cwd()
    except FileNotFoundError:
        parser.error("the current folder was deleted: go to another one")


def _load(name: str) -> Any:
    return importlib.import_module(f".commands.{name}", __package__)


def _sentence(exc: BaseException) -> str:
    if isinstance(exc, OSError) and exc.filename is not None:
        return f"{exc.filename}: {exc.strerror}"
    return " ".join(str(exc).split())
