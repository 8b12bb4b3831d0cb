"""The shared state of a group: what each member does, how it waits, and why the group was aborted.

One segment per group and host, with a slot per member. It turns a hang into a sentence:
"all_reduce: timed out after 2 s, waiting for rank 3 (pid 4242), last seen in send_tensor_dict
#1040, 2.1 s ago".

- Every wait ends: ready, deadline, abort, or a needed member's death, whichever is first.
- `Board.abort` reaches every member, at its next operation or, asleep, at once.
- The failure that claims the abort word first is reported to all members.

Assumes: members share a host and a user; all users of a board abort together. For members on other
hosts see `Board.set_remote_members`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, Self

import msgspec

from shm_broadcast import layout
from shm_broadcast.atomics import write_text
from shm_broadcast.cpu import GIVEN_CORES
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import (
    Failure,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    MemberStatus,
    PeerLostError,
)
from shm_broadcast.eventcount import DEFAULT_SPIN_SECONDS, EventCount, Lookout
from shm_broadcast.process import IN_FORKED_CHILD, call_in_forked_children
from shm_broadcast.segment import Segment, SegmentHandle
from shm_broadcast.state.flight_recorder import forget_totals
from shm_broadcast.state.stacks import write_stacks_when_asked
from shm_broadcast.state.status import StatusPublisher
from shm_broadcast.state.table import (
    RemoteMembers,
    Slots,
    first_failure,
    forget_failure,
    kind_and_message,
    report_failure,
)

LIVENESS_SECONDS: Final = 0.1
"""The interval at which a sleeping member checks that its peers are alive.

It wakes more often, but this check costs more than all others.
"""


class Waiter(Slots):
    """The waiting side of a board: its slots, their eventcounts, and the ends of a wait."""

    def __init__(
        self, segment: Segment, ranks: tuple[int, ...], name: str, member: int | None
    ) -> None:
        super().__init__(segment, ranks, name, member)
        self._closed = False
        self._why_closed = "the group has been closed in this process"
        self._eventcounts = tuple(
            EventCount(segment.words, layout.member_slot(index) + layout.MEMBER_EVENTCOUNT)
            for index in range(self.n_members)
        )

    @property
    def oversubscribed(self) -> bool:
        """Return whether there are more members than CPUs of this process: some lack one."""
        return self.n_members > len(GIVEN_CORES)

    @property
    def closed(self) -> bool:
        """Return whether `leave` or `close` was called here."""
        return self._closed

    @property
    def aborted(self) -> Failure | None:
        """Return the first failure, if the group was aborted."""
        failure = first_failure(self._segment, self.ranks)
        if failure is None:
            return None
        reporter = self._members.remote.status(self.ranks.index(failure.rank))
        return failure if reporter is None else replace(failure, host=reporter.host)

    def eventcount_offset(self, member: int) -> int:
        """Return the offset of ``member``'s eventcount in `words`."""
        return self._eventcounts[self._valid(member)].offset

    def notify(self, member: int) -> None:
        """Wake ``member``; call it after changing its condition."""
        self._eventcounts[member].notify()

    def notify_self(self) -> None:
        """Wake the other threads of this process that wait."""
        if self.member is not None:
            self._eventcounts[self.member].notify()

    def notify_all(self) -> None:
        """Wake every member."""
        for eventcount in self._eventcounts:
            eventcount.notify()

    def check(self, operation: str) -> None:
        """Raise if the group was aborted or this board closed; otherwise costs one load."""
        if self._closed:
            self._mark_closed()  # again: this thread may have recorded an operation since
            title = self._titled(operation)
            raise GroupClosedError(f"{title}: {self._why_closed}")
        if self.words.load32(layout.BOARD_ABORT):
            failure = self.aborted
            if failure is not None:
                raise GroupAbortedError(self._titled(operation), failure)

    def require(
        self, operation: str, peers: Callable[[], Iterable[int]], ready: Callable[[], bool]
    ) -> None:
        """Raise if one of ``peers`` is lost or closed and the wait is not ``ready``.

        Raises:
            PeerLostError: a peer has exited or closed its end.
            GroupAbortedError, GroupClosedError: as `check`.
        """
        self._check_for(operation, peers)
        gone = self._members.first_gone(peer for peer in peers() if peer != self.member)
        # A peer may have completed the wait just before its end.
        if gone is not None and not ready():
            self._check_for(operation, peers)  # it may have aborted before its end
            raise PeerLostError(self._titled(operation), self.member_status(gone))

    def wait(
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        operation: str,
        peers: Callable[[], Iterable[int]],
        *,
        poll: float | None = None,
        spin: float = DEFAULT_SPIN_SECONDS,
        detail: Callable[[], str] = str,
        watch: Callable[[str], None] | None = None,
        shown: Callable[[], Iterable[int]] | None = None,
        lookout: Lookout | None = None,
    ) -> None:
        """Wait until ``ready()``.

        Args:
            ready: the condition; the process that makes it true notifies this member.
            operation: the name of the wait, for messages.
            peers: the members still waited for, for liveness and for messages.
            poll: seconds between calls of ``ready``, where its cause cannot notify.
            spin: seconds to spin first.
            detail: further facts for a timeout error.
            watch: called with ``operation`` before each sleep; its exceptions end the wait.
            shown: the members that inspection shows as waited for; None: ``peers``.
            lookout: when to spin once more.

        Raises:
            GroupTimeoutError: the deadline passed; names ``peers()``.
            PeerLostError: one of ``peers()`` has exited or closed its end.
            GroupAbortedError: a member aborted the group.
            GroupClosedError: another thread closed the board here.
        """

        checked, began = -math.inf, 0
        wait = object()  # not `check`, which would then refer to itself

        def check() -> None:
            nonlocal checked, began
            self._check_for(operation, peers)
            if watch is not None:
                watch(operation)
            now = time.monotonic()
            if now < checked + LIVENESS_SECONDS:
                return
            checked = now
            self.fingerprints.compare()
            if not began:
                began = time.monotonic_ns()
            elif self._published is not None:
                late = [peer for peer in (shown or peers)() if peer != self.member]
                self._published.publish_wait(wait, operation, began, late)
            self.require(operation, peers, ready)

        eventcount = self._eventcounts[self._require_member(operation)]
        try:
            in_time = eventcount.wait(
                *(ready, deadline),
                slice_seconds=poll,
                spin_seconds=spin,
                lookout=lookout,
                between_slices=check,
            )
        finally:
            if began and self._published is not None:
                self._published.publish_wait(wait, operation, began, ())
        if not in_time:
            late = tuple(self.member_status(peer) for peer in peers())
            more = "; ".join(filter(None, (detail(), self._members.remote.problems())))
            raise GroupTimeoutError(self._titled(operation), deadline.timeout, late, more)

    def set_remote_members(self, remote: RemoteMembers) -> None:
        """Use ``remote`` for the state of members on other hosts."""
        self._members.remote = remote

    def suspect(self, members: Iterable[int]) -> Callable[[], bool]:
        """Report that a connection with one of ``members`` broke.

        Returns a function that returns whether the lost member, if there is one, is known by now.
        """
        return self._members.remote.suspect(members)

    def refresh_remote(self) -> None:
        """Exchange the state with other hosts, if any; takes half a second at most."""
        self._members.remote.refresh()

    def _mark_closed(self) -> None:
        if self.member is not None:
            self._members.mark_left(self.member)

    def _check_for(self, operation: str, peers: Callable[[], Iterable[int]]) -> None:
        """Raise as `check`, but PeerLostError or GroupClosedError if a peer caused the abort so."""
        try:
            self.check(operation)
        except GroupAbortedError as aborted:
            failure = aborted.failure
            if self.ranks.index(failure.culprit) in peers():
                if failure.kind == GroupClosedError.__name__:
                    raise GroupClosedError(str(aborted), failure.culprit) from None
                lost = self._lost_to(failure)
                if lost is not None:
                    raise PeerLostError(aborted.operation, lost) from None
            raise

    def _lost_to(self, failure: Failure) -> MemberStatus | None:
        if failure.kind != PeerLostError.__name__:
            return None
        culprit = self.ranks.index(failure.culprit)
        self._members.remote.mark_dead(culprit)
        gone = self._members.first_gone([culprit])
        return None if gone is None else self.member_status(gone)

    def _require_member(self, operation: str) -> int:
        if self._why_closed is IN_FORKED_CHILD:
            raise GroupClosedError(f"{self._titled(operation)}: {IN_FORKED_CHILD}")
        return self._refuse(operation) if self.member is None else self.member


_U32: Final = 0xFFFFFFFF
_log = logging.getLogger(__name__)


class BoardHandle(msgspec.Struct, frozen=True):
    """Names a board to other processes of the same user on the same host.

    ``ranks`` and ``name`` are those of `Board`.
    """

    segment: SegmentHandle
    ranks: tuple[int, ...]
    name: str


class Board(Waiter):
    """One process's end of its group's board. `close` ends the membership without an error.

    Attributes:
        name: the group's name, for messages.
        ranks: each member's rank in messages.
        n_members: the number of slots.
        member: this process's slot, ``None`` for inspection only.
        words: the board's atomic words, for the protocols that build on it.
        history: the offset of this member's history in ``words``; 0: there is none.
        fingerprints: all members' `Fingerprints`.
    """

    def __init__(
        self, segment: Segment, ranks: tuple[int, ...], name: str, member: int | None
    ) -> None:
        """Use `create` and `attach`."""
        super().__init__(segment, ranks, name, member)
        self._reporting = threading.RLock()
        self._given_back = False
        if member is not None:
            self._join(member)
            call_in_forked_children(self)

    @classmethod
    def create(
        cls,
        n_members: int,
        member: int | None = 0,
        name: str = "group",
        ranks: Sequence[int] | None = None,
        *,
        histories: bool = True,
    ) -> Board:
        """Make a board with ``n_members`` slots; this process owns the memory.

        The others attach by `handle`.

        Args:
            member: the slot of this process; ``None`` for none.
            name: precedes each operation in messages; may be ``""``.
            ranks: each member's rank in messages, `DRIVER_RANK` for a member without one; by
                default its number.
            histories: whether to keep the last operations and the totals of each member, in 148 KiB
                each.

        Raises:
            ValueError: ``n_members`` or ``member`` is out of range, or the number of ``ranks`` is
                wrong.
            SharedMemoryError: too little memory is free.
        """
        if n_members < 1:
            raise ValueError(f"a board needs 1 or more members; got {n_members}")
        names = tuple(range(n_members) if ranks is None else ranks)
        if len(names) != n_members:
            raise ValueError(f"{n_members} members cannot be called {names}")
        size = layout.board_size(n_members, histories=histories)
        segment = Segment.create(size, layout.BOARD_LABEL)
        if histories:
            segment.words.store32(layout.BOARD_HISTORY, layout.HISTORY_ENTRIES)
        segment.words.write(layout.BOARD_KEY, os.urandom(layout.BOARD_KEY_BYTES))
        write_text(segment, layout.BOARD_NAME, name, layout.BOARD_NAME_BYTES)
        for index, rank in enumerate(names):
            segment.words.store32(layout.member_slot(index) + layout.MEMBER_RANK, rank & _U32)
        # Last: inspection takes it as the sign that the board is complete.
        segment.words.store32(layout.BOARD_MEMBERS, n_members)
        return cls(segment, names, name, member)

    @classmethod
    def attach(cls, handle: BoardHandle, member: int | None) -> Board:
        """Join the board of ``handle`` as ``member``; a dead process's slot may be taken over.

        Raises:
            SharedMemoryError: the board is on another host, or its owner has exited.
            ValueError: ``member`` is out of range, or taken by a living process.
        """
        return cls(Segment.attach(handle.segment), handle.ranks, handle.name, member)

    def handle(self) -> BoardHandle:
        """Return the handle for `attach`; valid while this process keeps the board open."""
        return BoardHandle(self._segment.handle(), self.ranks, self.name)

    @property
    def memory(self) -> memoryview:
        """Return the board's bytes, for extensions that wait and record on their own."""
        return self._segment.memory

    @property
    def key(self) -> bytes:
        """Return random bytes that only processes which attached this board can read."""
        begin = layout.BOARD_KEY
        return bytes(self._segment.memory[begin : begin + layout.BOARD_KEY_BYTES])

    def abort(self, error: BaseException | str, culprit: int | None = None) -> None:
        """End every member's waiting with `GroupAbortedError`; the first failure is kept.

        ``culprit`` is the failed member; by default the lost member that ``error`` names, or else
        this one.
        """
        member = self._require_member("abort")
        culprit = self._lost_member(error, member) if culprit is None else culprit
        first = self.aborted is None
        self.report(member, *kind_and_message(error), culprit)
        if first and self.aborted is not None:
            facts = {"rank": self.ranks[culprit], "group": self.name}
            _log.info("%s was aborted: %s", self.name or "the group", self.aborted, extra=facts)
        self.refresh_remote()  # other hosts receive the abort before this call does anything else

    def report(self, member: int, kind: str, message: str, culprit: int) -> None:
        """Abort the group with a failure of ``member``, on this host or on another one."""
        with self._reporting:  # no other thread publishes a half-written report
            report_failure(self._segment, self.n_members, member, kind, message, culprit)
        self.notify_all()

    def leave(self) -> None:
        """Close this member's end; the board stays readable until `close`.

        Waiting threads of this process get GroupClosedError.
        """
        if not self._closed:
            self._closed = True
            self._mark_closed()
            self.notify_all()

    def mark_lost(self) -> None:
        """Be lost to the others, as if this process had exited, unless `leave` was called."""
        if not self._closed and self.member is not None:
            self._closed = True
            self._members.mark_lost(self.member)
            self.notify_all()

    def after_fork_in_child(self) -> None:
        """Refuse all calls in a forked child: it is no member."""
        self._closed, self._why_closed = True, IN_FORKED_CHILD
        self._reporting = threading.RLock()  # another thread of the parent may hold it
        self._members.after_fork_in_child()

    def close(self) -> None:
        """Call `leave`, and free the memory."""
        if not self._given_back:
            self._given_back = True
            self.leave()
            self._members.close()
            self._segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"Board({self.name!r}, member={self.member} of {self.n_members}{state})"

    def _join(self, member: int) -> None:
        try:
            self._members.claim(member)
            self._eventcounts[member].reset_waiters()
            forget_failure(self._segment, self.n_members, member)
            forget_totals(self._segment, member, self.n_members)
            self.fingerprints.forget(member)
            stacks = write_stacks_when_asked()
            self._published = StatusPublisher(self._segment, member, self.n_members, stacks)
            self._members.publish(member)
        except ValueError:  # another process has the slot
            raise
        except BaseException:
            self._members.rollback_claim(member)
            raise
        self.notify_all()

    def _lost_member(self, error: BaseException | str, default: int) -> int:
        if isinstance(error, PeerLostError):
            for status in self.status():
                if (status.rank, status.pid) == (error.rank, error.pid):
                    return self.ranks.index(status.rank)
        return default
