"""What a communicator needs of whoever watches its group: `shm_broadcast.Board`, or nobody.

`Watch` lists the part of the board's interface that communicators use. `LoneWatch` has the
same shape for a communicator without a board: it sees its own process only, so it knows
deadlines and its own aborts, and nothing about its peers.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Protocol

from shm_broadcast.doorbell import DEFAULT_SPIN_SECONDS
from shm_broadcast.errors import Failure, GroupAbortedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shm_broadcast.deadline import Deadline

_SLICE = 0.02
"""The longest sleep between two looks at the deadline."""


class Watch(Protocol):
    """Deadlines, aborts and peers, as `shm_broadcast.Board` offers them."""

    @property
    def member(self) -> int | None:
        """This process's number among the members."""

    @property
    def aborted(self) -> Failure | None:
        """The first failure that was reported, if any."""

    def stamp(self, operation: str) -> int:
        """Say that ``operation`` begins here."""

    def idle(self) -> None:
        """Say that it has ended."""

    def check(self, operation: str) -> None:
        """Raise `GroupAbortedError` if the group was aborted."""

    def abort(self, error: BaseException | str, culprit: int | None = None) -> None:
        """Report a failure; everyone who waits raises."""

    def wait(
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        operation: str,
        peers: Callable[[], Iterable[int]],
        *,
        poll: float | None = None,
        spin: float = DEFAULT_SPIN_SECONDS,
    ) -> None:
        """Return once ``ready()``; raise on deadline, abort or a lost peer."""

    def ring(self, member: int) -> None:
        """Wake ``member`` if it waits."""


class LoneWatch:
    """A watch over nobody but this process."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._failure: Failure | None = None
        self._bell = threading.Event()

    @property
    def member(self) -> int:
        """This process's rank in its group."""
        return self._rank

    @property
    def aborted(self) -> Failure | None:
        """The failure that this process reported, if any."""
        return self._failure

    def stamp(self, operation: str) -> int:  # noqa: ARG002 - nobody reads it
        """Nobody looks."""
        return 0

    def idle(self) -> None:
        """Nobody looks."""

    def check(self, operation: str) -> None:
        """Raise `GroupAbortedError` if this process aborted."""
        if self._failure is not None:
            raise GroupAbortedError(operation, self._failure)

    def abort(self, error: BaseException | str, culprit: int | None = None) -> None:
        """Remember the first failure and wake whoever waits in this process."""
        if self._failure is None:
            kind = "abort" if isinstance(error, str) else type(error).__name__
            about = self._rank if culprit is None else culprit
            self._failure = Failure(self._rank, kind, str(error), about)
        self._bell.set()

    def wait(
        self,
        ready: Callable[[], bool],
        deadline: Deadline,
        operation: str,
        peers: Callable[[], Iterable[int]],  # noqa: ARG002 - nobody is seen
        *,
        poll: float | None = None,
        spin: float = DEFAULT_SPIN_SECONDS,
    ) -> None:
        """Return once ``ready()``; raise `GroupTimeoutError` or `GroupAbortedError`."""
        spin_until = time.monotonic() + spin
        while not ready():
            self.check(operation)
            deadline.check(operation)
            if time.monotonic() < spin_until:
                time.sleep(0)
                continue
            self._bell.wait(deadline.remaining(at_most=poll or _SLICE))
            self._bell.clear()

    def ring(self, member: int) -> None:  # noqa: ARG002 - there is only this one
        """Wake whoever waits in this process."""
        self._bell.set()
