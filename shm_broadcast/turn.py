"""Threads that share one end of a queue take turns, and none waits beyond its deadline."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from shm_broadcast.doorbell import SLICE_SECONDS
from shm_broadcast.errors import GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shm_broadcast.deadline import Deadline


class Turn:
    """A lock with a deadline. ``take_now`` and ``give_back`` are the lock's own, for hot paths."""

    def __init__(self) -> None:
        lock = threading.Lock()
        self._lock = lock
        self.give_back = lock.release

    def take_now(self) -> bool:
        """Take the turn if nobody has it; whether it was taken."""
        return self._lock.acquire(blocking=False)

    def take(self, deadline: Deadline, operation: str, check: Callable[[str], None]) -> None:
        """Wait for the turn.

        Args:
            deadline: when to give up.
            operation: what the turn is for, for messages.
            check: called now and then with ``operation``; raises to end the wait.

        Raises:
            GroupTimeoutError: another thread has had the turn all the time.
        """
        while not self._lock.acquire(timeout=deadline.remaining(SLICE_SECONDS)):
            check(operation)
            if deadline.expired:
                raise GroupTimeoutError(
                    operation, deadline.timeout, detail="another thread of this process is in it"
                )
