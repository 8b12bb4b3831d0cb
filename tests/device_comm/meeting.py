"""How ranks of a test wait for each other: beside the communicator, which is to fail in it.

After a barrier a rank does not know that its peers have returned from it: one that aborts, dies or
closes next has met them here before.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.patience import STALL_SECONDS, until

if TYPE_CHECKING:
    from device_comm.watch import Watch

SOON = 1.0 + STALL_SECONDS
"""Seconds in which something happens that takes a fraction of one, where machines stall."""


def meet(rank: int, n: int, path: str) -> None:
    """Return once all ranks have come; once for each ``path``."""
    Path(f"{path}.met-{rank}").touch()
    for peer in range(n):
        until(Path(f"{path}.met-{peer}").exists, f"rank {peer} has not come")


def wait_for_abort(watch: Watch) -> None:
    """Wait until some rank has aborted the group."""
    until(lambda: watch.aborted, "nobody has aborted the group")


def die(path: str) -> None:
    """Kill this process; once for each ``path``."""
    Path(f"{path}.died").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def moment_of_death(path: str) -> float:
    """When a rank has called `die`, on the clock that all processes share."""
    return float(Path(f"{path}.died").read_text())
