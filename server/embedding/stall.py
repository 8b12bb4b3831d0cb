"""Whether a pool's calls move. Pure logic: the time is an argument.

Calls stand still while one has run for longer than any should, and after one has run out of time,
until another is answered.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class StallWatch:
    """The calls of one pool that are under way.

    Attributes:
        limit: seconds that a call may run before calls count as standing still.
    """

    limit: float
    _began: dict[int, float] = field(default_factory=dict)
    _number: int = 0
    _timed_out: bool = False

    def begin(self, now: float) -> int:
        """A call was sent; returns the number to `end` it with."""
        self._number += 1
        self._began[self._number] = now
        return self._number

    def end(self, number: int, *, answered: bool) -> None:
        """A call is over: the workers answered it, be it with an error, or its time did run out."""
        del self._began[number]
        self._timed_out = not answered

    @property
    def running(self) -> int:
        """Calls under way."""
        return len(self._began)

    def oldest(self, now: float) -> float:
        """Seconds that the oldest call under way has run; 0 if there is none."""
        return now - min(self._began.values(), default=now)

    def stalled(self, now: float) -> bool:
        """Whether calls stand still."""
        return self._timed_out or self.oldest(now) >= self.limit
