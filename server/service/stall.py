"""Decides whether a pool answers its calls. Pure logic: the time is an argument.

It counts as stalled while the workers have had a call for longer than the limit, and while they
have one that has timed out. The answer to the latter is not reported, so they count as having it
until a later call is answered.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field


@dataclass
class StallWatch:
    """The calls of one pool that the workers have. Any thread may use it.

    Attributes:
        limit: seconds that a call may run before the pool counts as stalled.
    """

    limit: float
    _began: dict[int, float] = field(default_factory=dict)
    _timed_out: set[int] = field(default_factory=set)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def begin(self, now: float) -> int:
        """A call was sent; returns its number."""
        number = next(self._numbers)
        self._began[number] = now
        return number

    def answered(self, number: int) -> None:
        """A call was answered, with a result or an error; so were late ones before it."""
        for each in (*(late for late in self._timed_out.copy() if late < number), number):
            self._timed_out.discard(each)
            self._began.pop(each, None)

    def timed_out(self, number: int) -> None:
        """A call has timed out that the workers have, or for which there are none just now."""
        self._timed_out.add(number)

    def withdrawn(self, number: int) -> None:
        """A call has not come to the workers, or nobody waits for it any more."""
        del self._began[number]

    @property
    def running(self) -> int:
        """How many calls the workers have."""
        return len(self._began)

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for one of them."""
        return len(self._began) > len(self._timed_out)

    def oldest(self, now: float) -> float:
        """Seconds that they have had the oldest call; 0 if they have none."""
        return now - min([*self._began.values()], default=now)

    def stalled(self, now: float) -> bool:
        """Whether the pool counts as stalled."""
        return bool(self._timed_out) or self.oldest(now) >= self.limit
