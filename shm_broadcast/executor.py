"""Runs operations in the background: they progress while their caller does something else.

A task is an operation that advances in steps that do not block. The tasks of a lane run one after
the other; lanes are independent. A thread that waits for a task advances ("pushes") its lane
itself. A background thread pushes all lanes as well, so that other ranks need not wait until this
rank's caller comes back.

Guarantees
- The tasks of a lane end in the order of `Lane.submit`; one that fails ends all tasks behind it.
- A task of little work that need not wait ends within `Lane.submit`, on the caller's thread.
- However much work a task is, its waits end at their deadline or an abort.
- The background thread sleeps on the board's doorbell. It starts with the first task that waits.

Assumes: the board outlives the lanes; one thread at a time calls `Lane.submit` of a lane.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from shm_broadcast.deadline import NEVER, Deadline
from shm_broadcast.errors import (
    CoordinatorError,
    GroupAbortedError,
    GroupClosedError,
    PeerLostError,
)
from shm_broadcast.eventcount import AdaptiveSpin
from shm_broadcast.process import IN_FORKED_CHILD, call_in_forked_children
from shm_broadcast.state.board import Board


class Task(Protocol):
    """An operation that advances without blocking."""

    @property
    def operation(self) -> str:
        """Its name, for error messages."""

    def advance(self, spin_ns: int) -> bool:
        """Go on, spinning up to ``spin_ns`` for peers; whether it is done.

        It returns after some milliseconds of work, even if it is `ready` to go on.

        Raises:
            CoordinatorError: the operation failed.
        """

    def ready(self) -> bool:
        """Whether `advance` would get further. Never blocks."""

    def missing(self) -> Iterable[int]:
        """The member numbers that it waits for."""


class Ended(Protocol):
    """Is told, at once and on any thread, that a task has ended. It does not block."""

    def __call__(self, error: CoordinatorError | None, /) -> object:
        """``error`` is None if the task has ended well."""


class TaskHandle:
    """Stands for a task that was begun in the background: ask it, or wait for it."""

    def __init__(self, lane: SerialExecutor, task: Task, ended: Ended | None) -> None:
        self._lane = lane
        self._ended = ended
        self.task = task
        self.done = False
        self.error: CoordinatorError | None = None

    def settle(self, error: CoordinatorError | None = None) -> None:
        """Note that the task has ended, with ``error`` or well."""
        self.error = error
        self.done = True
        if self._ended is not None:
            self._ended(error)

    def ready(self) -> bool:
        """Whether the task has ended, well or not. Never blocks; pushes the lane first."""
        if not self.done:
            self._lane.poll()
        return self.done

    def wait(self, deadline: Deadline) -> None:
        """Wait until the task is done.

        Raises:
            GroupTimeoutError: not done by ``deadline``; the task goes on.
            CoordinatorError: the task failed.
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


class SerialExecutor:
    """A queue of tasks that run one after the other. Made by `Progress.executor`.

    Attributes:
        handles: of its tasks that have not ended.
        board: says what the members do.
    """

    def __init__(
        self, progress: ProgressEngine, failed: Callable[[CoordinatorError], None]
    ) -> None:
        self._progress = progress
        self._failed = failed
        self.handles: deque[TaskHandle] = deque()
        # Re-entrant: a signal handler may look at an operation of the thread that it interrupts.
        self._polling = threading.RLock()
        self._advancing = False
        self._spin = AdaptiveSpin()
        self.board = progress.board

    def submit(
        self,
        task: Task,
        deadline: Callable[[], Deadline],
        background: bool,
        ended: Ended | None = None,
    ) -> TaskHandle | None:
        """Run ``task`` behind the lane's other tasks.

        Args:
            task: what to run.
            deadline: makes the deadline; called only if the task has to be waited for here.
            background: return a ticket rather than wait.
            ended: told of the end of the task, if a ticket is returned.

        Returns:
            None if the task is done, else a ticket. Without ``background`` that is so only if
            other tasks are before it: they were begun in the background.
        """
        if not self.handles:
            if task.advance(0 if background else self._spin.window_ns):
                return None
            if not background:
                self.run_now(task, deadline())
                return None
        else:  # those of a lane that fails may be there still, when the group has been told
            self.board.check(task.operation)
        ticket = TaskHandle(self, task, ended)
        self.handles.append(ticket)
        self._progress.schedule(self)
        return ticket

    def run_now(self, task: Task, deadline: Deadline) -> None:
        """Run a task to its end on this thread; the lane must have no other task.

        Raises:
            GroupTimeoutError: not done by ``deadline``; names the members that are missing.
            CoordinatorError: the task failed.
        """
        began = time.monotonic_ns()
        over = False  # one that is ready all the time would never see the end of its wait

        def ready() -> bool:
            return not over and task.ready()

        while True:
            self.board.wait(ready, deadline, task.operation, task.missing, spin=0)
            if task.advance(self._spin.window_ns):
                self._spin.observe(time.monotonic_ns() - began)
                return
            over = deadline.expired or self.board.aborted is not None

    def poll(self) -> None:
        """Advance the first task, then the next ones. One with more work has this process woken.

        Waits for another thread that is pushing this lane, rather than return at once: the caller
        then sees what that thread has received, and does not take a peer for lost that has left
        after it sent everything. Called while this very thread pushes, as by a signal handler, it
        does nothing.

        Raises:
            What code of a task's user, or a signal handler, has raised in the middle of a task. The
            group is aborted: nobody knows how far the task has come.
        """
        failure: CoordinatorError | None = None
        ended = more = False
        with self._polling:
            if self._advancing:
                return
            self._advancing = True
            try:
                while self.handles and self.handles[0].task.advance(0):
                    self.handles.popleft().settle()
                    ended = True
                more = bool(self.handles) and self.handles[0].task.ready()
            except CoordinatorError as error:
                failure = error
            except BaseException as error:
                self.board.abort(error)
                raise  # and nothing is advanced again
            # Nor after a failure: the task that failed has tickets until `fail` has ended them.
            self._advancing = failure is not None
        if failure is not None:
            self.fail(failure)
        elif ended or more:
            self._progress.wake()

    @property
    def polled_here(self) -> bool:
        """Whether this thread is in the middle of a push."""
        return _is_held(self._polling)

    def missing(self) -> list[int]:
        """The member numbers that the first task waits for."""
        with suppress(IndexError):
            return list(self.handles[0].task.missing())
        return []

    @property
    def operation(self) -> str:
        """What the first task is called; ``""`` if there is none."""
        with suppress(IndexError):
            return self.handles[0].task.operation
        return ""

    def after_fork_in_child(self) -> None:
        """In a forked child: the tasks are its parent's, and are not waited for here."""
        self._polling = threading.RLock()
        for ticket in self.handles:
            ticket.error = GroupClosedError(f"{ticket.task.operation}: {IN_FORKED_CHILD}")
            ticket.done = True
        self.handles.clear()

    def fail(self, error: CoordinatorError) -> None:
        """End all tasks of the lane with ``error``, unless another thread has come with one before.

        They have ended once the group is told: whoever finds the lane free finds the group aborted.
        """
        with self._polling:
            for ticket in self.handles:
                ticket.error = ticket.error or error
            self._advancing = True  # and nothing is advanced again
        if self.handles:  # outside the lock: the callback aborts the group, and may come back here
            self._failed(error)
        with self._polling:
            tickets = tuple(self.handles)
            self.handles.clear()
            for ticket in tickets:
                ticket.settle(ticket.error)
        if tickets:
            self._progress.wake()


class ProgressEngine:
    """The lanes of one process on one board, and the background thread that pushes them."""

    def __init__(self, board: Board, name: str = "progress") -> None:
        """Start no thread yet.

        Args:
            board: a board of which this process is a member.
            name: the thread's name.
        """
        self.board = board
        self._name = name
        self._executors: dict[SerialExecutor, None] = {}
        self._wanted = threading.Event()
        # A signal handler may close this while its thread has the lock.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._closed = False
        call_in_forked_children(self)

    def executor(self, failed: Callable[[CoordinatorError], None]) -> SerialExecutor:
        """A new lane; ``failed`` is called with the error when one ends the lane's tasks."""
        return SerialExecutor(self, failed)

    def schedule(self, lane: SerialExecutor) -> None:
        """Have the background thread push ``lane`` until it has no tasks."""
        with self._lock:
            self._executors[lane] = None
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                with suppress(RuntimeError):  # none is to be had: tasks advance at who waits
                    thread.start()
                    self._thread = thread
        self._wanted.set()
        self.wake()

    def wake(self) -> None:
        """Wake all threads of this process that wait on the board, to look again."""
        self.board.notify(self.board.member or 0)

    def after_fork_in_child(self) -> None:
        """In a forked child: the thread is its parent's, and so is all that is under way."""
        self._lock = threading.RLock()
        self._closed, self._thread = True, None
        for lane in self._executors:
            lane.after_fork_in_child()
        self._executors.clear()

    def close(self) -> None:
        """End the background thread. Unfinished tasks then advance only when somebody waits.

        It is waited for, unless a signal handler calls in the middle of a push, or while the thread
        is started: it may wait for that, and ends behind it.
        """
        with self._lock:
            self._closed = True
            thread = self._thread
        self._wanted.set()
        self.wake()
        awaited = _is_held(self._lock) or any(lane.polled_here for lane in self._list())
        if thread is not None and thread is not threading.current_thread() and not awaited:
            thread.join()

    def _run(self) -> None:
        while not self._closed:
            self._wanted.wait()
            self._wanted.clear()
            try:
                # Not shown: the process's own threads do something else meanwhile.
                self.board.wait(
                    self._settled, NEVER, self._name, self._missing, spin=0, shown=tuple
                )
            except PeerLostError as error:  # the lanes that do not wait for that peer go on
                for lane in self._list():
                    if self._misses(lane, error):
                        lane.fail(PeerLostError(lane.operation, error.peer))
                self._wanted.set()
            except GroupAbortedError as error:
                for lane in self._list():
                    lane.fail(GroupAbortedError(lane.operation, error.failure))
            except CoordinatorError as error:
                for lane in self._list():
                    lane.fail(error)
            except BaseException as error:  # noqa: BLE001 - nobody knows how far the tasks have come
                self.board.abort(error)
                self._wanted.set()

    def _settled(self) -> bool:
        for lane in self._list():
            lane.poll()
            if not lane.handles:
                with self._lock:
                    if not lane.handles:
                        self._executors.pop(lane, None)
        return self._closed or not self._executors

    def _list(self) -> list[SerialExecutor]:
        with self._lock:
            return list(self._executors)

    def _missing(self) -> list[int]:
        return [member for lane in self._list() for member in lane.missing()]

    def _misses(self, lane: SerialExecutor, error: PeerLostError) -> bool:
        return error.rank in [self.board.ranks[member] for member in lane.missing()]


def _is_held(lock: threading.RLock) -> bool:
    """Whether this thread has the lock."""
    return lock._is_owned()  # type: ignore[attr-defined,no-any-return]
