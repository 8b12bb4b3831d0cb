"""This user's processes on this host, and the segments that they hold open, from /proc.

Segments have no name, but those that a process holds open appear under ``/proc/PID/fd``, visible
only to processes of the same user. They are read by pread(2), which maps nothing and never waits.

Processes that end meanwhile are left out.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shm_broadcast import layout
from shm_broadcast.machine.liveness import START_TIMES, stat_fields
from shm_broadcast.segment import SEALS

if TYPE_CHECKING:
    from collections.abc import Iterator

CONDITIONS: Final = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel",
    "T": "stopped",
    "t": "stopped",
    "Z": "ended",
    "X": "ended",
}
"""What the letters of proc(5) mean."""

_HEADER: Final = struct.Struct("<IIQ16s")
_COMMAND_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class SegmentSeen:
    """A segment that processes hold open.

    Attributes:
        label: what it is, as `layout.BOARD_LABEL`.
        nonce: names it.
        size: its bytes.
        paths: where it can be opened, while the process of that path holds it.
    """

    label: str
    nonce: bytes
    size: int
    paths: list[str]

    def read(self, size: int) -> bytes:
        """Its first ``size`` bytes, or all if it has fewer.

        Raises:
            OSError: nobody holds it any more.
        """
        with self.opened() as fd:
            return os.pread(fd, min(size, self.size), 0)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """A descriptor to read it by.

        Raises:
            OSError: nobody holds it any more.
        """
        for path in self.paths:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:  # that holder has ended
                continue
            try:
                # It may have closed it since, and have something else under the same number.
                header = os.pread(fd, _HEADER.size, 0)
                if len(header) == _HEADER.size and _HEADER.unpack(header)[-1] == self.nonce:
                    yield fd
                    return
            finally:
                os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "no process holds it any more", self.label)


@dataclass(frozen=True, slots=True)
class ProcessSeen:
    """A process of this user.

    Attributes:
        pid: its process id here.
        inner_pid: its process id in its own pid namespace, as it says on boards.
        start_time: see `ProcessId`.
        parent: its parent's pid.
        condition: one of `CONDITIONS`.
        memory: bytes of memory that it has mapped in, shared ones included.
        command: its command line.
        held: the segments that it holds open, by nonce.
        cores: those that it may run on, as a list such as ``0-3,8``; ``""`` if it holds nothing.
    """

    pid: int
    inner_pid: int
    start_time: int
    parent: int
    condition: str
    memory: int
    command: str
    held: dict[bytes, SegmentSeen]
    cores: str


@dataclass(frozen=True, slots=True)
class Scan:
    """What one look into /proc has found.

    Attributes:
        processes: this user's, by pid.
        unseen: the pids of those of this user that may not be looked into.
    """

    processes: dict[int, ProcessSeen]
    unseen: tuple[int, ...]


def scan() -> Scan:
    """Look at all processes of this user."""
    me, found, unseen = os.geteuid(), {}, []
    known: dict[tuple[int, int], SegmentSeen | None] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - a Path for each of thousands takes longer
        if not name.isdecimal():
            continue
        pid = int(name)
        try:
            if os.stat(f"/proc/{pid}").st_uid == me:  # noqa: PTH116
                found[pid] = _process(pid, known)
        except PermissionError:
            unseen.append(pid)
        except (OSError, ValueError):  # it has ended meanwhile
            continue
    return Scan(found, tuple(unseen))


def condition_of(pid: int) -> str:
    """What the process ``pid`` does, of `CONDITIONS`; ``"ended"`` if there is none."""
    try:
        return _condition(stat_fields(_bytes_of(pid, "stat")))
    except OSError:
        return "ended"


def _process(pid: int, known: dict[tuple[int, int], SegmentSeen | None]) -> ProcessSeen:
    fields = stat_fields(_bytes_of(pid, "stat"))
    condition = _condition(fields)
    held = {each.nonce: each for each in _held(pid, known)} if condition != "ended" else {}
    inner_pid, cores = _pid_and_cores(pid) if held else (pid, "")
    return ProcessSeen(
        pid=pid,
        inner_pid=inner_pid,
        start_time=int(fields[19]) % START_TIMES,
        parent=int(fields[1]),
        condition=condition,
        memory=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        command=_command(pid) if held else "",
        held=held,
        cores=cores,
    )


def _condition(fields: list[bytes]) -> str:
    return CONDITIONS.get(fields[0].decode(), "sleeping")


def _held(pid: int, known: dict[tuple[int, int], SegmentSeen | None]) -> Iterator[SegmentSeen]:
    for entry in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
        path = f"/proc/{pid}/fd/{entry}"
        with suppress(FileNotFoundError):  # closed meanwhile
            target = os.readlink(path)  # noqa: PTH115
            if target.startswith("/memfd:"):
                about = os.stat(path)  # noqa: PTH116
                key = about.st_dev, about.st_ino
                if key not in known:
                    known[key] = _segment(path, target)
                segment = known[key]
                if segment is not None:
                    segment.paths.append(path)
                    yield segment


def _segment(path: str, target: str) -> SegmentSeen | None:
    """The segment at ``path``; None if it is none, or is just being made."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        about, header = os.fstat(fd), os.pread(fd, _HEADER.size, 0)
        if len(header) < _HEADER.size or about.st_uid != os.geteuid():
            return None
        magic, version, size, nonce = _HEADER.unpack(header)
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        if (magic, version) != (layout.MAGIC, layout.VERSION) or not sealed or not any(nonce):
            return None
        if size != about.st_size:
            return None
        label = target.removeprefix("/memfd:").removesuffix(" (deleted)")
        return SegmentSeen(label, nonce, size, [])
    finally:
        os.close(fd)


def _pid_and_cores(pid: int) -> tuple[int, str]:
    """The process id in its own pid namespace, and the cores that it may run on."""
    lines = _bytes_of(pid, "status").decode(errors="replace").splitlines()
    told = {line.partition(":")[0]: line.split() for line in lines}
    return int(told.get("NSpid", [str(pid)])[-1]), told.get("Cpus_allowed_list", [""])[-1]


def _command(pid: int) -> str:
    words = _bytes_of(pid, "cmdline").rstrip(b"\0").split(b"\0")
    return " ".join(word.decode(errors="replace") for word in words)


def _bytes_of(pid: int, name: str) -> bytes:
    with Path(f"/proc/{pid}/{name}").open("rb") as file:
        return file.read(_COMMAND_BYTES)
