"""Show on a terminal how far the workers of a pool have loaded."""

from __future__ import annotations

import sys
from typing import Final, TextIO

_WIDTH: Final = 30
_CLEAR: Final = "\r\x1b[K"


class ProgressBar:
    """An ``on_progress`` of `WorkerPool` that draws a bar; on no terminal, it writes nothing."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._ranks: dict[int, tuple[int, int]] = {}

    def begin(self) -> None:
        """Show that the workers start."""
        self._write("starting the workers")

    def __call__(self, rank: int, done: int, total: int, what: str) -> None:
        """Draw the progress of all ranks together; see `WorkerPool`."""
        self._ranks[rank] = done, total
        loaded, whole = (sum(each) for each in zip(*self._ranks.values(), strict=True))
        if loaded >= whole:
            self._write("warming up")
            return
        filled = _WIDTH * loaded // whole
        bar = "#" * filled + "." * (_WIDTH - filled)
        self._write(f"[{bar}] {100 * loaded // whole:3} % loaded: {what}")

    def end(self, line: str) -> None:
        """Replace the bar by a last line."""
        self._write(f"{line}\n")

    def _write(self, text: str) -> None:
        if self._out is not None and self._out.isatty():
            self._out.write(f"{_CLEAR}{text}")
            self._out.flush()
