"""The console script ``group-coordinator``; its commands are the modules of `commands`.

A command's module has three functions: ``add_arguments(parser)``; ``prepare(args)``, which checks
everything that can be checked before a process starts; ``run(plan)``, which returns the exit
status. An error in `prepare` ends with status 2, one in `run` with status 1, an interrupt with 130.
An error is one line on stderr.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from shm_broadcast.errors import CoordinatorError

from .commands import demo, serve

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


COMMANDS: dict[str, tuple[Command, str]] = {
    "demo": (demo, "embed sentences with a pool of workers, and check the result"),
    "serve": (serve, "serve embeddings over HTTP from a pool of workers"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (default: the process's arguments); return the exit status."""
    parser = _Parser(prog="group-coordinator")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {}
    for name, (module, summary) in COMMANDS.items():
        parsers[name] = commands.add_parser(name, help=summary, description=module.__doc__)
        module.add_arguments(parsers[name])
    args = parser.parse_args(argv)
    module, _ = COMMANDS[args.command]
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
