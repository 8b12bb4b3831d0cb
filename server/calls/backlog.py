"""Queue a pool's calls, number those in flight, and decide which ones are late.

A call without its own timeout is not late while calls before it are being answered. No locks: the
tracker holds its lock.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shm_broadcast import Deadline
from shm_broadcast.deadline import PauseAwareClock

if TYPE_CHECKING:
    from .pending_call import PendingCall


class CallTimer:
    """Times one call at a time, for ``seconds``. Not thread-safe.

    Time only the oldest call in flight: ranks answer in order, so a later call may wait for an
    earlier one. A pause of all processes, as of a container, counts as at most a quarter of the
    limit.
    """

    def __init__(self, seconds: float) -> None:
        self.call: PendingCall | None = None
        self._seconds = seconds
        self._clock = PauseAwareClock(seconds / 4)
        self._until = math.inf

    def watch(self, call: PendingCall | None) -> bool:
        """Time ``call`` from now on, if it is another call; return whether it is."""
        if call is self.call:
            return False
        self._until = math.inf if call is None else self._clock.read() + self._seconds
        self.call = call  # last: a signal handler may raise before
        return call is not None

    def forget(self, call: PendingCall) -> None:
        """Drop ``call``, which is over: its arguments may be large."""
        if self.call is call:
            self.watch(None)

    def passed(self) -> PendingCall | None:
        """Return the call after its time; each one once."""
        if self._until > self._clock.read():
            return None
        self._until = math.inf
        return self.call

    def next_look(self) -> float:
        """Return seconds until the next call of `passed`; ``inf`` if no call is timed."""
        if self._until == math.inf:
            return math.inf
        return min(self._until - self._clock.read(), self._seconds / 4)


class CallDeadlines:
    """Detects calls that wait ``call_seconds`` without any answer. Not thread-safe."""

    def __init__(self, call_seconds: float) -> None:
        self._call_seconds = call_seconds
        self._answered_at = -math.inf
        self._watched: dict[PendingCall, None] = {}
        self._looks_at = math.inf

    def answered(self, call: PendingCall) -> None:
        """Record that every rank has answered ``call``, now."""
        self._answered_at = time.monotonic()
        self._watched.pop(call, None)

    def resumed(self) -> None:
        """Record that calls can be answered from now on."""
        self._answered_at = time.monotonic()

    def due(self, call: PendingCall) -> Deadline:
        """Return the time at which ``call`` becomes late, if no call is answered before."""
        if call.timeout is not None:
            return Deadline(call.since + call.timeout, call.timeout)
        since = max(call.since, self._answered_at)
        return Deadline(since + self._call_seconds, self._call_seconds)

    def watch(self, call: PendingCall) -> bool:
        """Have `look` report ``call`` when it is late; return whether `look` is due earlier."""
        at = self.due(call).at
        if at < math.inf:
            self._watched[call] = None
        return at < self._looks_at

    def forget(self, call: PendingCall) -> None:
        """Stop watching ``call``."""
        self._watched.pop(call, None)

    def look(self) -> tuple[list[PendingCall], float]:
        """Return watched calls that are late, each once, and the seconds until the next look."""
        waiting = [call for call in self._watched if not call.done]
        late = [call for call in waiting if self.due(call).expired]
        self._watched = dict.fromkeys(waiting)
        for call in late:
            del self._watched[call]
        self._looks_at = min((self.due(call).at for call in self._watched), default=math.inf)
        return late, self._looks_at - time.monotonic()


class CallQueue:
    """Calls in flight by number, and queued calls, without number. Not thread-safe.

    A signal handler may call any method between two steps of any other.

    Attributes:
        last: the number of the last call that was sent; 0: none.
        last_settled: the method of the last call of this generation that all ranks have answered;
            ``""``: none.
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
        """Return the number of calls in flight or queued."""
        return len(self._under_way) + len(self._queued)

    @property
    def busy(self) -> bool:
        """Return whether a call is in flight."""
        return bool(self._under_way)

    @property
    def empty(self) -> bool:
        """Return whether no call is in flight or queued."""
        return not self._under_way and not self._queued

    @property
    def open(self) -> bool:
        """Return whether a new call can be sent without overtaking a queued one."""
        return not self._queued and self._has_room

    @property
    def sendable(self) -> bool:
        """Return whether the first queued call can be sent; a no-op call always can."""
        return bool(self._queued) and (self._has_room or self._queued[0].is_void)

    @property
    def oldest(self) -> PendingCall | None:
        """Return the oldest call in flight, if any."""
        for call in self._under_way.values():
            return call
        return None

    def oldest_of(self, rank: int) -> PendingCall | None:
        """Return the call in flight that ``rank`` has to answer next, if any."""
        for call in tuple(self._under_way.values()):
            if rank in call.waiting:
                return call
        return None

    def find(self, number: int) -> PendingCall | None:
        """Return the call with this number, if it is in flight."""
        return self._under_way.get(number)

    def told(self) -> str:
        """Return the numbers and methods of the calls in flight, for an error's text."""
        calls = self._under_way.values()
        return "under way: " + ", ".join(f"call {call.number} ({call.method})" for call in calls)

    def enqueue(self, call: PendingCall) -> None:
        """Append a call to the queue."""
        self._queued.append(call)

    def withdraw(self, call: PendingCall) -> None:
        """Remove a call from the queue, if it is queued."""
        if call in self._queued:
            self._queued.remove(call)

    def next(self) -> PendingCall:
        """Remove the first queued call and return it; the caller passes it to `begin`."""
        return self._queued.popleft()

    def begin(self, call: PendingCall) -> None:
        """Number a call, uniquely, and count it as in flight."""
        self.last += 1
        call.number = self.last
        self._under_way[call.number] = call

    def unsent(self, call: PendingCall) -> None:
        """Revert `begin`: no worker has received ``call``."""
        del self._under_way[call.number]
        call.number = 0

    def follow_up(self, call: PendingCall) -> None:
        """Queue a no-op call to the ranks of ``call`` first, unless one is first."""
        if not (self._queued and self._queued[0].is_void):
            self._queued.appendleft(call.void())

    @property
    def answered(self) -> list[PendingCall]:
        """Return the calls in flight that every rank has answered."""
        return [call for call in tuple(self._under_way.values()) if call.settled]

    @property
    def settling(self) -> list[PendingCall]:
        """Return the calls after `settle` or `lose`, for which `settled` was not called."""
        return list(self._settling)

    def settle(self, call: PendingCall) -> None:
        """Remove a call, which every rank has answered, from those in flight."""
        if not call.is_void:
            self.last_settled = call.method
        self._settling[call] = None
        self._under_way.pop(call.number, None)  # a signal handler may have removed it

    def settled(self, call: PendingCall) -> None:
        """Record that a call's actions after `settle` or `lose` are done. Any thread may call."""
        self._settling.pop(call, None)

    def lose(self, error: BaseException, *, again: bool) -> None:
        """Fail all calls because of ``error``; if ``again``, queue those that may run again."""
        queued: deque[PendingCall] = deque()
        for call in (*self._under_way.values(), *self._queued):
            if again and call.take_back():
                queued.append(call)
            else:
                call.lose(error)
                self._settling[call] = None
        # In one assignment: a signal handler raises before it, and `lose` is repeated, or after it.
        self._under_way, self._queued = {}, queued

    def withdraw_all(self) -> list[PendingCall]:
        """Empty the queue; return its calls in order, without no-ops."""
        calls = [call for call in self._queued if not call.is_void]
        self._queued.clear()
        return calls

    def put_back(self, calls: Sequence[PendingCall]) -> None:
        """Queue calls before all others."""
        self._queued.extendleft(reversed(calls))

    @property
    def _has_room(self) -> bool:
        return len(self._under_way) < self._in_flight
