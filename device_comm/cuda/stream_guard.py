"""Watching over work that was put on a stream: the host went on, and would never know.

One thread for each communicator looks at what the device has not done yet. At the deadline of
an operation, when one of its peers is lost, or when the group is aborted, it tells the
communicator, which ends the work on the device; whoever synchronises with that goes on then,
and the communicator's next call raises.

Of the operations under way it knows the oldest and the newest, which costs each operation one
event. What a graph replays is not seen at all; once something was captured the thread looks at
the group for as long as the communicator lives.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import CoordinatorError, GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from device_comm.cuda.streams import Mark
    from device_comm.torch_pending import Boundary

_TICK = 0.02
"""Seconds between two looks at work under way."""

_REPLAY_TICK = 0.1
"""Seconds between two looks at the group, for graphs that may be replayed."""


@dataclass(frozen=True, slots=True)
class Issued:
    """One operation on a stream.

    Attributes:
        mark: behind it.
        operation: for errors.
        deadline: when it has to be done.
        peers: the board's members that it needs.
    """

    mark: Mark
    operation: str
    deadline: Deadline
    peers: Sequence[int]


class StreamGuard:
    """Watches over the operations of one communicator. Any thread may call."""

    def __init__(
        self,
        name: str,
        boundary: Boundary,
        peers: Sequence[int],
        failed: Callable[[CoordinatorError], None],
    ) -> None:
        """Start no thread yet.

        Args:
            name: what the thread is called, and the replays in errors.
            boundary: looks at the group.
            peers: the members that a replayed graph needs.
            failed: told, in the thread, what ended the work; the guard then ends, too.
        """
        self._name = name
        self._boundary = boundary
        self._peers = peers
        self._failed = failed
        self._changed = threading.Condition()
        self._oldest: Issued | None = None
        self._newest: Issued | None = None
        self._replays = False
        self._over = False
        self._thread: threading.Thread | None = None

    def follow(self, issued: Issued) -> None:
        """Watch over one more operation; operations come in the order of their stream."""
        with self._changed:
            if self._oldest is None:
                self._oldest = issued
            else:
                self._newest = issued
            self._wake()

    def follow_replays(self) -> None:
        """Watch over the graphs that an operation was captured in, from now on."""
        with self._changed:
            self._replays = True
            self._wake()

    def close(self, timeout: float = 1.0) -> None:
        """End the thread, and wait for that unless this is it. Idempotent."""
        with self._changed:
            self._over = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _wake(self) -> None:
        if self._thread is None and not self._over:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
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
                if self._end():
                    self._failed(error)
                return
            if done:
                with self._changed:
                    self._oldest, self._newest = self._newest, None

    def _end(self) -> bool:
        """Be over; whether it was not before."""
        with self._changed:
            before, self._over = self._over, True
        return not before

    def _has_work(self) -> bool:
        return self._over or self._replays or self._oldest is not None

    def _look_at(self, issued: Issued) -> bool:
        """Wait a little for one operation; whether it is done."""
        tick = Deadline.after(issued.deadline.remaining(at_most=_TICK))
        try:
            self._boundary.wait(
                lambda: self._over or issued.mark.passed(),
                tick,
                issued.operation,
                issued.peers,
                poll=_TICK / 10,
                spin=0,
            )
        except GroupTimeoutError as error:
            if not issued.deadline.expired:
                return False
            late = issued.deadline.timeout
            raise GroupTimeoutError(issued.operation, late, error.waiting_for) from error
        return True

    def _look_at_replays(self) -> bool:
        try:
            self._boundary.wait(
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
