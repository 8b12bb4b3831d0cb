"""Finds the control groups (cgroups, of both versions) of this process, and counts their kills."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class ControlGroup(NamedTuple):
    """A control group.

    Attributes:
        unified: whether it is of version 2.
        folder: where its files are.
    """

    unified: bool
    folder: Path


class _Mount(NamedTuple):
    """A mounted cgroup file system.

    Attributes:
        unified: whether it is of version 2.
        controllers: version 1: the controllers of this hierarchy, such as ``"cpu"``.
        root: the control group that is mounted at `point`.
        point: the folder where it is mounted.
    """

    unified: bool
    controllers: frozenset[str]
    root: PurePosixPath
    point: PurePosixPath


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
    """The groups of this process, each before those around it that are visible here.

    Args:
        controller: version 1: only those of its hierarchy, such as ``"cpu"``.
        root: the folder to find ``proc`` and the mounts in. If files there cannot be read, there
            are no groups.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = list(_mounts((root / "proc/self/mountinfo").read_text()))
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for mount in mounts:
            if mount.unified == (controllers == "") and (
                mount.unified or {controller} <= mount.controllers & set(controllers.split(","))
            ):
                for folder in _around(mount, PurePosixPath(path)):
                    yield ControlGroup(mount.unified, root / folder)


def memory_kills(root: Path = Path("/")) -> int:
    """How many processes of this one's control group the kernel has killed so far, as the group had
    no memory left; 0 where that is not known.

    Args:
        root: the folder to find the group in: see `control_groups`.
    """
    for unified, folder in control_groups("memory", root):
        try:
            counts = (folder / ("memory.events" if unified else "memory.oom_control")).read_text()
            words = counts.split()
            return int(words[words.index("oom_kill") + 1])
        except (OSError, ValueError):  # the machine itself, or another controller's hierarchy
            continue
    return 0


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    for line in mountinfo.splitlines():
        about, _, kind = line.partition(" - ")
        fields, (name, *rest) = about.split(), kind.split()
        if name in ("cgroup", "cgroup2"):
            controllers = frozenset(rest[-1].split(","))
            where = PurePosixPath(fields[3]), PurePosixPath(fields[4])
            yield _Mount(name == "cgroup2", controllers, *where)


def _around(mount: _Mount, group: PurePosixPath) -> Iterator[PurePosixPath]:
    """The folders of ``group`` and of the groups around it, below the root."""
    inside = group.relative_to(mount.root) if group.is_relative_to(mount.root) else PurePosixPath()
    if ".." in inside.parts:  # outside of this process's cgroup namespace
        inside = PurePosixPath()
    for folder in (inside, *inside.parents):
        yield mount.point.relative_to("/") / folder
