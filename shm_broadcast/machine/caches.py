"""Whether cores share their last cache, as Linux tells it in sysfs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from shm_broadcast.machine.core_map import listed

if TYPE_CHECKING:
    from collections.abc import Set

_CPUS: Final = Path("/sys/devices/system/cpu")


def share_a_cache(usable: Set[int], cpus: Path = _CPUS) -> bool:
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
