"""Sleeping until somebody rings, without ever losing a wake-up.

A doorbell is two 32-bit words: a counter to sleep on and the number of announced sleepers. The
order of steps is what makes it right; see the ordering rule in `shm_broadcast.layout`.

Guarantees: a `Doorbell.ring` after the change that a waiter waits for wakes that waiter. Should a
wake-up be lost all the same, the waiter looks again after `SLICE_SECONDS`.

Assumes: whoever rings has made its change before.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

from shm_broadcast.layout import DOORBELL_SLEEPERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from shm_broadcast.atomics import WordsLike
    from shm_broadcast.deadline import Deadline

SLICE_SECONDS: Final = 0.04
"""How long a waiter sleeps at most before it looks again at everything, liveness included."""

DEFAULT_SPIN_SECONDS: Final = 200e-6
"""How long a waiter looks on before it sleeps.

A sleep and a wake cost 35 µs, in a virtual machine up to 100; two peers that both sleep pay four
of these for each round trip, which keeps both waiting long enough to sleep again. Twice that much
gets them out of it.
"""


class Doorbell:
    """The doorbell of one waiter, at ``offset`` of ``words``."""

    def __init__(self, words: WordsLike, offset: int) -> None:
        self._words = words
        self.offset = offset

    def ring(self) -> None:
        """Wake whoever sleeps on it; one fence and one load if nobody does."""
        self._words.ring(self.offset)

    def reset_sleepers(self) -> None:
        """Forget sleepers that died asleep. Only for a process that takes over the slot."""
        self._words.store32(self.offset + DOORBELL_SLEEPERS, 0)

    def wait(
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        *,
        slice_seconds: float = SLICE_SECONDS,
        spin_seconds: float = DEFAULT_SPIN_SECONDS,
        between_slices: Callable[[], None],
    ) -> bool:
        """Wait until ``ready()``; whether it became so before the deadline.

        Args:
            ready: the predicate; cheap, called many times.
            deadline: when to give up.
            slice_seconds: how long to sleep at most between two looks.
            spin_seconds: how long to look without sleeping, first and after each ring.
            between_slices: called before every sleep; raises to end the wait.
        """
        while not _spin(ready, deadline.remaining(spin_seconds)):
            ended = self._sleep(ready, deadline, slice_seconds, between_slices)
            if ended is not None:
                return ended
        return True

    def _sleep(
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        slice_seconds: float,
        between_slices: Callable[[], None],
    ) -> bool | None:
        """Sleep until it rings: None; if it is ``ready()`` before, True; at the deadline, False.

        Who rings while somebody sleeps makes a system call, so a waiter that looks on again after
        a ring does not count as asleep.
        """
        words, sleepers = self._words, self.offset + DOORBELL_SLEEPERS
        words.add32(sleepers, 1)
        try:
            while True:
                seen = words.load32(self.offset)
                if ready():
                    return True
                between_slices()
                if deadline.expired:
                    return False
                words.sleep_on(self.offset, seen, deadline.remaining(slice_seconds))
                if words.load32(self.offset) != seen:
                    return None
        finally:
            words.add32(sleepers, -1)


class AdaptiveSpin:
    """How long to look before sleeping, learnt from the last waits.

    A wait that ended within twice the window keeps it; longer ones halve it, down to nothing, so
    that a process which waits long does not burn its core each time.
    """

    def __init__(self, window_seconds: float = DEFAULT_SPIN_SECONDS) -> None:
        self._largest = int(window_seconds * 1e9)
        self.window_ns = self._largest

    def observe(self, waited_ns: int) -> None:
        """Learn from a wait that has ended."""
        if waited_ns <= 2 * self._largest:
            self.window_ns = self._largest
        else:
            self.window_ns //= 2


def _spin(ready: Callable[[], bool], seconds: float) -> bool:
    if ready():
        return True
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        os.sched_yield()
        if ready():
            return True
    return False
