"""Standard output of a process; each line of a worker begins with its rank."""

from __future__ import annotations

import io
import os
import sys
import threading
from typing import TextIO, cast

_LONGEST_KEPT = 1 << 16
"""Most characters of an incomplete line that are kept."""


class LabelledText(io.TextIOWrapper):
    """Text output whose lines begin with a label.

    A complete line is written at once, so lines of processes that share the output do not mix. A
    line that was flushed, or exceeds `_LONGEST_KEPT`, continues without a new label.
    """

    def __init__(self, under: TextIO, label: str) -> None:
        """Detach the file of ``under``, which cannot be used afterwards."""
        encoding, errors = under.encoding, under.errors
        super().__init__(cast("io.TextIOWrapper", under).detach(), encoding, errors)
        self._label = label
        self._incomplete: list[str] = []
        self._kept = 0
        self._amid_line = False
        self._writing = threading.RLock()

    def write(self, text: str, /) -> int:
        """Write complete lines; keep the rest for later."""
        with self._writing:
            *ended, rest = text.split("\n")
            for line in ended:
                self._put(f"{self._take_incomplete()}{line}\n")
                self._amid_line = False
            if rest:
                self._incomplete.append(rest)
                self._kept += len(rest)
            if self._kept > _LONGEST_KEPT:
                self.flush()
            elif ended:
                super().flush()
        return len(text)

    def flush(self) -> None:
        """Write the incomplete line as well."""
        with self._writing:
            if self._incomplete:
                self._put(self._take_incomplete())
                self._amid_line = True
            super().flush()

    def _take_incomplete(self) -> str:
        incomplete = "".join(self._incomplete)
        self._incomplete.clear()
        self._kept = 0
        return incomplete

    def _put(self, text: str) -> None:
        super().write(text if self._amid_line else f"{self._label}{text}")


def hold_standard_numbers() -> None:
    """Open /dev/null as standard input, output and error if they are closed.

    Otherwise the next opened descriptors get their numbers, and prints go into sockets.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # open returns the lowest free number
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def drop_output() -> None:
    """Redirect standard output to /dev/null: at exit Python would retry a failed print."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def label_output(label: str) -> None:
    """Label every line of `sys.stdout` and `sys.stderr`; a missing one becomes /dev/null."""
    sys.stdout = _labelled(sys.stdout, label)
    sys.stderr = _labelled(sys.stderr, label)


def _labelled(under: TextIO | None, label: str) -> TextIO:
    file = open(os.devnull, "w") if under is None else under  # noqa: PTH123, SIM115
    return cast("TextIO", LabelledText(file, label))
