"""Finds how many cores this process may use, and shares them out among the workers.

A process may be bound to some cores (its affinity), and its control group may limit its processor
time (a quota, as in containers). More threads than that slow each other down.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shm_broadcast.machine.control_groups import control_groups

from .binding import threads_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .binding import Bound


MOST_THREADS: Final = 8192
"""As many cores as Linux knows. OpenMP ends a process that asks for far more."""


def worker_threads(
    n_workers: int, bound: Bound = (), environment: Mapping[str, str] = os.environ
) -> int:
    """CPU threads for each of ``n_workers`` workers: ``OMP_NUM_THREADS``, or an equal share.

    Args:
        n_workers: of this host.
        bound: the cores that they are bound to: no worker gets more threads than these keep busy.
        environment: where the variable is; one of more than `MOST_THREADS` counts as none.
    """
    wanted = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if wanted.isdecimal() and 0 < int(wanted) <= MOST_THREADS:
        return int(wanted)
    share = max(1, usable_cores() // n_workers)
    return min(share, threads_of(bound)) if bound else share


def usable_cores() -> int:
    """The number of cores that this process may keep busy, at least 1."""
    allowed = min(len(os.sched_getaffinity(0)), cpu_quota())
    return max(1, math.floor(allowed))


def cpu_quota(root: Path = Path("/")) -> float:
    """The processor time that this process's control groups allow, in cores; ``inf``: no limit.

    Args:
        root: the folder to find the groups in: see `control_groups`.
    """
    quota = math.inf
    for unified, folder in control_groups("cpu", root):
        files = ("cpu.max",) if unified else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quota = min(quota, _ratio(*(folder / file for file in files)))
    return quota


def _ratio(*files: Path) -> float:
    """Quota divided by period, both read from ``files``; ``inf`` for no limit."""
    try:
        quota, period = (int(word) for file in files for word in file.read_text().split())
    except (OSError, ValueError):  # "max" is no number: no limit
        return math.inf
    return quota / period if quota > 0 and period > 0 else math.inf
