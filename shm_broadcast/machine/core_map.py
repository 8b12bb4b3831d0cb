"""Which cores there are, which are close to each other, and what they share, from Linux's sysfs.

A core may run several threads at once ("SMT"); Linux numbers these, and calls each a CPU. Cores
that are equally near to a part of the memory form a node ("NUMA").
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Set

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
