"""Identify processes, wait for their end, and handle forks and refused system calls.

A process is its pid and its start time, so a reused pid is another process.

A child made by `os.fork` holds copies of its parent's ends: cursors, counters and message numbers,
but not the threads that advance them. If both used them, one would take messages meant for the
other. So in a child they refuse to work, and closing them there touches nothing shared.

A pid may be reused; a pid with the process's start time names one process of this boot. A pidfd
that is opened while the start time matches tells in 0.4 µs whether that process has ended.
"""

from __future__ import annotations

import errno
import os
import select
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol
from weakref import WeakSet

from shm_broadcast.errors import SharedMemoryError

_REFUSED: Final = (errno.EPERM, errno.ENOSYS)
"""What is raised for a system call that a seccomp filter forbids, or that the kernel lacks."""


_LIMITS: Final = {
    errno.EFBIG: " (RLIMIT_FSIZE, ulimit -f)",
    errno.EMFILE: " (RLIMIT_NOFILE, ulimit -n)",
}


def describe_os_error(error: OSError) -> str:
    """What the system says, and which limit that is of, if it is a limit of this process."""
    return f"{error.strerror or error}{_LIMITS.get(error.errno or 0, '')}"


@contextmanager
def system_call(name: str) -> Iterator[None]:
    """Where the one system call inside fails, the error names it.

    Raises:
        OSError: as inside.
    """
    try:
        yield
    except OSError as error:
        says = " is refused here" if error.errno in _REFUSED else ""
        raise OSError(error.errno, f"{name}{says}: {error.strerror}") from error


IN_FORKED_CHILD: Final = "it belongs to the process that this one was forked from"
"""Why calls of a forked child are refused."""


class ForkAware(Protocol):
    """Something that one process has joined, and no child of it."""

    def after_fork_in_child(self) -> None:
        """Refuse from now on: this is a forked child. It has one thread."""


_fork_aware: Final[WeakSet[ForkAware]] = WeakSet()
"""All that this process has joined and that is still in use."""


def call_in_forked_children(inherited: ForkAware) -> None:
    """Have ``inherited`` told in every child that this process forks."""
    _fork_aware.add(inherited)


class ForkSafeExitStack(ExitStack):
    """What a process gives back when it closes something. A forked child gives nothing back."""

    def __init__(self) -> None:
        super().__init__()
        call_in_forked_children(self)

    def after_fork_in_child(self) -> None:
        """In a forked child: close nothing, and free nothing, which might wait for threads."""
        self._parents = self.pop_all()


def _after_fork_in_child_all() -> None:
    for inherited in tuple(_fork_aware):
        inherited.after_fork_in_child()
    _fork_aware.clear()


os.register_at_fork(after_in_child=_after_fork_in_child_all)

_PF_EXITING = 0x4
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
"""What is raised where this process, or the machine, has no descriptor left."""


START_TIMES = 1 << 32
"""Start times are counted modulo this, or 497 days: so one of them and a pid fit into 64 bits."""

_ENDED = (b"Z", b"X")
"""The states, in ``/proc/PID/stat``, of a process of which only its exit status is left."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    """One process of this boot.

    Attributes:
        pid: its process id in this pid namespace.
        start_time: clock ticks after boot, field 22 of ``/proc/PID/stat`` (proc(5)), modulo
            `START_TIMES`.
    """

    pid: int
    start_time: int

    @classmethod
    def current(cls) -> ProcessId:
        """This process.

        Raises:
            SharedMemoryError: /proc does not show it.
        """
        pid = os.getpid()
        try:
            shown = os.readlink("/proc/self")  # noqa: PTH115 - a Path takes longer
        except OSError:
            shown = ""
        if shown != str(pid):
            raise SharedMemoryError(
                "no memory can be shared: /proc is not mounted here, or is that of another pid "
                "namespace, and processes find each other there"
            )
        return cls.of(pid)

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """The process that now has ``pid``.

        Raises:
            ProcessLookupError: there is none.
        """
        return cls(pid, _look_at(pid)[1])

    @classmethod
    def from_word(cls, word: int) -> ProcessId:
        """Read the process that `word` gave."""
        return cls(word & (START_TIMES - 1), word >> 32)

    @property
    def word(self) -> int:
        """64 bits for shared memory: the pid in the lower half, the start time in the upper one."""
        return self.start_time << 32 | self.pid

    def is_running(self) -> bool:
        """Whether it still runs (a zombie does not); True if there is no descriptor to look by."""
        try:
            state, start_time = _look_at(self.pid)
        except ProcessLookupError:
            return False
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                return True
            raise
        return start_time == self.start_time and state not in _ENDED


class ProcessWatch:
    """A handle to one process that tells whether it has ended. Close it when done."""

    def __init__(self, process: ProcessId) -> None:
        """Start to watch ``process``; one that has ended already is simply not alive."""
        self.process = process
        self._closed = False
        self._pidfd = _open_pidfd(process)
        self._poll = select.poll()
        if self._pidfd is not None:
            self._poll.register(self._pidfd, select.POLLIN)
            self._release = weakref.finalize(self, os.close, self._pidfd)

    @property
    def pidfd(self) -> int | None:
        """The descriptor, readable once the process has ended; None if it had, or none was to be
        had.
        """
        return self._pidfd

    def alive(self) -> bool:
        """Whether the process still runs (a zombie does not)."""
        if self._pidfd is None:
            return not self._closed and self.process.is_running()
        try:
            return not self._poll.poll(0)
        except RuntimeError:  # in a signal handler that interrupts this very call
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            return not poll.poll(0)

    def close(self) -> None:
        """Close the descriptor; `alive` is False from then on."""
        self._closed = True
        if self._pidfd is not None:
            self._pidfd = None
            self._release()


def is_ending(pid: int) -> bool:
    """Whether a process has begun to end, if it has not ended: then its descriptors close."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return True
    return bool(int(stat_fields(stat)[6]) & _PF_EXITING)


def _look_at(pid: int) -> tuple[bytes, int]:
    """The state of the process that has ``pid``, and when it started."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process has pid {pid}") from None
    fields = stat_fields(stat)
    return fields[0], int(fields[19]) % START_TIMES


def _open_pidfd(process: ProcessId) -> int | None:
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:  # no process, no descriptor, or it is refused: /proc tells as well
        return None
    with suppress(OSError):  # it has ended meanwhile, or this was the last free descriptor
        # Compared after opening: the pidfd is then known to be of the process that we mean.
        if ProcessId.of(process.pid) == process:
            return pidfd
    os.close(pidfd)
    return None


def stat_fields(stat: bytes) -> list[bytes]:
    """The fields of proc(5)'s stat from the third on, by its content."""
    # The command name, field 2, may hold spaces and parentheses; the rest may not.
    return stat[stat.rindex(b")") + 2 :].split()
