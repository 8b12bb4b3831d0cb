"""How a member of a board waits for others, and how they wake it.

Guarantees: every wait ends: ready, deadline, abort, or a needed member's death, whichever is first.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shm_broadcast import layout
from shm_broadcast.board.failures import first_failure
from shm_broadcast.board.slots import Slots
from shm_broadcast.doorbell import DEFAULT_SPIN_SECONDS, Doorbell
from shm_broadcast.errors import (
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    PeerLostError,
)
from shm_broadcast.machine.affinity import GIVEN_CORES
from shm_broadcast.machine.forked_child import DISOWNED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shm_broadcast.board.elsewhere import Elsewhere
    from shm_broadcast.deadline import Deadline
    from shm_broadcast.doorbell import Lookout
    from shm_broadcast.errors import Failure, MemberStatus
    from shm_broadcast.segment import Segment

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
        self._doorbells = tuple(
            Doorbell(segment.words, layout.member_slot(index) + layout.MEMBER_DOORBELL)
            for index in range(self.n_members)
        )

    @property
    def crowded(self) -> bool:
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
        reporter = self._members.elsewhere.status(self.ranks.index(failure.rank))
        return failure if reporter is None else replace(failure, host=reporter.host)

    def doorbell_offset(self, member: int) -> int:
        """Where ``member``'s doorbell lies in `words`."""
        return self._doorbells[self._valid(member)].offset

    def ring(self, member: int) -> None:
        """Wake ``member``, after having changed what it may wait for."""
        self._doorbells[member].ring()

    def ring_own(self) -> None:
        """Wake this member: another thread of this process may wait."""
        if self.member is not None:
            self._doorbells[self.member].ring()

    def ring_all(self) -> None:
        """Wake every member."""
        for doorbell in self._doorbells:
            doorbell.ring()

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
            self.tallies.compare()
            if not began:
                began = time.monotonic_ns()
            elif self._outward is not None:
                late = [peer for peer in (shown or peers)() if peer != self.member]
                if late and not entry:
                    entry = self._outward.begin_wait()
                if entry:
                    self._outward.say_wait(entry, operation, began, late)
            self.require(operation, peers, ready)

        doorbell = self._doorbells[self._require_member(operation)]
        try:
            in_time = doorbell.wait(
                *(ready, deadline),
                slice_seconds=poll,
                spin_seconds=spin,
                lookout=lookout,
                between_slices=look,
            )
        finally:
            if entry and self._outward is not None:
                self._outward.end_wait(entry)
        if not in_time:
            late = tuple(self.member_status(peer) for peer in peers())
            more = "; ".join(filter(None, (detail(), self._members.elsewhere.remark())))
            raise GroupTimeoutError(self._titled(operation), deadline.timeout, late, more)

    def hear(self, elsewhere: Elsewhere) -> None:
        """Learn from ``elsewhere`` what members on other hosts do."""
        self._members.elsewhere = elsewhere

    def suspect(self, members: Iterable[int]) -> Callable[[], bool]:
        """Note that a connection with one of ``members`` broke.

        Returns:
            A function that returns whether by now it is known which of them has gone, if one has.
        """
        return self._members.elsewhere.suspect(members)

    def catch_up(self) -> None:
        """Swap news with other hosts, if members are there: a moment, half a second at most."""
        self._members.elsewhere.swap()

    def _mark_closed(self) -> None:
        if self.member is not None:
            self._members.leave(self.member)

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
        self._members.elsewhere.blame(culprit)
        gone = self._members.first_gone([culprit])
        return None if gone is None else self.member_status(gone)

    def _require_member(self, operation: str) -> int:
        if self._why_closed is DISOWNED:
            raise GroupClosedError(f"{self._titled(operation)}: {DISOWNED}")
        return self._refuse(operation) if self.member is None else self.member
