"""The calls of a pool in their order: those under way, and those that queue behind them.

Plain bookkeeping, without locks and without a view on what an answer means.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.calls import PendingCall


class Backlog:
    """Calls by number, and calls that have none yet. Not thread-safe.

    Args:
        in_flight: how many calls may be under way.
    """

    def __init__(self, in_flight: int) -> None:
        self._in_flight = in_flight
        self._last = 0
        self._sending = False
        self._under_way: dict[int, PendingCall] = {}
        self._queued: deque[PendingCall] = deque()

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
        """Whether a new call could be sent at once."""
        return not self._queued and self._has_room

    @property
    def sendable(self) -> bool:
        """Whether the first queued call could be sent now."""
        return bool(self._queued) and self._has_room

    @property
    def oldest(self) -> PendingCall | None:
        """The call that has been under way longest."""
        return next(iter(self._under_way.values()), None)

    def oldest_of(self, rank: int) -> PendingCall | None:
        """The call under way that ``rank`` has to answer next."""
        for call in self._under_way.values():
            if rank in call.waiting:
                return call
        return None

    def find(self, number: int) -> PendingCall | None:
        """The call of that number, if it is under way."""
        return self._under_way.get(number)

    def enqueue(self, call: PendingCall) -> None:
        """Put a call last."""
        self._queued.append(call)

    def withdraw(self, call: PendingCall) -> None:
        """Take a queued call back; nothing if it does not queue."""
        if call in self._queued:
            self._queued.remove(call)

    def next(self) -> PendingCall:
        """Take the first queued call out, for `begin`."""
        return self._queued.popleft()

    def begin(self, call: PendingCall) -> None:
        """Number a call, which is sent next; `sent` or `unsent` follows."""
        self._sending = True
        self._last += 1
        call.number = self._last
        self._under_way[call.number] = call

    def sent(self) -> None:
        """The sending of a call is over."""
        self._sending = False

    def unsent(self, call: PendingCall) -> None:
        """The sending of a call is over, and no worker got it: its number is given again."""
        self._sending = False
        self._last -= 1
        del self._under_way[call.number]
        call.number = 0

    def settle(self, call: PendingCall) -> None:
        """A call is under way no more: every rank has answered it."""
        del self._under_way[call.number]

    def clear(self) -> list[PendingCall]:
        """Forget all calls; returns them in order."""
        calls = [*self._under_way.values(), *self._queued]
        self._under_way.clear()
        self._queued.clear()
        return calls

    @property
    def _has_room(self) -> bool:
        return not self._sending and len(self._under_way) < self._in_flight
