"""Where a process prints; what a worker prints is labelled: every line begins with its rank."""

from __future__ import annotations

import io
import os
import sys
import threading
from typing import TextIO, cast

_LONGEST_KEPT = 1 << 16
"""Characters of a line that has not ended which are kept."""


class LabelledText(io.TextIOWrapper):
    """Text output whose lines begin with a label.

    A line is written as a whole when it ends, so that lines of processes that share the output do
    not mix. A line that is flushed before its end goes on after what was flushed; so does one that
    is longer than `_LONGEST_KEPT`.
    """

    def __init__(self, under: TextIO, label: str) -> None:
        """Take over the file of ``under``, which cannot be used afterwards."""
        encoding, errors = under.encoding, under.errors
        super().__init__(cast("io.TextIOWrapper", under).detach(), encoding, errors)
        self._label = label
        self._begun: list[str] = []
        self._kept = 0
        self._amid_line = False
        self._writing = threading.RLock()

    def write(self, text: str, /) -> int:
        """Write the lines that are complete with ``text``; keep the rest for later."""
        with self._writing:
            *ended, rest = text.split("\n")
            for line in ended:
                self._put(f"{self._take_begun()}{line}\n")
                self._amid_line = False
            if rest:
                self._begun.append(rest)
                self._kept += len(rest)
            if self._kept > _LONGEST_KEPT:
                self.flush()
            elif ended:
                super().flush()
        return len(text)

    def flush(self) -> None:
        """Write the incomplete line as well."""
        with self._writing:
            if self._begun:
                self._put(self._take_begun())
                self._amid_line = True
            super().flush()

    def _take_begun(self) -> str:
        begun = "".join(self._begun)
        self._begun.clear()
        self._kept = 0
        return begun

    def _put(self, text: str) -> None:
        super().write(text if self._amid_line else f"{self._label}{text}")


def hold_standard_numbers() -> None:
    """Open the null device as standard input, output and error where this process was given none.

    Otherwise what is opened next gets their numbers: messages would be written into sockets.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the lowest free number is given
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def drop_output() -> None:
    """Have what this process could not print go nowhere: at its end Python would try once more."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)


def label_output(label: str) -> None:
    """Label every line of this process's `sys.stdout` and `sys.stderr`.

    Where the process was given none, what is written to it goes nowhere.
    """
    sys.stdout = _labelled(sys.stdout, label)
    sys.stderr = _labelled(sys.stderr, label)


def _labelled(under: TextIO | None, label: str) -> TextIO:
    open_one = open(os.devnull, "w") if under is None else under  # noqa: PTH123, SIM115
    return cast("TextIO", LabelledText(open_one, label))
