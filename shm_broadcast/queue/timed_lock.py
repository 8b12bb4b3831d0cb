"""The lock by which threads share one end of a queue; none waits for it beyond its deadline."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from shm_broadcast.atomics import native
from shm_broadcast.doorbell import SLICE_SECONDS
from shm_broadcast.errors import GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shm_broadcast.deadline import Deadline


class TimedLock:
    """A lock whose `take` honours a deadline and the group's abort.

    ``take_now`` and ``give_back`` are the lock's own methods: one call less on the hot path.

    Attributes:
        take_now: take the turn if no thread has it; whether it was taken.
        give_back: let another thread have the turn.
    """

    def __init__(self) -> None:
        self.take_now: Callable[[], bool]
        self.give_back: Callable[[], None]
        self._take_within: Callable[[float], bool]
        if native is not None:
            turn = native.Turn()
            self.take_now, self.give_back = turn.take_now, turn.give_back
            self._take_within = turn.take_within
        else:
            lock = threading.Lock()
            self.take_now, self.give_back = partial(lock.acquire, False), lock.release
            self._take_within = partial(lock.acquire, True)

    def take(self, deadline: Deadline, operation: str, check: Callable[[str], None]) -> None:
        """Wait for the turn.

        Args:
            deadline: when to give up.
            operation: what the turn is for, for messages.
            check: called with ``operation`` every `SLICE_SECONDS`; what it raises ends the wait.

        Raises:
            GroupTimeoutError: another thread has kept the turn until the deadline.
        """
        while not self._take_within(deadline.remaining(SLICE_SECONDS)):
            check(operation)
            if deadline.expired:
                raise GroupTimeoutError(
                    operation, deadline.timeout, detail="another thread of this process is in it"
                )
