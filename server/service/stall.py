"""Decides whether a pool answers its calls. Pure logic: the time is an argument.

It counts as stalled while a call has run for longer than the limit, and, after a call has timed
out, until another one is answered.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field


@dataclass
class StallWatch:
    """The calls of one pool that are under way. Any thread may use it.

    Attributes:
        limit: seconds that a call may run before the pool counts as stalled.
    """

    limit: float
    _began: dict[int, float] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _timed_out: bool = False

    def begin(self, now: float) -> int:
        """A call was sent; returns the number to `end` it with."""
        number = next(self._numbers)
        self._began[number] = now
        return number

    def end(self, number: int, *, answered: bool) -> None:
        """A call has ended: it was answered, with a result or an error, or it timed out."""
        del self._began[number]
        self._timed_out = not answered

    @property
    def running(self) -> int:
        """How many calls are under way."""
        return len(self._began)

    def oldest(self, now: float) -> float:
        """Seconds that the oldest call under way has run; 0 if there is none."""
        return now - min([*self._began.values()], default=now)

    def stalled(self, now: float) -> bool:
        """Whether the pool counts as stalled."""
        return self._timed_out or self.oldest(now) >= self.limit
