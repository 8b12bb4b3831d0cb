"""The slots of a board: each member's process and state, and the failure that aborted the group.

One slot belongs to one process at a time, and only its owner writes it; a second process, even at
the same moment, is refused until the owner has exited or closed. The first member that claims the
abort word aborts the group. `RemoteMembers` has the state of members on other hosts;
`NoRemoteMembers` is for groups of one host.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final, NoReturn, Protocol

from shm_broadcast import layout
from shm_broadcast.atomics import SharedBytes, read_text, write_text
from shm_broadcast.errors import Failure, MemberStatus, name_of
from shm_broadcast.process import ProcessId, ProcessWatch
from shm_broadcast.segment import Segment
from shm_broadcast.state.fingerprint import Fingerprint, Fingerprints
from shm_broadcast.state.flight_recorder import (
    OperationRecord,
    VerbTotal,
    outcome_of,
    read_history,
    read_totals,
)
from shm_broadcast.state.status import StatusPublisher, read_status

_SEEN_WITHIN: Final = 0.5
"""Seconds until a member's own host has detected its end; a connection to it breaks earlier."""


class RemoteMembers(Protocol):
    """The known state of members that are on other hosts."""

    def status(self, member: int) -> MemberStatus | None:
        """Return the last received status of ``member``; None if it is on this host."""

    def fingerprints(self, member: int) -> Sequence[Fingerprint] | None:
        """Return the last received fingerprints of ``member``; None if it is on this host."""

    def gone(self, member: int) -> bool:
        """Return whether ``member`` is lost or closed, or its host was silent for too long."""

    def suspect(self, members: Iterable[int]) -> Callable[[], bool]:
        """Report a broken connection with one of ``members``: a silent host is lost sooner.

        Returns a function that returns whether the lost member, if there is one, is known by now.
        """

    def mark_dead(self, member: int) -> None:
        """Mark ``member`` as dead, since another member detected that and aborted the group."""

    def refresh(self) -> None:
        """Exchange the state with the other hosts now."""

    def problems(self) -> str:
        """Return the problems of the hosts themselves, for messages; ``""`` if there are none."""


class NoRemoteMembers:
    """Every member is on this host."""

    def status(self, member: int) -> None:
        """Return None: every member is on this host."""

    def fingerprints(self, member: int) -> None:
        """Return None: every member is on this host."""

    def gone(self, member: int) -> bool:  # noqa: ARG002
        """Return False: the caller checks the process itself."""
        return False

    def suspect(self, members: Iterable[int]) -> Callable[[], bool]:  # noqa: ARG002
        """Return a function that is True after `_SEEN_WITHIN`."""
        until = time.monotonic() + _SEEN_WITHIN
        return lambda: time.monotonic() >= until

    def mark_dead(self, member: int) -> None:
        """Do nothing: the caller checks the process itself."""

    def refresh(self) -> None:
        """Do nothing: there are no other hosts."""

    def problems(self) -> str:
        """Return ``""``."""
        return ""


def first_failure(segment: SharedBytes, ranks: Sequence[int]) -> Failure | None:
    """Return the failure that aborted the group, or None."""
    first = segment.words.load32(layout.BOARD_ABORT)
    if first == 0:
        return None
    slot = layout.failure_slot(first - 1, len(ranks))
    return Failure(
        rank=ranks[first - 1],
        culprit=ranks[segment.words.load32(slot + layout.FAILURE_CULPRIT)],
        kind=read_text(segment, slot + layout.FAILURE_KIND, layout.FAILURE_KIND_BYTES),
        message=read_text(segment, slot + layout.FAILURE_MESSAGE, layout.FAILURE_MESSAGE_BYTES),
    )


def report_failure(
    segment: Segment, n_members: int, member: int, kind: str, text: str, culprit: int
) -> None:
    """Store ``member``'s failure, unless it has one, and claim the abort word with it."""
    words, slot = segment.words, layout.failure_slot(member, n_members)
    if words.compare_and_swap32(slot + layout.FAILURE_CLAIMED, 0, 1):
        words.store32(slot + layout.FAILURE_CULPRIT, culprit)
        write_text(segment, slot + layout.FAILURE_KIND, kind, layout.FAILURE_KIND_BYTES)
        write_text(segment, slot + layout.FAILURE_MESSAGE, text, layout.FAILURE_MESSAGE_BYTES)
    # Even if it has one: a signal handler may have raised between the two steps.
    words.compare_and_swap32(layout.BOARD_ABORT, 0, member + 1)


def forget_failure(segment: Segment, n_members: int, member: int) -> None:
    """Clear ``member``'s failure for its successor, unless it aborted the group."""
    if segment.words.load32(layout.BOARD_ABORT) != member + 1:
        slot = layout.failure_slot(member, n_members)
        segment.words.store32(slot + layout.FAILURE_CLAIMED, 0)


def kind_and_message(error: BaseException | str) -> tuple[str, str]:
    """Return the kind of an error, and its text."""
    if isinstance(error, str):
        return "Abort", error
    try:
        return type(error).__name__, str(error)
    except Exception as another:  # noqa: BLE001 - the abort does not need the text
        return type(error).__name__, f"no text: its __str__ raised {type(another).__name__}"


class Members:
    """One process's view of the slots. `close` closes its pidfds of the members.

    ``remote`` is the state of members on other hosts.
    """

    def __init__(
        self,
        segment: SharedBytes,
        ranks: Sequence[int],
        name: str,
        runs: Callable[[ProcessId], bool] | None = None,
    ) -> None:
        """Read the slots of a group in ``segment``; ``ranks`` and ``name`` are for messages.

        ``runs`` returns whether a process still runs; None: pidfds are used.
        """
        self._segment = segment
        self._words = segment.words
        self._ranks = ranks
        self._name = name
        self.remote: RemoteMembers = NoRemoteMembers()
        self._closed = False
        self._runs = runs
        self._watches: dict[int, ProcessWatch] = {}
        self._lock = threading.RLock()

    def claim(self, member: int) -> None:
        """Claim ``member``'s slot for this process, invisibly until `publish`.

        Raises ValueError if a living process has the slot.
        """
        words, slot = self._words, layout.member_slot(member)
        self._lock_slot(member)
        if self.state(member) in ("idle", "busy"):
            words.store64(slot + layout.MEMBER_JOINING, 0)
            self._refuse(member, words.load32(slot + layout.MEMBER_PID))

    def publish(self, member: int) -> None:
        """Publish that this process has ``member``'s slot."""
        me, words, slot = ProcessId.current(), self._words, layout.member_slot(member)
        words.store64(slot + layout.MEMBER_START_TIME, me.start_time)
        words.store32(slot + layout.MEMBER_PID, me.pid)
        words.store64(slot + layout.MEMBER_SEQUENCE, 0)
        write_text(self._segment, slot + layout.MEMBER_OPERATION, "", layout.OPERATION_BYTES)
        words.progress(slot, layout.STATE_IDLE)
        words.store64(slot + layout.MEMBER_JOINING, 0)

    def rollback_claim(self, member: int) -> None:
        """Roll back a `claim` before `publish`, if any; the slot's previous state stays."""
        slot = layout.member_slot(member)
        holder = ProcessId.from_word(self._words.load64(slot + layout.MEMBER_JOINING))
        if holder.pid == os.getpid():
            self._words.compare_and_swap32(slot + layout.MEMBER_PID, os.getpid(), 0)
            self._words.store64(slot + layout.MEMBER_JOINING, 0)

    def mark_left(self, member: int) -> None:
        """Mark ``member`` as closed, unless a successor has the slot by now."""
        slot = layout.member_slot(member)
        if self._words.load32(slot + layout.MEMBER_PID) == os.getpid():
            self._words.progress(slot, layout.STATE_CLOSED)

    def mark_lost(self, member: int) -> None:
        """Mark ``member`` as lost, unless a successor has the slot by now."""
        slot = layout.member_slot(member)
        if self._words.load32(slot + layout.MEMBER_PID) == os.getpid():
            self._words.store32(slot + layout.MEMBER_STATE, layout.STATE_LOST)

    @contextmanager
    def lost_slot(self, member: int) -> Iterator[None]:
        """Reserve the slot of a lost ``member`` for a ``with`` block.

        Raises ValueError if it is not lost, or a successor is about to take the slot.
        """
        self._lock_slot(member)
        try:
            if self.state(member) != "lost":
                raise ValueError(f"{self.status(member)}: it is not lost")
            yield
        finally:
            self._words.store64(layout.member_slot(member) + layout.MEMBER_JOINING, 0)

    def joined(self, member: int) -> bool:
        """Return whether a process has ever taken ``member``'s slot."""
        state = self._words.load32(layout.member_slot(member) + layout.MEMBER_STATE)
        return state != layout.STATE_ABSENT

    def state(self, member: int) -> str:
        """Return ``"absent"``, ``"idle"``, ``"busy"``, ``"closed"`` or ``"lost"``."""
        code = self._words.load32(layout.member_slot(member) + layout.MEMBER_STATE)
        state = layout.STATE_NAMES[code]
        return "lost" if state in ("idle", "busy") and not self._alive(member) else state

    def is_running(self, member: int, pid: int) -> bool:
        """Return whether process ``pid`` runs and is the last owner of ``member``'s slot."""
        slot = layout.member_slot(member)
        return self._words.load32(slot + layout.MEMBER_PID) == pid and self._alive(member)

    def first_gone(self, members: Iterable[int]) -> int | None:
        """Return the first of ``members`` that is lost or closed; an absent one is neither."""
        for member in members:
            if self.state(member) in ("lost", "closed") or self.remote.gone(member):
                return member
        return None

    def status(self, member: int) -> MemberStatus:
        """Return the last known status of ``member``, on this host or on another."""
        remote = self.remote.status(member)
        if remote is not None:
            return remote
        words, slot = self._words, layout.member_slot(member)
        stamped = words.load64(slot + layout.MEMBER_PROGRESS)
        return MemberStatus(
            rank=self._ranks[member],
            pid=words.load32(slot + layout.MEMBER_PID),
            state=self.state(member),
            operation=read_text(
                self._segment, slot + layout.MEMBER_OPERATION, layout.OPERATION_BYTES
            ),
            sequence=words.load64(slot + layout.MEMBER_SEQUENCE),
            age=max(time.monotonic_ns() - stamped, 0) / 1e9 if stamped else None,
            waits_for=tuple(
                dict.fromkeys(
                    self._ranks[each]
                    for wait in read_status(self._read, member, len(self._ranks)).waits
                    for each in wait.members
                )
            ),
        )

    def _read(self, offset: int, size: int) -> bytes:
        return bytes(self._segment.memory[offset : offset + size])

    def after_fork_in_child(self) -> None:
        """Replace the lock in a forked child: a thread of its parent may hold it."""
        self._lock = threading.RLock()

    def close(self) -> None:
        """Close all pidfds."""
        self._closed = True
        with self._lock:
            for watch in self._watches.values():
                watch.close()
            self._watches.clear()

    def _lock_slot(self, member: int) -> None:
        words, lock = self._words, layout.member_slot(member) + layout.MEMBER_JOINING
        me = ProcessId.current().word
        if not words.compare_and_swap64(lock, 0, me):
            other = words.load64(lock)
            holder = ProcessId.from_word(other)
            died_joining = other != 0 and not holder.is_running()
            if not (died_joining and words.compare_and_swap64(lock, other, me)):
                self._refuse(member, holder.pid)

    def _refuse(self, member: int, holder: int) -> NoReturn:
        raise ValueError(
            f"{name_of(self._ranks[member])} of {self._name} has joined already, as pid {holder}"
        )

    def _alive(self, member: int) -> bool:
        slot = layout.member_slot(member)
        holder = ProcessId(
            self._words.load32(slot + layout.MEMBER_PID),
            self._words.load64(slot + layout.MEMBER_START_TIME),
        )
        if self._runs is not None:
            return self._runs(holder)
        with self._lock:
            if self._closed:
                return holder.is_running()
            watch = self._watches.get(member)
            if watch is None or watch.process != holder:
                if watch is not None:
                    watch.close()
                watch = self._watches[member] = ProcessWatch(holder)
            return watch.alive()


class Slots:
    """The slots of a board, with the operations of the owner of one: see `Board`."""

    def __init__(
        self, segment: Segment, ranks: tuple[int, ...], name: str, member: int | None
    ) -> None:
        n_members = self.n_members = len(ranks)
        self._segment = segment
        self.words = segment.words
        self.ranks = ranks
        self.name = name
        self.member = None if member is None else self._valid(member)
        members = self._members = Members(segment, ranks, name)
        self.fingerprints = Fingerprints(
            segment, lambda each: members.remote.fingerprints(each), member, n_members
        )
        self._slot = 0 if member is None else layout.member_slot(member)
        self._published: StatusPublisher | None = None
        self.history = 0
        if member is not None and self.words.load32(layout.BOARD_HISTORY):
            self.history = layout.history_slot(member, n_members)

    def slot_offset(self, member: int) -> int:
        """Return the offset of ``member``'s slot in `words`."""
        return layout.member_slot(self._valid(member))

    def record_begin(
        self,
        operation: str,
        group: str = "",
        verb: int = 0,
        size: int = 0,
        number: int = 0,
        peer: int = layout.NO_PEER,
        dtype: int = 0,
    ) -> int:
        """Record that ``operation`` begins; return its number among this member's operations.

        The other arguments are for the history: see `OperationRecord`; verb and dtype are codes.
        """
        return self.words.stamp(
            self._slot or self._refuse("stamp"),
            layout.STATE_BUSY,
            operation,
            self.history,
            group if verb else operation,
            verb,
            size,
            number,
            peer,
            dtype,
        )

    def record_end(
        self,
        sequence: int,
        error: BaseException | None = None,
        size: int = 0,
        number: int = 0,
    ) -> None:
        """Record in the history how operation ``sequence`` ended; only the first call counts.

        ``size`` and ``number`` are given if they were unknown at the begin.
        """
        outcome = layout.OUTCOME_DONE if error is None else outcome_of(error)
        self.words.leave(self.history, sequence, outcome, size, number)

    def idle(self) -> None:
        """Publish that this member is between operations."""
        self.words.progress(self._slot or self._refuse("idle"), layout.STATE_IDLE)

    def progress(self) -> None:
        """Publish the time of progress within the current operation."""
        slot = self._slot or self._refuse("progress")
        self.words.store64(slot + layout.MEMBER_PROGRESS, time.monotonic_ns())

    def publish_place(self, group: str, rank: int) -> None:
        """Publish, for inspection, that this member is ``rank`` in ``group``."""
        if self._published is not None:
            self._published.publish_place(group, rank)

    def add_group(self, name: str, rank: int, ranks: Sequence[int]) -> None:
        """Publish, for inspection, that this member is ``rank`` in a group of ``ranks``."""
        if self._published is not None:
            self._published.publish_group(name, rank, len(ranks), ranks[0], 1)

    def close_group(self, name: str, rank: int, ranks: Sequence[int]) -> None:
        """Publish that this member has closed a group of `add_group`."""
        if self._published is not None:
            self._published.publish_group(name, rank, len(ranks), ranks[0], -1)

    @contextmanager
    def published_wait(self, operation: str) -> Iterator[Callable[[Iterable[int]], None]]:
        """Publish a wait that does not use `Board.wait`, for a ``with`` block.

        Yields a function to call with the awaited members, again when they change; an empty set
        hides the wait.
        """
        since, published = time.monotonic_ns(), self._published
        wait = object()  # not `update`, which would then refer to itself

        def update(members: Iterable[int]) -> None:
            if published is not None:
                late = [each for each in members if each != self.member]
                published.publish_wait(wait, operation, since, late)

        try:
            yield update
        finally:
            update(())

    def recorded(self, member: int) -> tuple[OperationRecord, ...]:
        """Return the last 2,000 operations or so of a member on this host, the oldest first.

        They stay readable after its process has exited, until another process takes its slot.
        """
        memory = self._segment.memory
        return read_history(
            self._segment,
            self._valid(member),
            self.n_members,
            lambda at, size: bytes(memory[at : at + size]),
        )

    def totals(self, member: int) -> tuple[VerbTotal, ...]:
        """Return the totals of a member on this host since it joined."""
        return read_totals(self._segment, self._valid(member), self.n_members)

    def joined(self, member: int) -> bool:
        """Return whether a process has taken ``member``'s slot."""
        return self._members.joined(self._valid(member))

    def is_running(self, member: int, pid: int) -> bool:
        """Return whether process ``pid`` runs and is the last owner of ``member``'s slot."""
        return self._members.is_running(self._valid(member), pid)

    def lost(self) -> list[int]:
        """Return the members whose process has exited without closing its board."""
        return [each for each in range(self.n_members) if self._members.state(each) == "lost"]

    def lost_slot(self, member: int) -> AbstractContextManager[None]:
        """Reserve the slot of a lost ``member`` for a ``with`` block; raises as
        `Members.lost_slot`.
        """
        return self._members.lost_slot(self._valid(member))

    def member_status(self, member: int) -> MemberStatus:
        """Return the last known status of one member."""
        return self._members.status(self._valid(member))

    def status(self) -> list[MemberStatus]:
        """Return the last known status of every member."""
        return [self.member_status(member) for member in range(self.n_members)]

    def _titled(self, operation: str) -> str:
        return f"{self.name} {operation}" if self.name else operation

    def _refuse(self, operation: str) -> NoReturn:
        raise ValueError(f"{self._titled(operation)}: this process is no member of the group")

    def _valid(self, member: int) -> int:
        if not 0 <= member < self.n_members:
            raise ValueError(f"member must be in 0..{self.n_members - 1}; got {member}")
        return member
