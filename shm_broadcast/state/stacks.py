"""Read the Python stack of another process, even if it is stuck or has crashed.

On `STACK_SIGNAL`, Python's faulthandler writes the stack into a memfd of the process, from C and
without the GIL. Every member of a board has such a file, and its descriptor's number is on the
board. A pool's driver makes the files of its workers; these also get the stack of a crash.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Self

from shm_broadcast.deadline import Deadline
from shm_broadcast.process import stat_fields, system_call

STACK_SIGNAL: Final = signal.SIGRTMIN + 10

_LABEL: Final = "group-stacks"
_LOOK_SECONDS: Final = 0.01
_WRITING_NS: Final = 1_000_000
"""A process that has run for so long without writing has written its whole stack."""

_written_to: Final[dict[int, int]] = {}
"""The one registry of this module: by pid, the descriptor of a process's stack file.

A forked child has its parent's entry, which does not count for the child.
"""


def writes_stacks_to(descriptor: int) -> None:
    """Record that this process's starter has it write its stacks to ``descriptor``."""
    _written_to[os.getpid()] = descriptor


def write_stacks_when_asked() -> int | None:
    """Write the stack of the main thread on every `STACK_SIGNAL` from now on.

    The handler stays for good: without it the signal would kill the process. Returns the descriptor
    of the memory file; None if the program uses that signal itself.
    """
    descriptor = _written_to.get(os.getpid())
    if descriptor is None:
        if catches(os.getpid(), STACK_SIGNAL) and not _written_to:
            return None
        file = StackFile()
        descriptor = _written_to.setdefault(os.getpid(), file.fd)
        if descriptor == file.fd:
            file.detach()
        else:  # another thread was faster
            file.close()
        # Not all threads: a running thread changes its frames while the handler reads them, which
        # crashes the process sooner or later.
        faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=False)
    return descriptor


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal.

    Raises OSError if there is no such process.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


class StackFile:
    """One end of a process's memory file."""

    def __init__(self) -> None:
        with system_call("memfd_create"):
            self.fd = os.memfd_create(_LABEL, os.MFD_CLOEXEC)
        # All ends share one file offset; appending makes `clear` start at 0 again.
        fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_APPEND)

    @classmethod
    def of(cls, pid: int, descriptor: int) -> Self:
        """Open the file that is ``descriptor`` in another process of this user.

        Raises OSError if it cannot be opened, or is no stack file.
        """
        path = Path(f"/proc/{pid}/fd/{descriptor}")
        if not path.readlink().name.startswith(f"memfd:{_LABEL} "):
            raise FileNotFoundError(f"descriptor {descriptor} of pid {pid} is not for stacks")
        file = cls.__new__(cls)
        file.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return file

    def detach(self) -> int:
        """Return the descriptor, which stays open."""
        descriptor, self.fd = self.fd, -1
        return descriptor

    def read(self) -> str:
        """Return the text since the last `clear`; ``""`` if there is none."""
        return os.pread(self.fd, os.fstat(self.fd).st_size, 0).decode(errors="replace")

    def clear(self) -> None:
        """Truncate the file."""
        os.ftruncate(self.fd, 0)

    def close(self) -> None:
        """Close the file; idempotent."""
        descriptor = self.detach()  # first: a signal handler may call `close`, too
        if descriptor >= 0:
            os.close(descriptor)


class _Writing:
    """The progress of a process that writes its stack, which has no end mark."""

    def __init__(self, file: StackFile, pid: int | None) -> None:
        self._file, self._pid = file, pid
        self._size = self._ran = 0

    def is_over(self) -> bool:
        """Return whether the file stopped growing although the process slept or ran meanwhile."""
        size, ran = os.fstat(self._file.fd).st_size, _ran_for(self._pid)
        if size != self._size:
            self._size, self._ran = size, ran or 0
            return False
        return bool(size) and (ran is None or ran - self._ran > _WRITING_NS)


def _ran_for(pid: int | None) -> int | None:
    """Return how many ns a process's main thread has run; None if it sleeps or that is unknown."""
    try:
        if pid is None or stat_fields(Path(f"/proc/{pid}/stat").read_bytes())[0] != b"R":
            return None
        return int(Path(f"/proc/{pid}/schedstat").read_bytes().split()[0])
    except OSError:
        return None


def read_stacks(
    files: Mapping[int, StackFile],
    pids: Mapping[int, int],
    ask: Callable[[int], None],
    deadline: Deadline,
) -> dict[int, str]:
    """Request the stacks of processes; return those written before the deadline.

    All are by rank or pid: ``pids`` has the processes on this host; ``ask`` sends `STACK_SIGNAL`.
    """
    for rank, file in files.items():
        file.clear()
        ask(rank)
    writing = [_Writing(file, pids.get(rank)) for rank, file in files.items()]
    while writing and not deadline.expired:
        time.sleep(deadline.remaining(at_most=_LOOK_SECONDS))
        writing = [each for each in writing if not each.is_over()]
    stacks = {rank: file.read() for rank, file in files.items()}
    for file in files.values():
        file.clear()  # else it would later pass for the stack of a crash
    return {rank: stack for rank, stack in stacks.items() if stack}
