"""Read the programs of this user from outside: processes, boards and queues.

Nothing is stopped, changed or locked, so even a stuck program can be inspected. Segments have no
name; those that a process holds open appear under ``/proc/PID/fd``, visible only to processes of
the same user. They are read by pread(2), which maps nothing and never blocks.

Boards that share a process belong to one program: a pool, the ranks of torchrun, vLLM's engine and
workers. Processes that exit and boards that are set up or freed meanwhile are omitted. Each host
reads its own processes; `merge_hosts` unites the results.
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
from shm_broadcast.state.status import Membership, PublishedStatus, Wait, read_status
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
"""The meanings of proc(5)'s state letters."""

_HEADER: Final = struct.Struct("<IIQ16s")
_COMMAND_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A segment that processes hold open."""

    label: str  # its kind, such as layout.BOARD_LABEL
    nonce: bytes
    size: int
    paths: list[str]  # in /proc, each valid while that process holds it

    def read(self, size: int) -> bytes:
        """Return its first ``size`` bytes, or all if it has fewer.

        Raises OSError if no process holds it any more.
        """
        with self.opened() as fd:
            return os.pread(fd, min(size, self.size), 0)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Yield a descriptor for reading; raises as `read`."""
        for path in self.paths:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:  # that holder has exited
                continue
            try:
                # The descriptor's number may belong to another file by now.
                header = os.pread(fd, _HEADER.size, 0)
                if len(header) == _HEADER.size and _HEADER.unpack(header)[-1] == self.nonce:
                    yield fd
                    return
            finally:
                os.close(fd)
        raise FileNotFoundError(errno.ENOENT, "no process holds it any more", self.label)


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process of this user."""

    pid: int
    inner_pid: int  # in its own pid namespace, as on boards
    start_time: int  # see ProcessId
    parent: int
    condition: str  # one of CONDITIONS
    memory: int  # bytes, shared memory included
    command: str
    held: dict[bytes, SegmentInfo]  # segments that it holds open, by nonce
    cores: str  # usable CPUs, as "0-3,8"; "" if it holds no segment


@dataclass(frozen=True, slots=True)
class Scan:
    """The result of one pass over /proc."""

    processes: dict[int, ProcessInfo]  # this user's, by pid
    unseen: tuple[int, ...]  # pids of this user's processes that may not be read


def scan() -> Scan:
    """Read all processes of this user."""
    me, processes, unseen = os.geteuid(), {}, []
    known: dict[tuple[int, int], SegmentInfo | None] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - a Path for each of thousands takes longer
        if not name.isdecimal():
            continue
        pid = int(name)
        try:
            if os.stat(f"/proc/{pid}").st_uid == me:  # noqa: PTH116
                processes[pid] = _process(pid, known)
        except PermissionError:
            unseen.append(pid)
        except (OSError, ValueError):  # the process has exited
            continue
    return Scan(processes, tuple(unseen))


def condition_of(pid: int) -> str:
    """Return the condition of process ``pid``, of `CONDITIONS`; ``"ended"`` if there is none."""
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
                stat = os.stat(path)  # noqa: PTH116
                key = stat.st_dev, stat.st_ino
                if key not in known:
                    known[key] = _segment(path, target)
                segment = known[key]
                if segment is not None:
                    segment.paths.append(path)
                    yield segment


def _segment(path: str, target: str) -> SegmentInfo | None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        stat, header = os.fstat(fd), os.pread(fd, _HEADER.size, 0)
        if len(header) < _HEADER.size or stat.st_uid != os.geteuid():
            return None
        magic, version, size, nonce = _HEADER.unpack(header)
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
        if (magic, version) != (layout.MAGIC, layout.VERSION) or not sealed or not any(nonce):
            return None
        if size != stat.st_size:
            return None
        label = target.removeprefix("/memfd:").removesuffix(" (deleted)")
        return SegmentInfo(label, nonce, size, [])
    finally:
        os.close(fd)


def _pid_and_cores(pid: int) -> tuple[int, str]:
    lines = _bytes_of(pid, "status").decode(errors="replace").splitlines()
    fields = {line.partition(":")[0]: line.split() for line in lines}
    return int(fields.get("NSpid", [str(pid)])[-1]), fields.get("Cpus_allowed_list", [""])[-1]


def _command(pid: int) -> str:
    words = _bytes_of(pid, "cmdline").rstrip(b"\0").split(b"\0")
    return " ".join(word.decode(errors="replace") for word in words)


def _bytes_of(pid: int, name: str) -> bytes:
    with Path(f"/proc/{pid}/{name}").open("rb") as file:
        return file.read(_COMMAND_BYTES)


_LARGEST_BOARD = 64 << 20


@dataclass(frozen=True, slots=True)
class MemberSnapshot:
    """A member of a board."""

    status: MemberStatus  # from its slot, but with the pid in this namespace
    place: str  # its ranks in its groups: "tp 0, pp 1"
    condition: str  # one of CONDITIONS; "" if its process is not visible
    memory: int  # bytes that its process uses
    waits: tuple[Wait, ...]  # of its threads, the longest first
    stacks: int | None  # the descriptor of its stack file
    cores: str = ""  # usable CPUs of its process, as a list
    groups: tuple[Membership, ...] = ()  # closed ones included; () if its process has exited


@dataclass(frozen=True, slots=True)
class ReaderSnapshot:
    """A reader of a queue."""

    rank: int  # on its board
    behind: int  # unread messages, the one under way included
    left: bool  # whether it has closed the queue


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """A queue of a board."""

    writer: int  # its rank on the board
    readers: tuple[ReaderSnapshot, ...]
    messages: int  # how many were begun
    used: int  # unread bytes of the slowest reader
    capacity: int  # bytes of the ring
    closed: bool  # whether the writer has shut it down

    @property
    def behind(self) -> int:
        """Return how many messages the slowest reader has not read."""
        return max((reader.behind for reader in self.readers), default=0)


@dataclass(frozen=True, slots=True)
class BoardSnapshot:
    """A board."""

    name: str  # the group's; "" for the ranks of a host
    members: tuple[MemberSnapshot, ...]  # by member number
    failure: Failure | None
    queues: tuple[QueueSnapshot, ...]
    key: str = ""  # the segment's nonce

    @property
    def is_pool(self) -> bool:
        """Return whether it is a pool's: its driver publishes a generation of workers there."""
        return any(each.status.rank == DRIVER_RANK and each.place for each in self.members)


@dataclass(frozen=True, slots=True)
class Program:
    """Boards that share processes."""

    pid: int  # of the driver, or of the first rank
    command: str  # that process's command line
    boards: tuple[BoardSnapshot, ...]  # those of pools first, then by the number of members
    pids: tuple[int, ...]  # all processes that hold one of its segments open
    shared: int  # bytes of shared memory


@dataclass(frozen=True, slots=True)
class SegmentCopy:
    """A copy of the first bytes of a segment at one moment."""

    words: Words
    memory: memoryview

    @classmethod
    def of(cls, data: bytes) -> SegmentCopy:
        """The copy that ``data`` is."""
        copy = bytearray(data)
        return cls(Words(copy), memoryview(copy))


def programs(seen: Scan) -> list[Program]:
    """Return the programs among the scanned processes, in the order of their pids."""
    every = [_program(seen, nonces) for nonces in _connected(seen)]
    return sorted((each for each in every if each is not None), key=lambda each: each.pid)


def of_process(pid: int, seen: Scan, found: Iterable[Program]) -> list[Program]:
    """Return the programs of a process, or else those that it has started.

    ``found`` are all programs of ``seen``.
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
    """Return sets of nonces: the segments that processes hold together."""
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
    main = {each.pid: each for each in holders}.get(first.pid if first else 0, holders[0])
    return Program(
        pid=main.pid,
        command=main.command,
        boards=tuple(boards),
        pids=tuple(sorted(each.pid for each in holders)),
        shared=sum(segment.size for segment in segments.values()),
    )


def copy_of_board(segment: SegmentInfo) -> SegmentCopy | None:
    """Return a copy of a board without its histories; None if it is gone or incomplete."""
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
    # Boards have the pids of the processes' own pid namespaces.
    here = {
        (each.inner_pid, each.start_time): each for each in holders if each.condition != "ended"
    }

    def runs(process: ProcessId) -> bool:
        return (process.pid, process.start_time) in here

    def read(at: int, size: int) -> bytes:
        return bytes(copy.memory[at : at + size])

    name = read_text(copy, layout.BOARD_NAME, layout.BOARD_NAME_BYTES)
    members = Members(copy, ranks, name, runs)

    def snapshot(member: int) -> MemberSnapshot:
        status = members.status(member)
        start = words.load64(layout.member_slot(member) + layout.MEMBER_START_TIME)
        process = here.get((status.pid, start))
        joined = process is not None and status.state in ("idle", "busy")
        published = read_status(read, member, n_members)
        current = published if joined else PublishedStatus()
        return MemberSnapshot(
            status=status if process is None else replace(status, pid=process.pid),
            place=published.place,
            condition=process.condition if process is not None else "",
            memory=process.memory if process is not None else 0,
            waits=current.waits,
            stacks=current.stacks,
            cores=process.cores if process is not None else "",
            groups=current.groups,
        )

    return BoardSnapshot(
        name=name,
        members=tuple(snapshot(member) for member in range(n_members)),
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
    """Another host's view of a program."""

    host: str
    shared: str  # the key of the board here that has members on that host
    there: BoardSnapshot  # that host's own board for these members
    beside: tuple[BoardSnapshot, ...]  # its further boards


def merge_hosts(program: Program, elsewhere: Iterable[HostSnapshot]) -> Program:
    """Return a program with its members and boards on other hosts."""
    boards = list(program.boards)
    for seen in elsewhere:
        for place, board in enumerate(boards):
            if board.key == seen.shared and len(board.members) == len(seen.there.members):
                pairs = zip(board.members, _named(seen.there, seen.host), strict=True)
                members = tuple(own if own.status.pid else remote for own, remote in pairs)
                boards[place] = replace(board, members=members)
                boards += [replace(each, members=_named(each, seen.host)) for each in seen.beside]
                break
    return replace(program, boards=tuple(boards))


def _named(board: BoardSnapshot, host: str) -> tuple[MemberSnapshot, ...]:
    return tuple(replace(each, status=replace(each.status, host=host)) for each in board.members)
