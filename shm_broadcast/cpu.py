"""Read the machine's cores from Linux: which ones there are, what they share, and the cgroup's
limits.

A core may run several threads at once ("SMT"); Linux numbers these, and calls each a CPU. Cores
that are equally near to a part of the memory form a node ("NUMA").
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Set
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

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


def cgroups(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
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
        root: the folder to find the group in: see `cgroups`.
    """
    for unified, folder in cgroups("memory", root):
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


_MOST_NUMBERS: Final = 1 << 16
_SYSTEM: Final = Path("/sys/devices/system")


class Core(NamedTuple):
    """A core of which this process may use something.

    Attributes:
        node: the number of its node.
        cpus: the numbers of its threads that may be used.
    """

    node: int
    cpus: tuple[int, ...]


def cores_of(usable: Iterable[int], system: Path = _SYSTEM) -> tuple[Core, ...]:
    """The cores of the CPUs ``usable``, node by node.

    What is not told, as where sysfs is hidden: each CPU is a core, and all are on node 0.

    Args:
        usable: such as a process's affinity, which is also within its control group's cpuset.
        system: sysfs's folder of the machine's CPUs and nodes.
    """
    usable = set(usable)
    nodes = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for cpu in _read(folder / "cpulist")
    }
    found = set()
    for cpu in usable:
        threads = _read(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") & usable
        found.add(Core(nodes.get(cpu, 0), tuple(sorted(threads | {cpu}))))
    return tuple(sorted(found))


def share_a_cache(usable: Set[int], cpus: Path = _SYSTEM / "cpu") -> bool:
    """Whether cores that ranks may run on share their last cache; False if it is not known.

    Args:
        usable: the cores that this process was given. A single one says nothing of the other ranks:
            then all cores of the machine count.
        cpus: sysfs's folder of the machine's cores.
    """
    try:
        counted = usable if len(usable) > 1 else listed((cpus / "online").read_text())
        caches = (cpus / f"cpu{min(counted)}/cache").glob("index*")
        last = max(caches, key=lambda cache: int((cache / "level").read_text()))
        return counted <= listed((last / "shared_cpu_list").read_text())
    except (OSError, ValueError):
        return False


def listed(text: str) -> set[int]:
    """The numbers of a list such as ``0-3,8,10-11``.

    Raises:
        ValueError: it is none, or has numbers of 65,536 and more.
    """
    numbers: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if int(last or first) >= _MOST_NUMBERS:
            raise ValueError(f"{part}: no machine has so many")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def _read(file: Path) -> set[int]:
    try:
        return listed(file.read_text())
    except (OSError, ValueError):  # a node without CPUs has an empty list
        return set()
