"""A lock for things that one thread at a time may use; no thread waits beyond its deadline.

Each use is one block, which takes the turn at once or waits for it::

    with lock.turn as mine:
        if not mine:
            lock.take(deadline, operation, check)
        ...

At its end the block releases the turn if its thread has it. A thread that already has the turn gets
RuntimeError: a signal handler, or code that runs while a message is encoded, would wait for itself.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from shm_broadcast.atomics import native
from shm_broadcast.doorbell import SLICE_SECONDS
from shm_broadcast.errors import GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shm_broadcast._native import Turn
    from shm_broadcast.deadline import Deadline


def new_turn() -> Turn | PythonTurn:
    """A turn that no thread has."""
    return PythonTurn() if native is None else native.Turn()


class TimedLock:
    """A lock whose `take` honours a deadline and the group's abort.

    Attributes:
        turn: takes the turn, if no thread has it, as a context manager, and tells whether it did.
    """

    def __init__(self) -> None:
        self.turn = new_turn()

    def take(self, deadline: Deadline, operation: str, check: Callable[[str], None]) -> None:
        """Wait for the turn, inside ``with lock.turn``.

        Args:
            deadline: when to give up.
            operation: what the turn is for, for messages.
            check: called with ``operation`` every `SLICE_SECONDS`; what it raises ends the wait.

        Raises:
            GroupTimeoutError: another thread has kept the turn until the deadline.
        """
        while not self.turn.take_within(deadline.remaining(SLICE_SECONDS)):
            check(operation)
            if deadline.expired:
                raise GroupTimeoutError(
                    operation, deadline.timeout, detail="another thread of this process is in it"
                )


class PythonTurn:
    """The extension's ``Turn`` in Python; a signal handler that raises may leave it taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0

    def __enter__(self) -> bool:
        if self.is_owned():
            raise RuntimeError("this thread is in it already: it would wait for itself")
        return self._took(self._lock.acquire(blocking=False))

    def __exit__(self, *_: object) -> None:
        if self.is_owned():
            self._owner = 0
            self._lock.release()

    def take_within(self, seconds: float) -> bool:
        """Take the turn, which may be awaited so long; whether it was."""
        return self._took(self._lock.acquire(timeout=seconds))

    def is_owned(self) -> bool:
        """Whether this thread has the turn."""
        return self._owner == threading.get_ident()

    def adopt(self) -> None:
        """The turn, which a thread has, is this one's from now on."""
        self._owner = threading.get_ident()

    def _took(self, taken: bool) -> bool:
        if taken:
            self._owner = threading.get_ident()
        return taken
