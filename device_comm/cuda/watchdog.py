"""Watch stream-ordered operations, whose launch returns before they are done.

One thread per communicator watches unfinished operations, and the operation that is being launched,
since a launch may block. If a deadline passes, a peer is lost, or the group is aborted, the
communicator ends the work on the device: threads that synchronise with the device continue, and its
next call raises.

Operations end in order, so only the oldest and the newest unfinished ones are kept, with one event
per operation. Replays of a graph are not observable: after a capture the thread watches the group
until the communicator is closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import CoordinatorError, GroupTimeoutError

if TYPE_CHECKING:
    from device_comm.cuda.driver import StreamEvent
    from device_comm.torch_waiting import ErrorTranslator


_TICK = 0.02
"""Seconds between two polls of unfinished work."""

_REPLAY_TICK = 0.1
"""Seconds between two polls of the group, for graphs that may be replaying."""


@dataclass(eq=False, slots=True)
class Issued:
    """An operation on a stream, which needs the members ``peers``.

    Attributes:
        mark: the event after it; None during its launch.
        over: it needs no more watching.
    """

    operation: str
    deadline: Deadline
    peers: Sequence[int]
    mark: StreamEvent | None = None
    over: bool = False

    def done(self) -> bool:
        """Return True if the device is done, or it is over. Never blocks."""
        return self.over or (self.mark is not None and self.mark.query())


class StreamWatchdog:
    """Watches the operations of one communicator. Any thread may call."""

    def __init__(
        self,
        name: str,
        boundary: ErrorTranslator,
        peers: Sequence[int],
        check: Callable[[], None],
        failed: Callable[[CoordinatorError], None],
    ) -> None:
        """Start no thread yet.

        Args:
            peers: the member numbers of the ranks that a replayed graph needs.
            check: polled; raises if current operations have failed.
            failed: called once in the thread with the error, before the thread exits.
        """
        self._name = name
        self._errors = boundary
        self._peers = peers
        self._check = check
        self._failed = failed
        self._changed = threading.Condition()
        self._oldest: Issued | None = None
        self._newest: Issued | None = None
        self._replays = False
        self._over = False
        self._thread: threading.Thread | None = None

    def follow(self, issued: Issued) -> None:
        """Watch an operation, which is launched next."""
        with self._changed:
            if self._oldest is None:
                self._oldest = issued
            else:
                self._newest = issued
            self._wake()

    def follow_replays(self) -> None:
        """Watch the group from now on, since captured graphs may be replayed."""
        with self._changed:
            self._replays = True
            self._wake()

    def close(self, timeout: float = 1.0) -> None:
        """End the thread; wait up to ``timeout`` s, except in the thread itself. Idempotent."""
        with self._changed:
            self._over = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _wake(self) -> None:
        if self._thread is None and not self._over:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()
            self._thread = thread
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(self._has_work)
                if self._over:
                    return
                issued = self._oldest
            try:
                done = self._look_at_replays() if issued is None else self._look_at(issued)
            except CoordinatorError as error:
                if self._mark_over():
                    self._failed(error)
                return
            if done:
                with self._changed:
                    self._oldest, self._newest = self._newest, None

    def _mark_over(self) -> bool:
        """Mark the watchdog as ended; return False if it was, for example by `close`."""
        with self._changed:
            before, self._over = self._over, True
        return not before

    def _has_work(self) -> bool:
        return self._over or self._replays or self._oldest is not None

    def _look_at(self, issued: Issued) -> bool:
        """Wait up to `_TICK` for an operation; return True if it is done."""
        self._check()
        tick = Deadline.after(issued.deadline.remaining(at_most=_TICK))
        try:
            self._errors.wait(
                lambda: self._over or issued.done(),
                tick,
                issued.operation,
                issued.peers,
                poll=_TICK / 10,
                spin=0,
            )
        except GroupTimeoutError as error:
            if not issued.deadline.expired:
                return False
            timeout = issued.deadline.timeout
            raise GroupTimeoutError(issued.operation, timeout, error.waiting_for) from error
        return True

    def _look_at_replays(self) -> bool:
        self._check()
        try:
            self._errors.wait(
                lambda: self._over or self._oldest is not None,
                Deadline.after(_REPLAY_TICK),
                f"{self._name} replay",
                self._peers,
                poll=_TICK,
                spin=0,
            )
        except GroupTimeoutError:
            return False
        return False
