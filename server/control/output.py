"""Labels what a worker prints: every line begins with its rank."""

from __future__ import annotations

import io
import sys
import threading
from typing import TextIO, cast


class LabelledText(io.TextIOWrapper):
    """Text output whose lines begin with a label.

    A line is written as a whole when it ends, so that lines of processes that share the output do
    not mix. A line that is flushed before its end goes on after what was flushed.
    """

    def __init__(self, under: TextIO, label: str) -> None:
        """Take over the file of ``under``, which cannot be used afterwards."""
        encoding, errors = under.encoding, under.errors
        super().__init__(cast("io.TextIOWrapper", under).detach(), encoding, errors)
        self._label = label
        self._begun = ""
        self._amid_line = False
        self._writing = threading.RLock()

    def write(self, text: str, /) -> int:
        """Write the lines that are complete with ``text``; keep the rest for later."""
        with self._writing:
            *ended, self._begun = (self._begun + text).split("\n")
            for line in ended:
                self._put(f"{line}\n")
                self._amid_line = False
            if ended:
                super().flush()
        return len(text)

    def flush(self) -> None:
        """Write the incomplete line as well."""
        with self._writing:
            if self._begun:
                begun, self._begun = self._begun, ""
                self._put(begun)
                self._amid_line = True
            super().flush()

    def _put(self, text: str) -> None:
        super().write(text if self._amid_line else f"{self._label}{text}")


def label_output(label: str) -> None:
    """Label every line of this process's `sys.stdout` and `sys.stderr`."""
    sys.stdout = cast("TextIO", LabelledText(sys.stdout, label))
    sys.stderr = cast("TextIO", LabelledText(sys.stderr, label))
