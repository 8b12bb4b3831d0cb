"""Run the console script ``group-coordinator``.

The options of each command are a dataclass in `commands.options`. ``prepare``, if the command's
module has it, checks everything before a process starts. Errors until then end with status 2, an
error afterwards with 1, an interrupt with 130. An error is one line on stderr.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from shm_broadcast import __version__
from shm_broadcast.errors import CoordinatorError

from .commands.options import (
    ExplainOptions,
    ServeOptions,
    StatusOptions,
    TraceOptions,
    add_options,
)
from .control.output import drop_output, hold_standard_numbers


class Command(NamedTuple):
    """A command: its options, summary, module in `commands`, and the function that runs it."""

    options: type
    summary: str
    module: str
    function: str


COMMANDS: Final = {
    "serve": Command(
        ServeOptions, "serve a model over HTTP from a pool of workers", "serve", "run"
    ),
    "status": Command(
        StatusOptions,
        "show what every process of running pools and groups does",
        "inspect",
        "show_status",
    ),
    "explain": Command(
        ExplainOptions,
        "show which process blocks a program that hangs, with stacks",
        "inspect",
        "explain_hang",
    ),
    "trace": Command(
        TraceOptions,
        "export the last operations of every process, on one clock",
        "inspect",
        "write_trace",
    ),
}
_SERVER: Final = ("prometheus_client", "safetensors", "starlette", "tokenizers", "uvicorn")
"""Packages of the extras 'server' and 'demo'."""


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
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name, each in COMMANDS.items():
        parsers[name] = commands.add_parser(name, help=each.summary)
        add_options(parsers[name], each.options)
    args, unknown = parser.parse_known_args(argv)
    chosen, used = COMMANDS[args.command], parsers[args.command]
    if unknown:
        used.error(f"unrecognized arguments: {' '.join(unknown)}; see {used.prog} --help")
    try:
        plan = chosen.options(**{f.name: getattr(args, f.name) for f in fields(chosen.options)})
        if args.command == "serve":
            _check_can_serve()
        module = importlib.import_module(f".commands.{chosen.module}", __package__)
        if alone:
            gc.freeze()  # no collection visits torch's objects, not even at exit
            gc.enable()
        plan = getattr(module, "prepare", lambda options: options)(plan)
    except (ValueError, OSError, ImportError, CoordinatorError) as exc:
        used.error(_sentence(exc))
    try:
        status: int = getattr(module, chosen.function)(plan)
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except (CoordinatorError, OSError) as exc:
        problem = f"{type(exc).__name__}: {_sentence(exc)}"
        print(f"{used.prog}: {problem}", file=sys.stderr)
        if alone:
            drop_output()
        return 1
    return status


def _check_can_serve() -> None:
    """Raise an error if a package is missing, or torch would end this process."""
    missing = [name for name in _SERVER if find_spec(name) is None]
    if missing:
        raise ImportError(f"install the extras 'server' and 'demo': no {', '.join(missing)}")
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ValueError("the current folder was deleted: go to another one") from None


def _sentence(exc: BaseException) -> str:
    if isinstance(exc, OSError) and exc.filename is not None:
        return f"{exc.filename}: {exc.strerror}"
    return " ".join(str(exc).split())
