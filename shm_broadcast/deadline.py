"""The one timeout type: a point in time on the monotonic clock, made once per public call.

A public call makes a `Deadline` of its ``timeout`` (seconds; ``None``: no limit) at once, so a call
with several waits still ends on time.
"""

from __future__ import annotations

import math
import time

import msgspec

from shm_broadcast.errors import GroupTimeoutError

_MOST_MILLISECONDS = (1 << 31) - 1


class Deadline(msgspec.Struct, frozen=True, gc=False):
    """The point in time when a call gives up. A Struct: made in a fifth of a dataclass's time.

    Attributes:
        at: seconds on ``time.monotonic()``; ``inf`` means never.
        timeout: the requested seconds; ``None`` means no limit.
    """

    at: float
    timeout: float | None

    @classmethod
    def after(cls, timeout: float | Deadline | None) -> Deadline:
        """Return the deadline ``timeout`` seconds from now; a `Deadline` is returned unchanged.

        Raises:
            ValueError: ``timeout`` is negative, or NaN.
            TypeError: ``timeout`` is no number.
        """
        if isinstance(timeout, Deadline):
            return timeout
        if timeout is None:
            return NEVER
        try:
            if not timeout >= 0:
                raise ValueError(f"timeout must be 0 or more seconds, or None; got {timeout!r}")
            return cls(time.monotonic() + timeout, timeout)
        except TypeError:
            text = f"timeout must be a number of seconds, or None; got {timeout!r}"
            raise TypeError(text) from None
        except OverflowError:  # an int that no float holds
            return cls(math.inf, math.inf)

    @classmethod
    def within(cls, timeout: float | Deadline | None) -> Deadline:
        """Return `after` of ``timeout``, where a negative ``timeout`` counts as 0.

        For calls that accept the rest of a time that may be over.
        """
        if timeout is None or isinstance(timeout, Deadline):
            return cls.after(timeout)
        try:
            over = timeout < 0
        except TypeError:  # `after` raises it with a text of ours
            over = False
        return cls.after(0.0 if over else timeout)

    @property
    def expired(self) -> bool:
        """Return whether the deadline has passed."""
        return self.at <= time.monotonic()

    def remaining(self, at_most: float = math.inf) -> float:
        """Return the seconds left, from 0 to ``at_most``."""
        if self.at == math.inf:
            return at_most
        return min(max(self.at - time.monotonic(), 0.0), at_most)

    def check(self, operation: str) -> None:
        """Raise `GroupTimeoutError` about ``operation`` if the deadline has passed."""
        if self.expired:
            raise GroupTimeoutError(operation, self.timeout)


NEVER = Deadline(math.inf, None)


def milliseconds(seconds: float) -> float | None:
    """Return a timeout for poll(2) in milliseconds: at most 24 days, or None for no limit."""
    return None if seconds == math.inf else min(seconds * 1000, _MOST_MILLISECONDS)


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
