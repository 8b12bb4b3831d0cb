"""Reads the Python stack of another process, even of one that is stuck or has crashed.

The process has a memory file (memfd). Python's faulthandler writes its stack into it, from C and
without the GIL, when somebody sends `STACK_SIGNAL`. Every member of a board has such a file, and
its descriptor's number is on the board. A pool's driver makes the files of its workers; these also
get the stack when a worker crashes.
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
"""A process that has run for so long and written nothing has written all."""

_written_to: Final[dict[int, int]] = {}
"""The one registry of this module: the descriptor that a process writes its stacks to, by pid: a
forked child has its parent's entry, which says nothing about it."""


def writes_stacks_to(descriptor: int) -> None:
    """Note that whoever started this process has it write its stacks to ``descriptor``."""
    _written_to[os.getpid()] = descriptor


def write_stacks_when_asked() -> int | None:
    """Have this process write the stack of its main thread when it gets `STACK_SIGNAL`.

    It does so from then on for good: the signal would end a process that did not catch it any more.

    Returns:
        The descriptor of its memory file; None if the program uses that signal itself.
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
        # Not of all threads: a running one changes its frames while another reads them, which ends
        # the process sooner or later.
        faulthandler.register(STACK_SIGNAL, file=descriptor, all_threads=False)
    return descriptor


def catches(pid: int, number: int) -> bool:
    """Whether a process catches a signal, which would end it otherwise.

    Raises:
        OSError: there is no such process.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


class StackFile:
    """One end of a process's memory file."""

    def __init__(self) -> None:
        """Make the file."""
        with system_call("memfd_create"):
            self.fd = os.memfd_create(_LABEL, os.MFD_CLOEXEC)
        # All ends share one file offset; appending makes `clear` start at 0 again.
        fcntl.fcntl(self.fd, fcntl.F_SETFL, os.O_APPEND)

    @classmethod
    def of(cls, pid: int, descriptor: int) -> Self:
        """The file that is ``descriptor`` in another process of this user.

        Raises:
            OSError: it cannot be opened, or is something else.
        """
        path = Path(f"/proc/{pid}/fd/{descriptor}")
        if not path.readlink().name.startswith(f"memfd:{_LABEL} "):
            raise FileNotFoundError(f"descriptor {descriptor} of pid {pid} is not for stacks")
        file = cls.__new__(cls)
        file.fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return file

    def detach(self) -> int:
        """The descriptor, which nobody closes from now on."""
        descriptor, self.fd = self.fd, -1
        return descriptor

    def read(self) -> str:
        """The text that the process has written since the last `clear`; ``""`` if none."""
        return os.pread(self.fd, os.fstat(self.fd).st_size, 0).decode(errors="replace")

    def clear(self) -> None:
        """Forget what was written."""
        os.ftruncate(self.fd, 0)

    def close(self) -> None:
        """Close the file; idempotent."""
        descriptor = self.detach()  # first: a signal handler may close it, too
        if descriptor >= 0:
            os.close(descriptor)


class _Writing:
    """How far a process has come with its stack, whose end nothing marks."""

    def __init__(self, file: StackFile, pid: int | None) -> None:
        self._file, self._pid = file, pid
        self._size = self._ran = 0

    def is_over(self) -> bool:
        """Whether the file has not grown since the last look that found it longer, although the
        process could have written: it sleeps, or has run meanwhile.
        """
        size, ran = os.fstat(self._file.fd).st_size, _ran_for(self._pid)
        if size != self._size:
            self._size, self._ran = size, ran or 0
            return False
        return bool(size) and (ran is None or ran - self._ran > _WRITING_NS)


def _ran_for(pid: int | None) -> int | None:
    """For how many ns the main thread of a process has run; None if it does not want to, or if
    that cannot be seen.
    """
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
    """Ask processes for their stacks; return those that are written before the deadline.

    Args:
        files: each process's file, by its rank or pid.
        pids: of those of them that run on this host, likewise.
        ask: sends `STACK_SIGNAL` to the process with that rank or pid.
        deadline: when to return without the missing ones.
    """
    for rank, file in files.items():
        file.clear()
        ask(rank)
    writing = [_Writing(file, pids.get(rank)) for rank, file in files.items()]
    while writing and not deadline.expired:
        time.sleep(deadline.remaining(at_most=_LOOK_SECONDS))
        writing = [each for each in writing if not each.is_over()]
    found = {rank: file.read() for rank, file in files.items()}
    for file in files.values():
        file.clear()  # what is in it when the process ends tells why
    return {rank: stack for rank, stack in found.items() if stack}
