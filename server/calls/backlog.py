"""Keep the calls of a pool in order, and decide which ones are late.

A call without its own timeout is not late while the calls before it are being answered.

Plain bookkeeping: no locks, and no knowledge of what an answer means.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shm_broadcast import Deadline

from ..control.attentive_clock import PauseAwareClock

if TYPE_CHECKING:
    from .pending_call import PendingCall


class CallTimer:
    """Times one call at a time. Not thread-safe.

    It is meant for the oldest call under way: ranks answer calls in order, so one that has not
    answered a later call may still be busy with an earlier one, and is not late. A time during
    which all processes were stopped, as in a paused container, counts as a quarter of ``seconds``
    at most.

    Attributes:
        call: the call that is timed; ``None`` if none is.

    Args:
        seconds: how long it may take.
    """

    def __init__(self, seconds: float) -> None:
        self.call: PendingCall | None = None
        self._seconds = seconds
        self._clock = PauseAwareClock(seconds / 4)
        self._until = math.inf

    def watch(self, call: PendingCall | None) -> bool:
        """Time ``call``, from now on if it is another one than before; whether it is."""
        if call is self.call:
            return False
        self._until = math.inf if call is None else self._clock.read() + self._seconds
        self.call = call  # last: a signal handler may raise before
        return call is not None

    def forget(self, call: PendingCall) -> None:
        """Time ``call`` no more, which is over: its arguments may be large."""
        if self.call is call:
            self.watch(None)

    def passed(self) -> PendingCall | None:
        """The call, if its time has passed; each one only once."""
        if self._until > self._clock.read():
            return None
        self._until = math.inf
        return self.call

    def next_look(self) -> float:
        """Seconds until `passed` has to be called again; ``inf`` if no call is timed."""
        if self._until == math.inf:
            return math.inf
        return min(self._until - self._clock.read(), self._seconds / 4)


class CallDeadlines:
    """Tells when calls are late. Not thread-safe.

    Args:
        call_seconds: calls are late when none was answered for so long.
    """

    def __init__(self, call_seconds: float) -> None:
        self._call_seconds = call_seconds
        self._answered_at = -math.inf
        self._watched: dict[PendingCall, None] = {}
        self._looks_at = math.inf

    def answered(self, call: PendingCall) -> None:
        """Note that every rank has answered ``call``, just now."""
        self._answered_at = time.monotonic()
        self._watched.pop(call, None)

    def resumed(self) -> None:
        """Note that calls can be answered again, from now on."""
        self._answered_at = time.monotonic()

    def due(self, call: PendingCall) -> Deadline:
        """When ``call`` becomes late, if no call is answered before that."""
        if call.timeout is not None:
            return Deadline(call.since + call.timeout, call.timeout)
        since = max(call.since, self._answered_at)
        return Deadline(since + self._call_seconds, self._call_seconds)

    def watch(self, call: PendingCall) -> bool:
        """Have `look` report ``call`` when it is late.

        Returns:
            Whether `look` must be called earlier than it asked for last.
        """
        at = self.due(call).at
        if at < math.inf:
            self._watched[call] = None
        return at < self._looks_at

    def forget(self, call: PendingCall) -> None:
        """Have `look` not report ``call`` any more."""
        self._watched.pop(call, None)

    def look(self) -> tuple[list[PendingCall], float]:
        """The watched calls that are late now, each reported once; and the seconds until it has to
        be called again.
        """
        waiting = [call for call in self._watched if not call.done]
        late = [call for call in waiting if self.due(call).expired]
        self._watched = dict.fromkeys(waiting)
        for call in late:
            del self._watched[call]
        self._looks_at = min((self.due(call).at for call in self._watched), default=math.inf)
        return late, self._looks_at - time.monotonic()


class CallQueue:
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
