"""The calls of a pool in order: first those that the workers have ("under way"), then the queued.

Plain bookkeeping: no locks, and no knowledge of what an answer means.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .pending_call import PendingCall


class Backlog:
    """Calls under way by number, and queued calls, which have no number. Not thread-safe, but a
    signal handler may call anything of it between two steps of anything else.

    Attributes:
        last: the number of the call that began last; 0 if none did.
        last_settled: the method of the latest call of this generation that all ranks have answered;
            ``""`` if none.

    Args:
        in_flight: how many calls may be under way at once.
    """

    def __init__(self, in_flight: int) -> None:
        self._in_flight = in_flight
        self.last = 0
        self.last_settled = ""
        self._under_way: dict[int, PendingCall] = {}
        self._settling: dict[PendingCall, None] = {}
        self._queued: deque[PendingCall] = deque()

    @property
    def size(self) -> int:
        """How many calls are under way or queued."""
        return len(self._under_way) + len(self._queued)

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._under_way)

    @property
    def empty(self) -> bool:
        """Whether no call is under way or queued."""
        return not self._under_way and not self._queued

    @property
    def open(self) -> bool:
        """Whether a new call could be sent now, without overtaking a queued one."""
        return not self._queued and self._has_room

    @property
    def sendable(self) -> bool:
        """Whether the first queued call could be sent now; what makes room always can."""
        return bool(self._queued) and (self._has_room or self._queued[0].is_void)

    @property
    def oldest(self) -> PendingCall | None:
        """The call that has been under way longest; ``None`` if none is."""
        for call in self._under_way.values():
            return call
        return None

    def oldest_of(self, rank: int) -> PendingCall | None:
        """The call under way that ``rank`` has to answer next; ``None`` if it has answered all."""
        for call in tuple(self._under_way.values()):
            if rank in call.waiting:
                return call
        return None

    def find(self, number: int) -> PendingCall | None:
        """The call with this number, if it is under way."""
        return self._under_way.get(number)

    def told(self) -> str:
        """The calls under way, by number and method, as text for an error message."""
        calls = self._under_way.values()
        return "under way: " + ", ".join(f"call {call.number} ({call.method})" for call in calls)

    def enqueue(self, call: PendingCall) -> None:
        """Queue a call behind all others."""
        self._queued.append(call)

    def withdraw(self, call: PendingCall) -> None:
        """Remove a call from the queue, if it is there."""
        if call in self._queued:
            self._queued.remove(call)

    def next(self) -> PendingCall:
        """Remove the first queued call and return it; the caller passes it to `begin`."""
        return self._queued.popleft()

    def begin(self, call: PendingCall) -> None:
        """Give a call its number, which no other ever gets, and count it as under way."""
        self.last += 1
        call.number = self.last
        self._under_way[call.number] = call

    def unsent(self, call: PendingCall) -> None:
        """Note that ``call``, which was begun, reached no worker."""
        del self._under_way[call.number]
        call.number = 0

    def follow_up(self, call: PendingCall) -> None:
        """Queue a void call, of as many ranks as ``call``, before all others; one is enough."""
        if not (self._queued and self._queued[0].is_void):
            self._queued.appendleft(call.void())

    @property
    def answered(self) -> list[PendingCall]:
        """The calls under way that every rank has answered."""
        return [call for call in tuple(self._under_way.values()) if call.settled]

    @property
    def settling(self) -> list[PendingCall]:
        """The calls that have left those under way and for which `settled` was not called."""
        return list(self._settling)

    def settle(self, call: PendingCall) -> None:
        """Note that every rank has answered ``call``: it leaves the calls under way."""
        if not call.is_void:
            self.last_settled = call.method
        self._settling[call] = None
        self._under_way.pop(call.number, None)  # or has left: a signal handler has called the pool

    def settled(self, call: PendingCall) -> None:
        """Note that all has been done that is due after `settle` or `lose`. Any thread may call."""
        self._settling.pop(call, None)

    def lose(self, error: BaseException, *, again: bool) -> None:
        """Fail all calls because of ``error``, and queue those that are to be made again.

        Args:
            error: what broke the pool.
            again: whether any is.
        """
        queued: deque[PendingCall] = deque()
        for call in (*self._under_way.values(), *self._queued):
            if again and call.take_back():
                queued.append(call)
            else:
                call.lose(error)
                self._settling[call] = None
        # Both at once: a signal handler raises before it, and this is done again, or after it.
        self._under_way, self._queued = {}, queued

    def withdraw_all(self) -> list[PendingCall]:
        """Empty the queue; returns what was in it, in order, without void calls."""
        calls = [call for call in self._queued if not call.is_void]
        self._queued.clear()
        return calls

    def put_back(self, calls: Sequence[PendingCall]) -> None:
        """Queue calls before all others."""
        self._queued.extendleft(reversed(calls))

    @property
    def _has_room(self) -> bool:
        return len(self._under_way) < self._in_flight
