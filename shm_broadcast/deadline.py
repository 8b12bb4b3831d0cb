"""The one timeout type: a moment on the monotonic clock, made once, passed down.

A public call takes ``timeout`` in seconds (``None``: wait for ever) and makes a `Deadline` of it
at once, so that a call that waits several times still ends on time.
"""

from __future__ import annotations

import math
import time

import msgspec

from shm_broadcast.errors import GroupTimeoutError

_MOST_MILLISECONDS = (1 << 31) - 1


class Deadline(msgspec.Struct, frozen=True, gc=False):
    """A moment to give up at. A Struct, as it is made in a fifth of a dataclass's time.

    Attributes:
        at: seconds on ``time.monotonic()``; ``inf`` means never.
        timeout: the seconds that were asked for; ``None`` means for ever.
    """

    at: float
    timeout: float | None

    @classmethod
    def after(cls, timeout: float | Deadline | None) -> Deadline:
        """The deadline ``timeout`` seconds from now; a `Deadline` is returned as it is.

        Raises:
            ValueError: ``timeout`` is negative, or NaN.
            TypeError: it is no number.
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
            what = f"timeout must be a number of seconds, or None; got {timeout!r}"
            raise TypeError(what) from None
        except OverflowError:  # an int that no float holds
            return cls(math.inf, math.inf)

    @classmethod
    def within(cls, timeout: float | Deadline | None) -> Deadline:
        """As `after`, but a negative ``timeout`` counts as 0.

        For calls that accept what is left of a time that may be over.

        Raises:
            ValueError: ``timeout`` is NaN.
            TypeError: it is no number.
        """
        if timeout is None or isinstance(timeout, Deadline):
            return cls.after(timeout)
        try:
            over = timeout < 0
        except TypeError:  # which `after` says in our words
            over = False
        return cls.after(0.0 if over else timeout)

    @property
    def expired(self) -> bool:
        """Whether the moment has passed."""
        return self.at <= time.monotonic()

    def remaining(self, at_most: float = math.inf) -> float:
        """Seconds left, never negative, never more than ``at_most``."""
        if self.at == math.inf:
            return at_most
        return min(max(self.at - time.monotonic(), 0.0), at_most)

    def check(self, operation: str) -> None:
        """Raise `GroupTimeoutError` about ``operation`` if the moment has passed."""
        if self.expired:
            raise GroupTimeoutError(operation, self.timeout)


NEVER = Deadline(math.inf, None)


def milliseconds(seconds: float) -> float | None:
    """A time-out as poll(2) takes it: of 24 days at most, or None for ever."""
    return None if seconds == math.inf else min(seconds * 1000, _MOST_MILLISECONDS)
