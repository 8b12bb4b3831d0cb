"""The console script ``group-coordinator``: one file per command, exit statuses here.

A command is a module with three functions: ``add_arguments(parser)``, ``prepare(args)``,
which checks everything that can be checked before a process starts, and ``run(plan)``, which
returns the exit status. What `prepare` refuses ends with status 2, what goes wrong in `run`
with status 1, an interrupt with 130; each says why in one line on stderr.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from server import demo, serve
from shm_broadcast.errors import CoordinatorError

if TYPE_CHECKING:
    from collections.abc import Sequence


class Command(Protocol):
    """What a command's module offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""

    def prepare(self, args: argparse.Namespace) -> Any:
        """Check them; return what `run` needs."""

    def run(self, plan: Any) -> int:
        """Do it; return the exit status."""


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
