"""Times a call under way: how long ranks take to answer one that failed, or any."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .pending_call import PendingCall


class CallClock:
    """Times one call at a time. Not thread-safe.

    It is meant for the oldest call under way: ranks answer calls in order, so one that has not
    answered a later call may still be busy with an earlier one, and is not late.

    Attributes:
        call: the call that is timed; ``None`` if none is.

    Args:
        seconds: how long it may take.
    """

    def __init__(self, seconds: float) -> None:
        self.call: PendingCall | None = None
        self._seconds = seconds
        self._until = math.inf

    def watch(self, call: PendingCall | None) -> bool:
        """Time ``call``, from now on if it is another one than before; whether it is."""
        if call is self.call:
            return False
        self._until = math.inf if call is None else time.monotonic() + self._seconds
        self.call = call  # last: a signal handler may raise before
        return call is not None

    def forget(self, call: PendingCall) -> None:
        """Time ``call`` no more, which is over: its arguments may be large."""
        if self.call is call:
            self.watch(None)

    def passed(self) -> PendingCall | None:
        """The call, if its time has passed; each one only once."""
        if self.left() > 0:
            return None
        self._until = math.inf
        return self.call

    def left(self) -> float:
        """Seconds that are left, 0 or less when they have passed; ``inf`` if no call is timed."""
        return self._until - time.monotonic()
