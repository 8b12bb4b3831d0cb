"""Read the programs of this user from outside: processes, boards and queues.

Reading stops, changes and locks nothing. Each host reads the processes on it; `join` unites what
hosts read.

Segments have no name, but those that a process holds open appear under ``/proc/PID/fd``, visible
only to processes of the same user. They are read by pread(2), which maps nothing and never waits.

Processes that end meanwhile are left out.

Boards that share a process belong to one program: a pool, the ranks that torchrun has started, the
engine and the workers of vLLM. Even a stuck program can be inspected: a copy of the board is read,
without waiting for anything. Boards that are just being made or torn down are left out.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from shm_broadcast import layout
from shm_broadcast._native import Words
from shm_broadcast.atomics import read_text
from shm_broadcast.errors import DRIVER_RANK, Failure, MemberStatus
from shm_broadcast.process import START_TIMES, ProcessId, stat_fields
from shm_broadcast.segment import SEALS
from shm_broadcast.state.status import (
    Membership,
    Wait,
    read_groups,
    read_place,
    read_stacks_descriptor,
    read_waits,
)
from shm_broadcast.state.table import Members, first_failure

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
class SegmentInfo:
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
class ProcessInfo:
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
    held: dict[bytes, SegmentInfo]
    cores: str


@dataclass(frozen=True, slots=True)
class Scan:
    """What one look into /proc has found.

    Attributes:
        processes: this user's, by pid.
        unseen: the pids of those of this user that may not be looked into.
    """

    processes: dict[int, ProcessInfo]
    unseen: tuple[int, ...]


def scan() -> Scan:
    """Look at all processes of this user."""
    me, found, unseen = os.geteuid(), {}, []
    known: dict[tuple[int, int], SegmentInfo | None] = {}
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


def _process(pid: int, known: dict[tuple[int, int], SegmentInfo | None]) -> ProcessInfo:
    fields = stat_fields(_bytes_of(pid, "stat"))
    condition = _condition(fields)
    held = {each.nonce: each for each in _held(pid, known)} if condition != "ended" else {}
    inner_pid, cores = _pid_and_cores(pid) if held else (pid, "")
    return ProcessInfo(
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


def _held(pid: int, known: dict[tuple[int, int], SegmentInfo | None]) -> Iterator[SegmentInfo]:
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


def _segment(path: str, target: str) -> SegmentInfo | None:
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
        return SegmentInfo(label, nonce, size, [])
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


_LARGEST_BOARD = 64 << 20


@dataclass(frozen=True, slots=True)
class MemberSnapshot:
    """A member of a board.

    Attributes:
        status: what its slot says; the pid is the one that it has here.
        place: its ranks in its groups: ``"tp 0, pp 1"``.
        condition: its process's, of `CONDITIONS`; ``""`` if it is not seen.
        memory: bytes of memory that its process uses.
        waits: what its threads wait for, the longest wait first.
        stacks: the descriptor that it writes its stacks to.
        cores: those that its process may run on, as a list; ``""`` if it is not seen.
        groups: those that it is in, or was in before it closed them; () if its process has ended.
    """

    status: MemberStatus
    place: str
    condition: str
    memory: int
    waits: tuple[Wait, ...]
    stacks: int | None
    cores: str = ""
    groups: tuple[Membership, ...] = ()


@dataclass(frozen=True, slots=True)
class ReaderSnapshot:
    """A reader of a queue.

    Attributes:
        rank: what its board calls it.
        behind: how many messages it has not read, the one under way included.
        left: whether it has left.
    """

    rank: int
    behind: int
    left: bool


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """A queue of a board.

    Attributes:
        writer: what its board calls the writer.
        readers: who reads.
        messages: how many were begun.
        used: bytes that some reader has not read.
        capacity: bytes of its ring.
        closed: whether its writer has shut it down.
    """

    writer: int
    readers: tuple[ReaderSnapshot, ...]
    messages: int
    used: int
    capacity: int
    closed: bool

    @property
    def behind(self) -> int:
        """How many messages the slowest reader has not read."""
        return max((reader.behind for reader in self.readers), default=0)


@dataclass(frozen=True, slots=True)
class BoardSnapshot:
    """A board.

    Attributes:
        name: the group's; ``""`` for the ranks of a host.
        members: by member number.
        failure: why it was aborted; None if it was not.
        queues: those between its members.
        key: names it among all boards: its segment's nonce.
    """

    name: str
    members: tuple[MemberSnapshot, ...]
    failure: Failure | None
    queues: tuple[QueueSnapshot, ...]
    key: str = ""

    @property
    def is_pool(self) -> bool:
        """Whether it is a pool's: its driver shows there which generation of workers it has."""
        return any(each.status.rank == DRIVER_RANK and each.place for each in self.members)


@dataclass(frozen=True, slots=True)
class Program:
    """Boards that share processes.

    Attributes:
        pid: of the process that stands for it: the driver, or the first rank.
        command: that process's command line.
        boards: those of pools first, then the one with the most members.
        pids: of all processes that hold one of its segments open.
        shared: bytes of shared memory.
    """

    pid: int
    command: str
    boards: tuple[BoardSnapshot, ...]
    pids: tuple[int, ...]
    shared: int


@dataclass(frozen=True, slots=True)
class SegmentCopy:
    """The bytes of a segment at one moment, or the first of them."""

    words: Words
    memory: memoryview

    @classmethod
    def of(cls, data: bytes) -> SegmentCopy:
        """The copy that ``data`` is."""
        copy = bytearray(data)
        return cls(Words(copy), memoryview(copy))


def programs(seen: Scan) -> list[Program]:
    """What uses this library among the processes that were seen, in the order of their pids."""
    found = [_program(seen, nonces) for nonces in _connected(seen)]
    return sorted((each for each in found if each is not None), key=lambda each: each.pid)


def of_process(pid: int, seen: Scan, found: Iterable[Program]) -> list[Program]:
    """The programs that a process takes part in, or if there is none, one that it has started.

    Args:
        pid: a process.
        seen: what `found` was found in.
        found: all programs.
    """
    own = [each for each in found if pid in each.pids]
    return own or [each for each in found if any(_descends(p, pid, seen) for p in each.pids)]


def _descends(pid: int, ancestor: int, seen: Scan) -> bool:
    passed = set()
    while pid in seen.processes and pid not in passed:
        passed.add(pid)
        pid = seen.processes[pid].parent
        if pid == ancestor:
            return True
    return False


def _connected(seen: Scan) -> list[set[bytes]]:
    """The nonces of all segments, those together that processes hold together."""
    parts: list[set[bytes]] = []
    for process in seen.processes.values():
        touched = [part for part in parts if part & process.held.keys()]
        parts = [part for part in parts if part not in touched]
        if process.held:
            parts.append({*process.held}.union(*touched))
    return parts


def _program(seen: Scan, nonces: set[bytes]) -> Program | None:
    holders = [each for each in seen.processes.values() if nonces & each.held.keys()]
    segments = {nonce: segment for each in holders for nonce, segment in each.held.items()}
    queues: dict[bytes, list[SegmentCopy]] = {}
    for segment in segments.values():
        if segment.label == layout.RING_LABEL:
            ring = _ring(segment)
            if ring is not None:
                at = layout.RING_BOARD
                queues.setdefault(
                    bytes(ring.memory[at : at + layout.SEGMENT_NONCE_BYTES]), []
                ).append(ring)
    boards = [
        _board(data, holders, queues.get(segment.nonce, ()), segment.nonce.hex())
        for segment in segments.values()
        if segment.label == layout.BOARD_LABEL and (data := copy_of_board(segment)) is not None
    ]
    if not boards:
        return None
    boards.sort(key=lambda board: (not board.is_pool, -len(board.members), board.name))
    first = min(
        (m.status for m in boards[0].members if m.status.pid), key=lambda s: s.rank, default=None
    )
    stands = {each.pid: each for each in holders}.get(first.pid if first else 0, holders[0])
    return Program(
        pid=stands.pid,
        command=stands.command,
        boards=tuple(boards),
        pids=tuple(sorted(each.pid for each in holders)),
        shared=sum(segment.size for segment in segments.values()),
    )


def copy_of_board(segment: SegmentInfo) -> SegmentCopy | None:
    """A copy of a board without its histories; None if it has gone, or is not finished."""
    try:
        head = SegmentCopy.of(segment.read(layout.BOARD_SLOTS))
        n_members = head.words.load32(layout.BOARD_MEMBERS)
        size = layout.board_size(n_members, histories=False)
        copy = SegmentCopy.of(segment.read(min(size, _LARGEST_BOARD)))
    except OSError:
        return None
    whole = n_members > 0 and size <= len(copy.memory)
    known = whole and all(
        copy.words.load32(layout.member_slot(member) + layout.MEMBER_STATE)
        < len(layout.STATE_NAMES)
        for member in range(n_members)
    )
    if not known:
        return None
    aborted = copy.words.load32(layout.BOARD_ABORT)
    if aborted > n_members:
        return None
    slot = layout.failure_slot(max(aborted - 1, 0), n_members)
    return copy if copy.words.load32(slot + layout.FAILURE_CULPRIT) < n_members else None


def _ring(segment: SegmentInfo) -> SegmentCopy | None:
    """A copy of what a ring says about itself; None if it has gone, or is not finished."""
    try:
        head = segment.read(layout.RING_READERS)
        n_readers = SegmentCopy.of(head).words.load32(layout.RING_READER_COUNT)
        if not n_readers or layout.data_offset(n_readers) > segment.size:
            return None
        return SegmentCopy.of(segment.read(layout.data_offset(n_readers)))
    except OSError:
        return None


def _board(
    copy: SegmentCopy, holders: Sequence[ProcessInfo], rings: Iterable[SegmentCopy], key: str
) -> BoardSnapshot:
    words, n_members = copy.words, copy.words.load32(layout.BOARD_MEMBERS)
    ranks = [
        _signed(words.load32(layout.member_slot(member) + layout.MEMBER_RANK))
        for member in range(n_members)
    ]
    # A process says on the board which pid it has in its own pid namespace.
    here = {
        (each.inner_pid, each.start_time): each for each in holders if each.condition != "ended"
    }

    def runs(process: ProcessId) -> bool:
        return (process.pid, process.start_time) in here

    name = read_text(copy, layout.BOARD_NAME, layout.BOARD_NAME_BYTES)
    members = Members(copy, ranks, name, runs)

    def member_seen(member: int) -> MemberSnapshot:
        status = members.status(member)
        start = words.load64(layout.member_slot(member) + layout.MEMBER_START_TIME)
        process = here.get((status.pid, start))
        there = process is not None and status.state in ("idle", "busy")
        return MemberSnapshot(
            status=status if process is None else replace(status, pid=process.pid),
            place=read_place(copy, member, n_members),
            condition=process.condition if process is not None else "",
            memory=process.memory if process is not None else 0,
            waits=read_waits(copy, member, n_members) if there else (),
            stacks=read_stacks_descriptor(copy, member, n_members) if there else None,
            cores=process.cores if process is not None else "",
            groups=read_groups(copy, member, n_members) if there else (),
        )

    return BoardSnapshot(
        name=name,
        members=tuple(member_seen(member) for member in range(n_members)),
        failure=first_failure(copy, ranks),
        queues=tuple(each for ring in rings if (each := _queue(ring, ranks)) is not None),
        key=key,
    )


def _queue(ring: SegmentCopy, ranks: Sequence[int]) -> QueueSnapshot | None:
    words = ring.words
    published, messages = words.load64(layout.RING_PUBLISHED), words.load64(layout.RING_SEQUENCE)
    readers, used = [], 0
    for reader in range(words.load32(layout.RING_READER_COUNT)):
        line = layout.reader_line(reader)
        member = words.load32(line + layout.READER_MEMBER)
        consumed = words.load64(line + layout.READER_CONSUMED)
        if member >= len(ranks):
            return None
        left = consumed == layout.LEFT
        if not left:
            used = max(used, published - consumed)
        behind = 0 if left else messages - words.load64(line + layout.READER_SEQUENCE)
        readers.append(ReaderSnapshot(ranks[member], max(behind, 0), left))
    writer = words.load32(layout.RING_WRITER)
    if writer >= len(ranks):
        return None
    return QueueSnapshot(
        writer=ranks[writer],
        readers=tuple(readers),
        messages=messages,
        used=used,
        capacity=words.load64(layout.RING_CAPACITY),
        closed=bool(words.load32(layout.RING_CLOSED)),
    )


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


@dataclass(frozen=True, slots=True)
class HostSnapshot:
    """What another host sees of a program.

    Attributes:
        host: what it is called.
        shared: the key of the board here, of whose members some are on that host.
        there: that host's own board for these members.
        beside: its further boards.
    """

    host: str
    shared: str
    there: BoardSnapshot
    beside: tuple[BoardSnapshot, ...]


def merge_hosts(program: Program, elsewhere: Iterable[HostSnapshot]) -> Program:
    """A program with its members, and boards, on other hosts."""
    boards = list(program.boards)
    for seen in elsewhere:
        for place, board in enumerate(boards):
            if board.key == seen.shared and len(board.members) == len(seen.there.members):
                there = zip(board.members, _named(seen.there, seen.host), strict=True)
                members = tuple(here if here.status.pid else found for here, found in there)
                boards[place] = replace(board, members=members)
                boards += [replace(each, members=_named(each, seen.host)) for each in seen.beside]
                break
    return replace(program, boards=tuple(boards))


def _named(board: BoardSnapshot, host: str) -> tuple[MemberSnapshot, ...]:
    """A host's members of a board, as on that host."""
    return tuple(replace(each, status=replace(each.status, host=host)) for each in board.members)
