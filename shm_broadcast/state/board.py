"""Share the state of a group: its members, what each one does, how it waits, and why the group was
aborted.

Guarantees: every wait ends: ready, deadline, abort, or a needed member's death, whichever is first.

One segment per group and host, with a slot per member. It turns a hang into a sentence:
"all_reduce: timed out after 2 s, waiting for rank 3 (pid 4242), last seen in send_tensor_dict
#1040, 2.1 s ago".

Guarantees
- `Board.abort` is seen by every member, at its next operation or, asleep, at once.
- Of several failures the one that claimed the abort word first is reported to all.
- Every wait ends: see `shm_broadcast.state.board`.

Assumes: members share a host and a user. A board is the scope of an abort: whatever shares the
board aborts together. Members may be on other hosts if somebody carries news between the boards:
see `Board.hear`.
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
from shm_broadcast.state.status import PublishedStatus
from shm_broadcast.state.table import (
    RemoteMembers,
    Slots,
    first_failure,
    forget_failure,
    kind_and_message,
    report_failure,
)

LIVENESS_SECONDS: Final = 0.1
"""Seconds between two checks by a sleeping member whether those it waits for are still alive. It
wakes more often, but this check costs more than everything else that it then does."""


class Waiter(Slots):
    """The waiting side of a board: its slots, their doorbells, and everything that ends a wait."""

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
        """Whether it has more members than this process was given cores: some lack one."""
        return self.n_members > len(GIVEN_CORES)

    @property
    def closed(self) -> bool:
        """Whether `leave` or `close` was called here."""
        return self._closed

    @property
    def aborted(self) -> Failure | None:
        """The first failure, if the group was aborted."""
        failure = first_failure(self._segment, self.ranks)
        if failure is None:
            return None
        reporter = self._members.remote.status(self.ranks.index(failure.rank))
        return failure if reporter is None else replace(failure, host=reporter.host)

    def eventcount_offset(self, member: int) -> int:
        """Where ``member``'s doorbell lies in `words`."""
        return self._eventcounts[self._valid(member)].offset

    def notify(self, member: int) -> None:
        """Wake ``member``, after having changed what it may wait for."""
        self._eventcounts[member].notify()

    def notify_self(self) -> None:
        """Wake this member: another thread of this process may wait."""
        if self.member is not None:
            self._eventcounts[self.member].notify()

    def notify_all(self) -> None:
        """Wake every member."""
        for eventcount in self._eventcounts:
            eventcount.notify()

    def check(self, operation: str) -> None:
        """Raise if the group was aborted or this board closed; costs one load otherwise."""
        if self._closed:
            self._mark_closed()  # again: this thread may have stamped its operation since
            title = self._titled(operation)
            raise GroupClosedError(f"{title}: {self._why_closed}")
        if self.words.load32(layout.BOARD_ABORT):
            failure = self.aborted
            if failure is not None:
                raise GroupAbortedError(self._titled(operation), failure)

    def require(
        self, operation: str, peers: Callable[[], Iterable[int]], ready: Callable[[], bool]
    ) -> None:
        """Raise if one of ``peers`` has gone, and what is waited for is not there.

        Args:
            operation: what this is, for messages.
            peers: the members that are waited for.
            ready: whether what is waited for is there.

        Raises:
            PeerLostError: one of them has ended, or has left in good order.
            GroupAbortedError, GroupClosedError: as `check`.
        """
        self._check_for(operation, peers)
        gone = self._members.first_gone(peer for peer in peers() if peer != self.member)
        # A peer may have finished what is waited for just before it ended.
        if gone is not None and not ready():
            self._check_for(operation, peers)  # it may have aborted before it left
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
            ready: the predicate; whoever makes it true rings this member.
            deadline: when to give up.
            operation: what this is, for messages.
            peers: the members still waited for, for liveness and for messages.
            poll: look again every so many seconds, where what is waited for cannot ring.
            spin: seconds to look without sleeping, first.
            detail: what else a timeout should say.
            watch: called with ``operation`` before each sleep; what it raises ends the wait.
            shown: the members that it is said to wait for, to whoever looks on from outside; None:
                ``peers``.
            lookout: when to look without sleeping once more.

        Raises:
            GroupTimeoutError: the deadline passed; names ``peers()``.
            PeerLostError: one of ``peers()`` has ended, or has left in good order.
            GroupAbortedError: a member aborted the group.
            GroupClosedError: another thread closed the board here.
        """

        looked, began, entry = -math.inf, 0, 0

        def look() -> None:
            nonlocal looked, began, entry
            self._check_for(operation, peers)
            if watch is not None:
                watch(operation)
            now = time.monotonic()
            if now < looked + LIVENESS_SECONDS:
                return
            looked = now
            self.fingerprints.compare()
            if not began:
                began = time.monotonic_ns()
            elif self._published is not None:
                late = [peer for peer in (shown or peers)() if peer != self.member]
                if late and not entry:
                    entry = self._published.begin_wait()
                if entry:
                    self._published.publish_wait(entry, operation, began, late)
            self.require(operation, peers, ready)

        eventcount = self._eventcounts[self._require_member(operation)]
        try:
            in_time = eventcount.wait(
                *(ready, deadline),
                slice_seconds=poll,
                spin_seconds=spin,
                lookout=lookout,
                between_slices=look,
            )
        finally:
            if entry and self._published is not None:
                self._published.end_wait(entry)
        if not in_time:
            late = tuple(self.member_status(peer) for peer in peers())
            more = "; ".join(filter(None, (detail(), self._members.remote.problems())))
            raise GroupTimeoutError(self._titled(operation), deadline.timeout, late, more)

    def set_remote_members(self, elsewhere: RemoteMembers) -> None:
        """Learn from ``elsewhere`` what members on other hosts do."""
        self._members.remote = elsewhere

    def suspect(self, members: Iterable[int]) -> Callable[[], bool]:
        """Note that a connection with one of ``members`` broke.

        Returns:
            A function that returns whether by now it is known which of them has gone, if one has.
        """
        return self._members.remote.suspect(members)

    def refresh_remote(self) -> None:
        """Swap news with other hosts, if members are there: a moment, half a second at most."""
        self._members.remote.refresh()

    def _mark_closed(self) -> None:
        if self.member is not None:
            self._members.mark_left(self.member)

    def _check_for(self, operation: str, peers: Callable[[], Iterable[int]]) -> None:
        """As `check`; whoever waits for the member whose loss is the reason, or that has closed its
        end, is told just that.
        """
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
        """The status of the member whose loss is what was reported, if that is it."""
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

    Attributes:
        segment: its segment.
        ranks: what each member is called in messages.
        name: the group's name, for messages.
    """

    segment: SegmentHandle
    ranks: tuple[int, ...]
    name: str


class Board(Waiter):
    """One process's view of its group's board. Close it to leave the group in good order.

    Attributes:
        name: the group's name, for messages.
        ranks: what each member is called in messages.
        n_members: how many slots the board has.
        member: this process's slot, ``None`` for one that only looks on.
        words: the board's atomic words, for the protocols that build on it.
        history: where this member's history lies in them; 0: none is kept.
        tallies: what the members' collectives have come to, in groups that compare it.
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
        """A new board with ``n_members`` slots; this process owns the memory.

        Collective: no. The others attach by `handle`.

        Args:
            n_members: 1 or more.
            member: the slot this process takes; ``None`` to take none.
            name: goes before each operation in messages; ``""`` where that says it all.
            ranks: what each member is called in messages, `DRIVER_RANK` for one that has no rank;
                its number if not given.
            histories: whether to keep the last operations of each member, and what all of them came
                to, in 139 KiB each.

        Raises:
            ValueError: ``n_members`` or ``member`` is out of range, or ``ranks`` are not as many.
            SharedMemoryError: too little memory is free.
        """
        if n_members < 1:
            raise ValueError(f"a board needs 1 or more members; got {n_members}")
        called = tuple(range(n_members) if ranks is None else ranks)
        if len(called) != n_members:
            raise ValueError(f"{n_members} members cannot be called {called}")
        size = layout.board_size(n_members, histories=histories)
        segment = Segment.create(size, layout.BOARD_LABEL)
        if histories:
            segment.words.store32(layout.BOARD_HISTORY, layout.HISTORY_ENTRIES)
        segment.words.write(layout.BOARD_KEY, os.urandom(layout.BOARD_KEY_BYTES))
        write_text(segment, layout.BOARD_NAME, name, layout.BOARD_NAME_BYTES)
        for index, rank in enumerate(called):
            segment.words.store32(layout.member_slot(index) + layout.MEMBER_RANK, rank & _U32)
        # Last: whoever looks on takes it for a sign that all of the above is there.
        segment.words.store32(layout.BOARD_MEMBERS, n_members)
        return cls(segment, called, name, member)

    @classmethod
    def attach(cls, handle: BoardHandle, member: int | None) -> Board:
        """Join the board that ``handle`` names, as ``member``.

        Collective: no. A slot whose process has died may be taken over.

        Raises:
            SharedMemoryError: the board is on another host, or its owner has ended.
            ValueError: ``member`` is out of range, or taken by a living process.
        """
        return cls(Segment.attach(handle.segment), handle.ranks, handle.name, member)

    def handle(self) -> BoardHandle:
        """What `attach` needs; valid while this process keeps the board open."""
        return BoardHandle(self._segment.handle(), self.ranks, self.name)

    @property
    def memory(self) -> memoryview:
        """The board's bytes, for extensions that wait and stamp by themselves."""
        return self._segment.memory

    @property
    def key(self) -> bytes:
        """Random bytes that only those know who have attached this board."""
        begin = layout.BOARD_KEY
        return bytes(self._segment.memory[begin : begin + layout.BOARD_KEY_BYTES])

    def abort(self, error: BaseException | str, culprit: int | None = None) -> None:
        """End every member's waiting with `GroupAbortedError`; the first failure is kept.

        Collective: no, any member may.

        Args:
            error: what happened.
            culprit: the member it happened to; if not given, the lost one that ``error`` names, or
                else this one.
        """
        member = self._require_member("abort")
        about = self._ended_by(error, member) if culprit is None else culprit
        first = self.aborted is None
        self.report(member, *kind_and_message(error), about)
        if first and self.aborted is not None:
            who = {"rank": self.ranks[about], "group": self.name}
            _log.info("%s was aborted: %s", self.name or "the group", self.aborted, extra=who)
        self.refresh_remote()  # other hosts are told before this call does anything else

    def report(self, member: int, kind: str, message: str, culprit: int) -> None:
        """Abort with what ``member`` has reported, on this host or on another one."""
        with self._reporting:  # no other thread shows a report that is written just now
            report_failure(self._segment, self.n_members, member, kind, message, culprit)
        self.notify_all()

    def leave(self) -> None:
        """Leave the group in good order; what stands on the board can be read until `close`.

        Waiting threads of this process get GroupClosedError.
        """
        if not self._closed:
            self._closed = True
            self._mark_closed()
            self.notify_all()

    def mark_lost(self) -> None:
        """Be lost to the others, as if this process had ended, unless the group was left before."""
        if not self._closed and self.member is not None:
            self._closed = True
            self._members.mark_lost(self.member)
            self.notify_all()

    def after_fork_in_child(self) -> None:
        """In a forked child: it is no member, whoever its parent is."""
        self._closed, self._why_closed = True, IN_FORKED_CHILD
        self._reporting = threading.RLock()  # another thread of the parent may have it
        self._members.after_fork_in_child()

    def close(self) -> None:
        """Leave the group, if that was not done, and give the memory back."""
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
            self._published = PublishedStatus(self._segment, member, self.n_members)
            stacks = write_stacks_when_asked()
            if stacks is not None:
                self._published.publish_stacks(stacks)
            self._members.publish(member)
        except ValueError:  # another one has it
            raise
        except BaseException:
            self._members.rollback_claim(member)
            raise
        self.notify_all()

    def _ended_by(self, error: BaseException | str, otherwise: int) -> int:
        if isinstance(error, PeerLostError):
            for status in self.status():
                if (status.rank, status.pid) == (error.rank, error.pid):
                    return self.ranks.index(status.rank)
        return otherwise
