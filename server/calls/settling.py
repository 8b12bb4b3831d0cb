"""Times how long ranks take to answer a call that one of them has failed."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .pending_call import PendingCall


class SettleClock:
    """Times the oldest call under way, from when a rank has failed it. Not thread-safe.

    Only the oldest: ranks answer calls in order, so one that has not answered a later call may
    still be busy with an earlier one, and is not late.

    Attributes:
        call: the call that is timed; ``None`` if none is.

    Args:
        seconds: how long the other ranks may take.
    """

    def __init__(self, seconds: float) -> None:
        self.call: PendingCall | None = None
        self._seconds = seconds
        self._until = math.inf

    def watch(self, oldest: PendingCall | None) -> bool:
        """Time ``oldest`` if a rank has failed it, else nothing; whether its time begins now."""
        failed = oldest if oldest is not None and oldest.failed else None
        if failed is self.call:
            return False
        self.call = failed
        self._until = math.inf if failed is None else time.monotonic() + self._seconds
        return failed is not None

    def left(self) -> float:
        """Seconds that are left, 0 or less when they have passed; ``inf`` if no call is timed."""
        return self._until - time.monotonic()
