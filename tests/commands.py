"""Commands that tests run to their end."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]

LIMIT_SECONDS = 120.0
"""For commands that have to load torch on a busy machine."""


def run_to_end(
    *command: str | os.PathLike[str],
    status: int | None = 0,
    timeout: float = LIMIT_SECONDS,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository's folder; return its output, as text.

    ``status``: the exit status that it must have; None: any. ``options``: of `subprocess.run`.
    """
    how = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": timeout, **options}
    done: subprocess.CompletedProcess[str] = subprocess.run(command, check=False, **how)
    assert status in (None, done.returncode), f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done


def run_code(
    code: str, *arguments: str | os.PathLike[str], **options: Any
) -> subprocess.CompletedProcess[str]:
    """As `run_to_end`, of Python code."""
    return run_to_end(sys.executable, "-c", code, *arguments, **options)


@contextmanager
def waiting(code: str) -> Iterator[int]:
    """The pid of a program that has printed a line, and ends when ``input()`` returns."""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline()
        yield program.pid
        program.communicate("\n", timeout=LIMIT_SECONDS)
    assert program.returncode == 0
