"""Read the machine's cores, caches and control groups from Linux.

A CPU is a hardware thread of a core. Cores that share a part of the memory form a NUMA node.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Set
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

GIVEN_CORES: Final = frozenset(os.sched_getaffinity(0))
"""The CPUs of this process at start-up, before binding: also those of other ranks on the host."""
_TASKS: Final = Path("/proc/self/task")


def bind_process(cpus: Collection[int]) -> None:
    """Bind all threads of this process, and threads that they start, to ``cpus``.

    Memory that they touch first after this call lies on the NUMA node of ``cpus``. Raises OSError
    if this process may use none of them.
    """
    for task in _TASKS.iterdir():
        with suppress(ProcessLookupError):  # the thread has exited
            os.sched_setaffinity(int(task.name), cpus)


class ControlGroup(NamedTuple):
    """The folder of a control group; ``unified``: of cgroup version 2."""

    unified: bool
    folder: Path


class _Mount(NamedTuple):
    """A mounted cgroup file system."""

    unified: bool
    controllers: frozenset[str]  # version 1: of this hierarchy, such as "cpu"
    root: PurePosixPath  # the control group that is mounted at `point`
    point: PurePosixPath


def cgroups(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Yield the control groups of this process, each before its visible parents.

    Yields none if their files cannot be read.

    Args:
        controller: version 1: only groups of its hierarchy, such as ``"cpu"``.
        root: the folder of ``proc`` and the mounts.
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
    """Return how many processes of this control group the OOM killer ended; 0 if unknown."""
    for unified, folder in cgroups("memory", root):
        try:
            counts = (folder / ("memory.events" if unified else "memory.oom_control")).read_text()
            words = counts.split()
            return int(words[words.index("oom_kill") + 1])
        except (OSError, ValueError):  # the root group, or another controller's hierarchy
            continue
    return 0


def _mounts(mountinfo: str) -> Iterator[_Mount]:
    for line in mountinfo.splitlines():
        mount, _, kind = line.partition(" - ")
        fields, (name, *rest) = mount.split(), kind.split()
        if name in ("cgroup", "cgroup2"):
            controllers = frozenset(rest[-1].split(","))
            root, point = PurePosixPath(fields[3]), PurePosixPath(fields[4])
            yield _Mount(name == "cgroup2", controllers, root, point)


def _around(mount: _Mount, group: PurePosixPath) -> Iterator[PurePosixPath]:
    inside = group.relative_to(mount.root) if group.is_relative_to(mount.root) else PurePosixPath()
    if ".." in inside.parts:  # outside this process's cgroup namespace
        inside = PurePosixPath()
    for folder in (inside, *inside.parents):
        yield mount.point.relative_to("/") / folder


_MOST_NUMBERS: Final = 1 << 16
_SYSTEM: Final = Path("/sys/devices/system")


class Core(NamedTuple):
    """The usable CPUs of a core, and the number of its NUMA node."""

    node: int
    cpus: tuple[int, ...]


def cores_of(usable: Iterable[int], system: Path = _SYSTEM) -> tuple[Core, ...]:
    """Return the cores of the CPUs ``usable``, node by node.

    Where sysfs is hidden, each CPU counts as a core, and all are on node 0.
    """
    usable = set(usable)
    nodes = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in system.glob("node/node[0-9]*")
        for cpu in _read(folder / "cpulist")
    }
    cores = set()
    for cpu in usable:
        threads = _read(system / f"cpu/cpu{cpu}/topology/thread_siblings_list") & usable
        cores.add(Core(nodes.get(cpu, 0), tuple(sorted(threads | {cpu}))))
    return tuple(sorted(cores))


def share_a_cache(usable: Set[int], cpus: Path = _SYSTEM / "cpu") -> bool:
    """Return whether the ranks' cores share their last-level cache; False if unknown.

    If ``usable``, the CPUs of this process at start-up, is a single one, all CPUs of the machine
    count: other ranks run on other ones.
    """
    try:
        counted = usable if len(usable) > 1 else listed((cpus / "online").read_text())
        caches = (cpus / f"cpu{min(counted)}/cache").glob("index*")
        last = max(caches, key=lambda cache: int((cache / "level").read_text()))
        return counted <= listed((last / "shared_cpu_list").read_text())
    except (OSError, ValueError):
        return False


def listed(text: str) -> set[int]:
    """Return the numbers of a list such as ``0-3,8,10-11``.

    Raises ValueError if it is no such list, or has numbers of 65,536 and more.
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
