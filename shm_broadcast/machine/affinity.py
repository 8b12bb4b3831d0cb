"""Keeps a process on some cores."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection

GIVEN_CORES: Final = frozenset(os.sched_getaffinity(0))
"""The cores that this process was given, before it was bound: those of the ranks beside it, too."""
_TASKS: Final = Path("/proc/self/task")


def bind_process(cpus: Collection[int]) -> None:
    """Have all threads of this process, and those that they start, run on ``cpus`` only.

    Memory that they touch first from then on is that of the node (NUMA) that these are on.

    Raises:
        OSError: this process may not use any of them.
    """
    for task in _TASKS.iterdir():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(task.name), cpus)
