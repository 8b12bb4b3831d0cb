"""Which program a command looks at: the one of a pid, or the only one."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from shm_broadcast.onlooker.programs import of_process, programs

from . import program_text

if TYPE_CHECKING:
    from shm_broadcast.onlooker.processes import Scan
    from shm_broadcast.onlooker.programs import Program


def check_pid(pid: int | None) -> None:
    """Raise ValueError unless ``pid`` is a process of this user; None is fine."""
    if pid is None:
        return
    try:
        owner = os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116
    except OSError:
        raise ValueError(f"no process has pid {pid}") from None
    if owner != os.geteuid():
        raise ValueError(f"pid {pid} belongs to another user")


def chosen(pid: int | None, seen: Scan) -> list[Program] | None:
    """The programs of a process, or without one the only program; None, and why on stderr."""
    found = programs(seen)
    if pid is not None:
        found = of_process(pid, seen, found)
        if not found:
            say_none_of(pid, seen)
        return found or None
    if len(found) == 1:
        return found
    pids = ", ".join(str(each.pid) for each in found)
    told = f"Which one? There are programs with pid {pids}." if found else program_text.NO_PROGRAM
    sys.stderr.write(f"{told}\n")
    return None


def say_none_of(pid: int, seen: Scan) -> None:
    """Say on stderr that a process has nothing to do with this library."""
    why = "it may not be looked into" if pid in seen.unseen else "it is in no pool or group of ours"
    sys.stderr.write(f"pid {pid}: {why}, and has started no process that is\n")
