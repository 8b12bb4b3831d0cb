"""The console script ``group-coordinator``; its commands are the modules of `commands`.

A command's module has three functions: ``add_arguments(parser)``; ``prepare(args)``, which checks
everything that can be checked before a process starts; ``run(plan)``, which returns the exit
status. An error in `prepare` ends with status 2, one in `run` with status 1, an interrupt with 130.
An error is one line on stderr.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol, cast

from shm_broadcast.errors import CoordinatorError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Command(Protocol):
    """The interface of a command's module."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options to ``parser``."""

    def prepare(self, args: argparse.Namespace) -> Any:
        """Check the options; return what `run` needs."""

    def run(self, plan: Any) -> int:
        """Carry out the command; return the exit status."""


COMMANDS: Final = {
    "demo": ("demo", "embed sentences with a pool of workers, and check the result"),
    "serve": ("serve", "serve embeddings over HTTP from a pool of workers"),
    "status": ("status", "show what every process of running pools and groups does"),
    "explain": ("explain_hang", "say who holds up a program that hangs, and show their stacks"),
    "trace": ("trace", "write down the last operations of every process, on one clock"),
}
"""The module of each command, and what it is for."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: the process's arguments); return the exit status."""
    parser = _Parser(prog="group-coordinator")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {
        name: commands.add_parser(name, help=summary) for name, (_, summary) in COMMANDS.items()
    }
    words = sys.argv[1:] if argv is None else argv
    chosen = next((word for word in words if word in COMMANDS), None)
    if chosen is not None:  # only this one's module is imported: those that run pools load torch
        home = f".commands.{COMMANDS[chosen][0]}"
        module = cast("Command", importlib.import_module(home, __package__))
        parsers[chosen].description = module.__doc__
        module.add_arguments(parsers[chosen])
    args = parser.parse_args(words)
    try:
        plan = module.prepare(args)
    except (ValueError, OSError, ImportError, CoordinatorError) as exc:
        parsers[args.command].error(_sentence(exc))
    try:
        return module.run(plan)
    except KeyboardInterrupt:
        return 130
    except (CoordinatorError, OSError) as exc:
        problem = f"{type(exc).__name__}: {_sentence(exc)}"
        print(f"{parsers[args.command].prog}: {problem}", file=sys.stderr)
        return 1


def _sentence(exc: BaseException) -> str:
    if isinstance(exc, OSError) and exc.filename is not None:
        return f"{exc.filename}: {exc.strerror}"
    return " ".join(str(exc).split())
