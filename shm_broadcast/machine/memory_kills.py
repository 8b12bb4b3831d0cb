"""How often the kernel has killed a process because a container had no memory left."""

from __future__ import annotations

from pathlib import Path


def memory_kills(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processes of this container were killed so far; 0 where that is not known.

    Args:
        cgroup: the folder of its memory cgroup.
    """
    try:
        counts = (cgroup / "memory.events").read_text().split()
        return int(counts[counts.index("oom_kill") + 1])
    except (OSError, ValueError):  # the machine itself, or cgroups of the first version
        return 0
