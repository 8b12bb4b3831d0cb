"""Identify processes, detect their end, and handle forks and refused system calls.

A pid may be reused; a pid with the process's start time names one process of this boot. A pidfd
that is opened while the start time matches reports in 0.4 µs whether that process has ended.

A child made by `os.fork` holds copies of its parent's ends: cursors, counters and message numbers,
but not the threads that advance them. If both used them, one would take the other's messages. So
calls in a child raise an error, and closing there touches nothing shared.
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
"""The errors of a system call that a seccomp filter forbids or the kernel lacks."""


_LIMITS: Final = {
    errno.EFBIG: " (RLIMIT_FSIZE, ulimit -f)",
    errno.EMFILE: " (RLIMIT_NOFILE, ulimit -n)",
}


def describe_os_error(error: OSError) -> str:
    """Return the system's message, with the name of the process's limit that was reached."""
    return f"{error.strerror or error}{_LIMITS.get(error.errno or 0, '')}"


@contextmanager
def system_call(name: str) -> Iterator[None]:
    """Name the one system call inside the block in its OSError."""
    try:
        yield
    except OSError as error:
        refused = " is refused here" if error.errno in _REFUSED else ""
        raise OSError(error.errno, f"{name}{refused}: {error.strerror}") from error


IN_FORKED_CHILD: Final = "it belongs to the process that this one was forked from"
"""Why calls of a forked child are refused."""


class ForkAware(Protocol):
    """An object that belongs to one process, not to its forked children."""

    def after_fork_in_child(self) -> None:
        """Refuse all later calls: this is a forked child, with one thread."""


_fork_aware: Final[WeakSet[ForkAware]] = WeakSet()
"""All such objects of this process that are still in use."""


def call_in_forked_children(inherited: ForkAware) -> None:
    """Call ``inherited.after_fork_in_child()`` in every child that this process forks."""
    _fork_aware.add(inherited)


class ForkSafeExitStack(ExitStack):
    """An ExitStack that a forked child does not unwind."""

    def __init__(self) -> None:
        super().__init__()
        call_in_forked_children(self)

    def after_fork_in_child(self) -> None:
        """Close nothing and free nothing in a forked child: either might wait for threads."""
        self._parents = self.pop_all()


def _after_fork_in_child_all() -> None:
    for inherited in tuple(_fork_aware):
        inherited.after_fork_in_child()
    _fork_aware.clear()


os.register_at_fork(after_in_child=_after_fork_in_child_all)

_PF_EXITING = 0x4
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
"""The errors when this process, or the machine, has no descriptor left."""


START_TIMES = 1 << 32
"""The modulus of start times (497 days): a start time and a pid fit into 64 bits."""

_ENDED = (b"Z", b"X")
"""The states, in ``/proc/PID/stat``, of an ended process whose parent has not waited for it."""


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
        """Return this process; raise SharedMemoryError if /proc does not show it."""
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
        """Return the process that now has ``pid``; raise ProcessLookupError if there is none."""
        return cls(pid, _state_and_start(pid)[1])

    @classmethod
    def from_word(cls, word: int) -> ProcessId:
        """Return the process of a `word`."""
        return cls(word & (START_TIMES - 1), word >> 32)

    @property
    def word(self) -> int:
        """Return a 64-bit word: the pid in the lower half, the start time in the upper half."""
        return self.start_time << 32 | self.pid

    def is_running(self) -> bool:
        """Return whether it runs (a zombie does not); True if /proc cannot be opened."""
        try:
            state, start_time = _state_and_start(self.pid)
        except ProcessLookupError:
            return False
        except OSError as error:
            if error.errno in NO_DESCRIPTOR:
                return True
            raise
        return start_time == self.start_time and state not in _ENDED


class ProcessWatch:
    """A handle to one process that reports whether it has ended. Close it when done."""

    def __init__(self, process: ProcessId) -> None:
        """Watch ``process``; an ended process is not alive."""
        self.process = process
        self._closed = False
        self._pidfd = _open_pidfd(process)
        self._poll = select.poll()
        if self._pidfd is not None:
            self._poll.register(self._pidfd, select.POLLIN)
            self._release = weakref.finalize(self, os.close, self._pidfd)

    @property
    def pidfd(self) -> int | None:
        """Return the descriptor, readable once the process has ended; None if there is none.

        There is none if the process had ended before, pidfd_open failed, or the watch is closed.
        """
        return self._pidfd

    def alive(self) -> bool:
        """Return whether the process still runs (a zombie does not)."""
        if self._pidfd is None:
            return not self._closed and self.process.is_running()
        try:
            return not self._poll.poll(0)
        except RuntimeError:  # a signal handler interrupts this very call
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
    """Return whether a process has ended or is closing its descriptors at its end."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return True
    return bool(int(stat_fields(stat)[6]) & _PF_EXITING)


def _state_and_start(pid: int) -> tuple[bytes, int]:
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"no process has pid {pid}") from None
    fields = stat_fields(stat)
    return fields[0], int(fields[19]) % START_TIMES


def _open_pidfd(process: ProcessId) -> int | None:
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:  # no process, no descriptor, or refused: `alive` reads /proc instead
        return None
    with suppress(OSError):  # the process has ended, or no descriptor is left to read /proc
        # Compared after opening: an equal start time proves that the pidfd is of `process`.
        if ProcessId.of(process.pid) == process:
            return pidfd
    os.close(pidfd)
    return None


def stat_fields(stat: bytes) -> list[bytes]:
    """Return the fields of proc(5)'s stat from the third on."""
    # The command name, field 2, may hold spaces and parentheses; the rest may not.
    return stat[stat.rindex(b")") + 2 :].split()
