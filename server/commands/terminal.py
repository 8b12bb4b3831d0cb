"""Format lines for a terminal."""

from __future__ import annotations

import shutil
import signal
import sys


def shown(line: str, width: int) -> str:
    """Return a line without control characters, cut to ``width``."""
    text = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)
    return text if len(text) <= width else text[: width - 3] + "..."


def screen() -> tuple[int, int] | None:
    """Return the columns and lines of the terminal on stdout; ``None`` without one."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return tuple(shutil.get_terminal_size())  # type: ignore[return-value]


def end_with_reader() -> None:
    """Let a closed pipe end this process silently, as in ``... | head``."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
