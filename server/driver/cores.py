"""Finds how many cores this process may use, and shares them out among the workers.

A process may be bound to some cores (its affinity), and its control group may limit its processor
time (a quota, as in containers). More threads than that slow each other down.
"""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, NamedTuple

from .binding import threads_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from .binding import Bound


MOST_THREADS: Final = 8192
"""As many cores as Linux knows. OpenMP ends a process that asks for far more."""


class _Mount(NamedTuple):
    """A mounted cgroup file system.

    Attributes:
        unified: whether it is of cgroup version 2.
        controllers: version 1: the controllers of this hierarchy, such as ``"cpu"``.
        root: the control group that is mounted at `point`.
        point: the folder where it is mounted.
    """

    unified: bool
    controllers: frozenset[str]
    root: PurePosixPath
    point: PurePosixPath


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
        root: the folder to find ``proc`` and the mounts in. Files there that cannot be read count
            as no limit.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = list(_mounts((root / "proc/self/mountinfo").read_text()))
    except OSError:
        return math.inf
    quota = math.inf
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for mount in mounts:
            if mount.unified == (controllers == "") and (
                mount.unified or {"cpu"} <= mount.controllers & set(controllers.split(","))
            ):
                quota = min([quota, *_quotas(root, mount, PurePosixPath(path))])
    return quota


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    for line in mountinfo.splitlines():
        about, _, kind = line.partition(" - ")
        fields, (name, *rest) = about.split(), kind.split()
        if name in ("cgroup", "cgroup2"):
            controllers = frozenset(rest[-1].split(","))
            where = PurePosixPath(fields[3]), PurePosixPath(fields[4])
            yield _Mount(name == "cgroup2", controllers, *where)


def _quotas(root: Path, mount: _Mount, group: PurePosixPath) -> Iterator[float]:
    """The quotas, in cores, of ``group`` and of the groups around it that are visible here."""
    inside = group.relative_to(mount.root) if group.is_relative_to(mount.root) else PurePosixPath()
    if ".." in inside.parts:  # outside of this process's cgroup namespace
        inside = PurePosixPath()
    for folder in (inside, *inside.parents):
        at = root / mount.point.relative_to("/") / folder
        if mount.unified:
            yield _ratio(at / "cpu.max")
        else:
            yield _ratio(at / "cpu.cfs_quota_us", at / "cpu.cfs_period_us")


def _ratio(*files: Path) -> float:
    """Quota divided by period, both read from ``files``; ``inf`` for no limit."""
    try:
        quota, period = (int(word) for file in files for word in file.read_text().split())
    except (OSError, ValueError):  # "max" is no number: no limit
        return math.inf
    return quota / period if quota > 0 and period > 0 else math.inf
