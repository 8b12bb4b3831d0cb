"""A clock that hardly counts the time during which nobody looked at it."""

from __future__ import annotations

import time


class PauseAwareClock:
    """Counts the time during which its owner looked: the process may have been stopped itself, and
    must not take what others have not done meanwhile for their fault.

    Args:
        longest: of a time without a look, not more seconds than this count.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._last = time.monotonic()
        self._attended = 0.0

    def read(self) -> float:
        """The seconds so far."""
        now = time.monotonic()
        self._attended += min(now - self._last, self._longest)
        self._last = now
        return self._attended
