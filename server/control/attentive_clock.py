"""A monotonic clock that limits the effect of pauses of its process."""

from __future__ import annotations

import time


class PauseAwareClock:
    """Monotonic clock that counts at most ``longest`` seconds between two reads.

    A process that was suspended itself must not blame its peers for that time.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._last = time.monotonic()
        self._seconds = 0.0

    def read(self) -> float:
        """Return the seconds so far."""
        now = time.monotonic()
        self._seconds += min(now - self._last, self._longest)
        self._last = now
        return self._seconds
