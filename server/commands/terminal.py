"""Lines for a terminal."""

from __future__ import annotations

import shutil
import signal
import sys


def shown(line: str, width: int) -> str:
    """A line without control characters, not wider than ``width``."""
    text = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line)
    return text if len(text) <= width else text[: width - 3] + "..."


def screen() -> tuple[int, int] | None:
    """The columns and lines of the terminal that is written to; None if it is none."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return tuple(shutil.get_terminal_size())  # type: ignore[return-value]


def end_with_reader() -> None:
    """End without a word when nobody reads the output any more, as in ``... | head``."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
