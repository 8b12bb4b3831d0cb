"""Times a call under way: how long ranks take to answer one that failed, or any."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..control.attentive_clock import AttentiveClock

if TYPE_CHECKING:
    from .pending_call import PendingCall


class CallClock:
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
        self._clock = AttentiveClock(seconds / 4)
        self._until = math.inf

    def watch(self, call: PendingCall | None) -> bool:
        """Time ``call``, from now on if it is another one than before; whether it is."""
        if call is self.call:
            return False
        self._until = math.inf if call is None else self._clock.look() + self._seconds
        self.call = call  # last: a signal handler may raise before
        return call is not None

    def forget(self, call: PendingCall) -> None:
        """Time ``call`` no more, which is over: its arguments may be large."""
        if self.call is call:
            self.watch(None)

    def passed(self) -> PendingCall | None:
        """The call, if its time has passed; each one only once."""
        if self._until > self._clock.look():
            return None
        self._until = math.inf
        return self.call

    def next_look(self) -> float:
        """Seconds until `passed` has to be called again; ``inf`` if no call is timed."""
        if self._until == math.inf:
            return math.inf
        return min(self._until - self._clock.look(), self._seconds / 4)
