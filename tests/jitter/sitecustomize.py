"""Holds threads up at random lines of the library and of its tests, in all processes.

    JITTER=0.01 PYTHONPATH=$PWD/tests/jitter python -m pytest tests/server/test_pool.py

What a busy machine does seldom, between any two lines, happens all the time so: a wake-up that is
lost, or a test that takes for granted who comes first, shows within a few runs. Python imports a
module of this name by itself when it starts, in workers too.

Python 3.11 has a fault that looks like a hang of ours: where a signal comes just before the main
thread waits, another thread that is traced stands still at the beginning of a function, computing,
until anything wakes a third thread. Tests that have signals come at any moment are left out.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from types import CodeType, FrameType

ONE_LINE_IN: Final = 30
MOST_PAUSES: Final = 12
"""In one function of a process: what is called a thousand times goes on at its usual pace."""
pause = time.sleep
"""Kept, since tests replace it to see what the library sleeps."""
_ROOT: Final = f"{Path(__file__).parents[2]}/"


class Jitter:
    """Pauses of a random length at random lines.

    Args:
        longest: seconds of a pause.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._random = random.Random()
        self._pauses: Counter[CodeType] = Counter()

    def begin(self) -> None:
        """In this thread, in those that it starts, and in forked processes."""
        os.register_at_fork(after_in_child=self._begin_anew)
        threading.settrace(self._called)
        sys.settrace(self._called)

    def _begin_anew(self) -> None:
        self._random.seed()
        self._pauses.clear()

    def _called(self, frame: FrameType, _event: str, _: Any) -> Any:
        code = frame.f_code
        file = code.co_filename
        ours = file.startswith(_ROOT) and "site-packages" not in file
        return self._at_line if ours and self._pauses[code] < MOST_PAUSES else None

    def _at_line(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if self._pauses[code] == MOST_PAUSES:
            return None
        if event == "line" and self._random.randrange(ONE_LINE_IN) == 0:
            self._pauses[code] += 1
            pause(self._random.random() * self._longest)
        return self._at_line


if "JITTER" in os.environ:
    Jitter(float(os.environ["JITTER"])).begin()
