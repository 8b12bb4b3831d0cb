"""Reads the Python stack of a worker, also of one that is stuck or has crashed.

Each worker shares a memory file (memfd) with the driver. Python's faulthandler writes the stack
into it, from C and without the GIL: when the driver sends `STACK_SIGNAL`, and when the process
crashes.
"""

from __future__ import annotations

import fcntl
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from shm_broadcast import Deadline

_LOOK_SECONDS = 0.01


class StackFile:
    """The driver's end of one worker's memory file."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("worker-stack", os.MFD_CLOEXEC)
        # Driver and worker share one file offset; appending makes `clear` start at 0 again.
        fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_APPEND)

    def read(self) -> str:
        """The text that the worker has written since the last `clear`; ``""`` if none."""
        return os.pread(self.fd, os.fstat(self.fd).st_size, 0).decode(errors="replace")

    def clear(self) -> None:
        """Forget what was written."""
        os.ftruncate(self.fd, 0)

    def close(self) -> None:
        """Close the file; idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def read_stacks(
    files: dict[int, StackFile], ask: Callable[[int], None], deadline: Deadline
) -> dict[int, str]:
    """Ask workers for their stacks; return those that are written before the deadline, by rank.

    Args:
        files: each worker's file, by rank.
        ask: sends `STACK_SIGNAL` to the worker of a rank.
        deadline: when to return without the missing ones.
    """
    for rank, file in files.items():
        file.clear()
        ask(rank)
    # Nothing marks a stack's end: it is complete when its file has stopped growing.
    sizes = dict.fromkeys(files, 0)
    while not deadline.expired:
        time.sleep(deadline.remaining(at_most=_LOOK_SECONDS))
        before, sizes = sizes, {rank: os.fstat(file.fd).st_size for rank, file in files.items()}
        if before == sizes and all(sizes.values()):
            break
    return {rank: file.read() for rank, file in files.items() if sizes[rank]}
