"""How many calls fit into the time there is, by what the first ones took."""

from __future__ import annotations

import time

GRACE = 30.0
"""Seconds that a program which had to end may still take before it is stopped."""

LONGEST = 600.0
"""Seconds after which a program that has no such limit is stopped."""


def fits(wanted: int, tried: int, took: float, seconds: float) -> int:
    """How many calls fit into ``seconds``, those among them that were made.

    Args:
        wanted: how many there shall be at most.
        tried: how many were made.
        took: the seconds of these.
        seconds: for all of them.
    """
    if took <= 0:
        return wanted
    return max(tried, int(min(wanted, seconds * tried / took)))


class TimeLeft:
    """Shares out the seconds that a program has.

    Args:
        seconds: from now on.
    """

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def part(self, parts: int, before: float = 0.0) -> float:
        """The seconds for the next of ``parts`` that are left; each takes ``before`` besides."""
        left = (self._end - time.monotonic()) / parts
        return max(left - before, 0.0)

    def limit(self) -> float:
        """The seconds after which whatever still runs hangs."""
        return min(self.part(1) + GRACE, LONGEST)
