"""Whether a pool takes calls: which generation of workers it has, what broke it, what ended it.

Plain bookkeeping, guarded by the ledger's lock; reading needs no lock. A failure is noted by
assignments with no call between them. Python runs signal handlers only after calls, so when one
raises, the failure is noted completely or not at all, and one that ends the pool takes effect.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..errors import PoolClosedError, again, free_frames, located

if TYPE_CHECKING:
    from shm_broadcast import CoordinatorError

_BROKEN = "The pool broke with this failure and takes no more calls."


class PoolState:
    """The state of a pool. Not thread-safe.

    Attributes:
        generation: the number of the generation that works, or worked last; 0 before the first.
        restarts: how often there was a new generation in the place of a broken one.
        last_failure: when the pool broke last, in seconds since the epoch, and why.
        ended: what broke the pool for good, or `PoolClosedError`; ``None`` while it takes calls.
        works: whether calls may go to the workers.
        breaking: a failure whose consequences for the calls are still to be drawn.

    Args:
        name: the pool's, for its errors; ``""``: none.
        restartable: whether it is restarted when it has broken, or ended.
    """

    def __init__(self, name: str, restartable: bool) -> None:
        self.generation = 0
        self.restarts = 0
        self.last_failure: tuple[float, CoordinatorError] | None = None
        self.ended: CoordinatorError | None = None
        self.works = False
        self.breaking: CoordinatorError | None = None
        self._name = name
        self._restartable = restartable

    @property
    def restarting(self) -> CoordinatorError | None:
        """What broke the pool, while it is restarted because of that."""
        if self.works or self.ended is not None or self.last_failure is None:
            return None
        return self.last_failure[1]

    @property
    def closed(self) -> bool:
        """Whether the pool was closed, and had not broken before."""
        return isinstance(self.ended, PoolClosedError)

    def over(self, generation: int) -> bool:
        """Whether the workers of ``generation`` take no more calls."""
        return not self.works or generation != self.generation

    def check(self) -> None:
        """Raise the error that broke the pool, or `PoolClosedError`; nothing while it is usable."""
        if self.ended is not None:
            raise again(self.ended, "" if self.closed else _BROKEN)

    def open(self, generation: int) -> None:
        """Begin a generation, whose number is higher than those before."""
        restarted = self.generation > 0
        self.generation = generation
        self.works = True
        # Whoever sees the restart counted must not find the pool restarting any more.
        self.restarts += restarted

    def break_off(self, error: CoordinatorError) -> None:
        """Note what broke the generation that works."""
        self._fail(error, ends=not self._restartable)

    def end(self, error: CoordinatorError) -> None:
        """Note what ended the pool for good."""
        self._fail(error, ends=True)

    def let_go(self) -> None:
        """Keep no memory of where the failure came from, once no thread is there any more."""
        if self.last_failure is not None:
            free_frames(self.last_failure[1])

    def _fail(self, error: CoordinatorError, *, ends: bool) -> None:
        error = located(again(error), self._name)  # the pool keeps it
        closed = isinstance(error, PoolClosedError)
        last = self.last_failure if closed else (time.time(), error)
        ended = error if ends else None
        if self.ended is None:
            self.works, self.breaking, self.ended, self.last_failure = False, error, ended, last
