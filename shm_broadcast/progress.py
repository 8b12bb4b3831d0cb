"""Operations that go on while their caller does something else.

A task is an operation that can be pushed on without blocking. Tasks of one lane take place one
after the other; lanes do not wait for each other. Whoever waits for a task pushes its lane himself;
one thread pushes all lanes meanwhile, so that nobody else waits for a caller who is busy.

Guarantees
- Tasks of a lane end in the order they were performed; one that fails ends all behind it.
- A task without anything to wait for ends in `Lane.perform`, on the caller's thread.
- The thread sleeps on the board's doorbell, and is not there before the first task that waits.

Assumes: the board outlives the lanes; one thread at a time performs in a lane.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from shm_broadcast.deadline import NEVER
from shm_broadcast.doorbell import AdaptiveSpin
from shm_broadcast.errors import CoordinatorError, GroupAbortedError, PeerLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shm_broadcast.board import Board
    from shm_broadcast.deadline import Deadline


class Task(Protocol):
    """An operation in progress."""

    @property
    def operation(self) -> str:
        """What it is, for messages."""

    def advance(self, spin_ns: int) -> bool:
        """Go on as far as possible, and look ``spin_ns`` for more; whether it is done.

        Raises:
            CoordinatorError: it failed.
        """

    def ready(self) -> bool:
        """Whether `advance` would get further. Never blocks."""

    def missing(self) -> Iterable[int]:
        """The board's members that it waits for."""


class Ticket:
    """A task that its performer does not wait for."""

    def __init__(self, lane: Lane, task: Task) -> None:
        self._lane = lane
        self.task = task
        self.done = False
        self.error: CoordinatorError | None = None

    def ready(self) -> bool:
        """Whether `wait` would return or raise at once. Never blocks; pushes the lane."""
        if not self.done:
            self._lane.push()
        return self.done

    def wait(self, deadline: Deadline) -> None:
        """Return once the task is done.

        Raises:
            GroupTimeoutError: not done by ``deadline``; it is still under way.
            CoordinatorError: it failed.
        """
        if not self.ready():
            try:
                self._lane.board.wait(self.ready, deadline, self.task.operation, self._lane.missing)
            except GroupAbortedError:
                # The abort may be about this very task: then its own error says more.
                if self.error is None:
                    raise
        if self.error is not None:
            raise self.error


class Lane:
    """Tasks that take place one after the other. Made by `Progress.lane`."""

    def __init__(self, progress: Progress, failed: Callable[[CoordinatorError], None]) -> None:
        self._progress = progress
        self._failed = failed
        self._tickets: deque[Ticket] = deque()
        self._pushing = threading.Lock()
        self._spin = AdaptiveSpin()
        self.board = progress.board

    @property
    def busy(self) -> bool:
        """Whether a task is under way."""
        return bool(self._tickets)

    def perform(
        self, task: Task, deadline: Callable[[], Deadline], background: bool
    ) -> Ticket | None:
        """Begin ``task``, behind those under way.

        Args:
            task: what to do.
            deadline: until when to wait for it, if there is anything to wait for.
            background: do not wait.

        Returns:
            None if it is done, else a ticket. Unless ``background``, there is one only if other
            tasks are before it.
        """
        if not self._tickets:
            if task.advance(0 if background else self._spin.window_ns):
                return None
            if not background:
                self.finish(task, deadline())
                return None
        ticket = Ticket(self, task)
        self._tickets.append(ticket)
        self._progress.look_after(self)
        return ticket

    def finish(self, task: Task, deadline: Deadline) -> None:
        """Wait for a task that was begun here and is the only one.

        Raises:
            GroupTimeoutError: not done by ``deadline``; names the members that are missing.
            CoordinatorError: it failed.
        """
        began = time.monotonic_ns()
        while True:
            self.board.wait(task.ready, deadline, task.operation, task.missing, spin=0)
            if task.advance(self._spin.window_ns):
                self._spin.observe(time.monotonic_ns() - began)
                return

    def push(self) -> None:
        """Go on as far as possible; after another thread that does so.

        What that one has just received is then seen as received here, too: a peer that has left
        meanwhile is not taken for lost.
        """
        failure: CoordinatorError | None = None
        ended = False
        with self._pushing:
            try:
                while self._tickets and self._tickets[0].task.advance(0):
                    self._tickets.popleft().done = ended = True
            except CoordinatorError as error:
                failure = error
        if failure is not None:
            self.fail(failure)
        elif ended:
            self._progress.wake()

    def missing(self) -> list[int]:
        """The members that the first task waits for."""
        with suppress(IndexError):
            return list(self._tickets[0].task.missing())
        return []

    def fail(self, error: CoordinatorError) -> None:
        """End every task with ``error``."""
        with self._pushing:
            tickets = tuple(self._tickets)
            self._tickets.clear()
            for ticket in tickets:
                ticket.error = error
                ticket.done = True
        if tickets:
            self._failed(error)
            self._progress.wake()


class Progress:
    """The lanes of one process on one board, and the thread that looks after them."""

    def __init__(self, board: Board, name: str = "progress") -> None:
        """Start no thread yet.

        Args:
            board: this process is a member of it.
            name: what the thread is called.
        """
        self.board = board
        self._name = name
        self._lanes: dict[Lane, None] = {}
        self._wanted = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def lane(self, failed: Callable[[CoordinatorError], None]) -> Lane:
        """A new lane; ``failed`` is told why, when its tasks are ended by an error."""
        return Lane(self, failed)

    def look_after(self, lane: Lane) -> None:
        """Push ``lane`` until it has no tasks."""
        with self._lock:
            self._lanes[lane] = None
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
        self._wanted.set()
        self.wake()

    def wake(self) -> None:
        """Have every waiting thread of this process look again."""
        self.board.ring(self.board.member or 0)

    def close(self) -> None:
        """End the thread. Tasks under way go on only while they are waited for."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._wanted.set()
        self.wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while not self._closed:
            self._wanted.wait()
            self._wanted.clear()
            try:
                self.board.wait(self._settled, NEVER, self._name, self._missing, spin=0)
            except PeerLostError as error:
                self._fail([lane for lane in self._list() if self._misses(lane, error)], error)
                self._wanted.set()
            except CoordinatorError as error:
                self._fail(self._list(), error)

    def _settled(self) -> bool:
        for lane in self._list():
            lane.push()
            if not lane.busy:
                with self._lock:
                    if not lane.busy:
                        self._lanes.pop(lane, None)
        return self._closed or not self._lanes

    def _list(self) -> list[Lane]:
        with self._lock:
            return list(self._lanes)

    def _missing(self) -> list[int]:
        return [member for lane in self._list() for member in lane.missing()]

    def _misses(self, lane: Lane, error: PeerLostError) -> bool:
        return error.rank in [self.board.ranks[member] for member in lane.missing()]

    def _fail(self, lanes: list[Lane], error: CoordinatorError) -> None:
        for lane in lanes:
            lane.fail(error)
