"""How long ranks may be late for a call that one of them has failed."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.calls import PendingCall


class SettleClock:
    """Times the oldest call, from when it is the oldest and failed. Not thread-safe.

    Ranks answer calls in order: one that has not answered a later call may be busy with this one.

    Attributes:
        call: the call that is timed; ``None``: none is.

    Args:
        seconds: how long it may take.
    """

    def __init__(self, seconds: float) -> None:
        self.call: PendingCall | None = None
        self._seconds = seconds
        self._until = math.inf

    def watch(self, oldest: PendingCall | None) -> bool:
        """Time ``oldest`` if a rank has failed it; whether its time begins now."""
        failed = oldest if oldest is not None and oldest.failed else None
        if failed is self.call:
            return False
        self.call = failed
        self._until = math.inf if failed is None else time.monotonic() + self._seconds
        return failed is not None

    def left(self) -> float:
        """Seconds that are left, not more than 0 once they have passed; ``inf`` without a call."""
        return self._until - time.monotonic()
