"""How often the kernel has killed a process because a control group had no memory left."""

from __future__ import annotations

from pathlib import Path

from shm_broadcast.machine.control_groups import control_groups


def memory_kills(root: Path = Path("/")) -> int:
    """How many processes of this one's control group were killed so far; 0 where that is not known.

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
