"""Run operations in the background, so that they progress while their caller does other work.

A task is an operation that advances in steps that do not block. The tasks of a `SerialExecutor` run
one after the other; executors are independent. A thread that waits for a task advances its executor
itself. A background thread polls all executors as well, so that other ranks need not wait for this
rank's caller.

- The tasks of an executor end in the order of `SerialExecutor.submit`; a failed task ends all tasks
  behind it.
- A short task that need not wait ends within `SerialExecutor.submit`, on the caller's thread.
- Every wait ends at its deadline or at an abort, however long the task is.
- The background thread sleeps on the board's eventcount. It starts with the first task that waits.

Assumes: the board outlives the executors; one thread at a time calls `SerialExecutor.submit`.
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
        """Return its name, for error messages."""

    def advance(self, spin_ns: int) -> bool:
        """Advance, spinning up to ``spin_ns`` for peers; return whether the task is done.

        It returns after some milliseconds of work, even if it is still `ready`. Raises
        CoordinatorError if the operation failed.
        """

    def ready(self) -> bool:
        """Return whether `advance` would make progress. Never blocks."""

    def missing(self) -> Iterable[int]:
        """Return the member numbers that it waits for."""


class Ended(Protocol):
    """Called at once, on any thread, when a task ends. It does not block."""

    def __call__(self, error: CoordinatorError | None, /) -> object:
        """Handle the end; ``error`` is None if the task succeeded."""


class TaskHandle:
    """A task in the background, to be polled or waited for."""

    def __init__(self, executor: SerialExecutor, task: Task, ended: Ended | None) -> None:
        self._executor = executor
        self._ended = ended
        self.task = task
        self.done = False
        self.error: CoordinatorError | None = None

    def settle(self, error: CoordinatorError | None = None) -> None:
        """Mark the task as ended, with ``error`` or well."""
        self.error = error
        self.done = True
        if self._ended is not None:
            self._ended(error)

    def ready(self) -> bool:
        """Poll the executor; return whether the task has ended, well or not. Never blocks."""
        if not self.done:
            self._executor.poll()
        return self.done

    def wait(self, deadline: Deadline) -> None:
        """Wait until the task is done; raise its error.

        GroupTimeoutError: not done by ``deadline``; the task goes on.
        """
        if not self.ready():
            try:
                self._executor.board.wait(
                    self.ready, deadline, self.task.operation, self._executor.missing
                )
            except GroupAbortedError:
                # If this very task caused the abort, its own error has more details.
                if self.error is None:
                    raise
        if self.error is not None:
            raise self.error


class SerialExecutor:
    """A queue of tasks that run one after the other. Made by `ProgressEngine.executor`.

    ``handles`` are those of the tasks that have not ended.
    """

    def __init__(
        self, progress: ProgressEngine, failed: Callable[[CoordinatorError], None]
    ) -> None:
        self._progress = progress
        self._failed = failed
        self.handles: deque[TaskHandle] = deque()
        # Re-entrant: a signal handler may poll an operation of the thread that it interrupts.
        self.polling = threading.RLock()
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
        """Run ``task`` behind the executor's other tasks.

        Args:
            deadline: makes the deadline; called only if this thread has to wait for the task.
            background: return a handle rather than wait.
            ended: called at the end of the task, if a handle is returned.

        Returns:
            None if the task is done, else a handle. Without ``background`` a handle is returned
                only if earlier tasks, begun in the background, have not ended.
        """
        if not self.handles:
            if task.advance(0 if background else self._spin.window_ns):
                return None
            if not background:
                self.run_now(task, deadline())
                return None
        else:  # `fail` aborts the group before it removes the handles
            self.board.check(task.operation)
        return self.follow(task, ended)

    def follow(self, task: Task, ended: Ended | None) -> TaskHandle:
        """Run ``task`` in the background, behind the executor's other tasks."""
        handle = TaskHandle(self, task, ended)
        self.handles.append(handle)
        self._progress.schedule(self)
        return handle

    def run_now(self, task: Task, deadline: Deadline) -> None:
        """Run a task to its end on this thread; the executor must have no other task.

        Raises the task's CoordinatorError, or GroupTimeoutError with the missing members.
        """
        began = time.monotonic_ns()
        over = False  # else a task that is always ready would never see the deadline

        def ready() -> bool:
            return not over and task.ready()

        while True:
            self.board.wait(ready, deadline, task.operation, task.missing, spin=0)
            if task.advance(self._spin.window_ns):
                self._spin.observe(time.monotonic_ns() - began)
                return
            over = deadline.expired or self.board.aborted is not None

    def poll(self) -> None:
        """Advance the first task, then the next ones; wake this process if more work is ready.

        Waits for another thread that polls this executor, rather than return at once: the caller
        then sees all data which that thread received, and does not report a peer as lost that
        closed after its last send. A nested call, as by a signal handler, does nothing.

        Exceptions of a user's code or of a signal handler inside a task abort the group and are
        raised: the progress of the task is unknown.
        """
        failure: CoordinatorError | None = None
        ended = more = False
        with self.polling:
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
            # Nor after a failure: the failed task keeps its handle until `fail` has settled it.
            self._advancing = failure is not None
        if failure is not None:
            self.fail(failure)
        elif ended or more:
            self._progress.wake()

    def missing(self) -> list[int]:
        """Return the member numbers that the first task waits for."""
        with suppress(IndexError):
            return list(self.handles[0].task.missing())
        return []

    @property
    def operation(self) -> str:
        """Return the name of the first task; ``""`` if there is none."""
        with suppress(IndexError):
            return self.handles[0].task.operation
        return ""

    def after_fork_in_child(self) -> None:
        """Close all handles in a forked child: the tasks belong to its parent."""
        self.polling = threading.RLock()
        for handle in self.handles:
            handle.error = GroupClosedError(f"{handle.task.operation}: {IN_FORKED_CHILD}")
            handle.done = True
        self.handles.clear()

    def fail(self, error: CoordinatorError) -> None:
        """End all tasks of the executor with ``error``, unless another thread has set an error
        before.

        The tasks end after the group is aborted, so a thread that finds the executor free finds the
        abort.
        """
        with self.polling:
            for handle in self.handles:
                handle.error = handle.error or error
            self._advancing = True  # and nothing is advanced again
        if self.handles:  # outside the lock: the callback aborts the group, and may call `fail`
            self._failed(error)
        with self.polling:
            handles = tuple(self.handles)
            self.handles.clear()
            for handle in handles:
                handle.settle(handle.error)
        if handles:
            self._progress.wake()


class ProgressEngine:
    """The executors of one process on one board, and the background thread that polls them."""

    def __init__(self, board: Board, name: str = "progress") -> None:
        """Start no thread yet; this process must be a member of ``board``."""
        self.board = board
        self._name = name
        self._executors: dict[SerialExecutor, None] = {}
        self._wanted = threading.Event()
        # A signal handler may call `close` while its thread holds the lock.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._closed = False
        call_in_forked_children(self)

    def executor(self, failed: Callable[[CoordinatorError], None]) -> SerialExecutor:
        """Return a new executor; ``failed`` is called with the error that ends its tasks."""
        return SerialExecutor(self, failed)

    def schedule(self, executor: SerialExecutor) -> None:
        """Have the background thread poll ``executor`` until it has no tasks."""
        with self._lock:
            self._executors[executor] = None
            if self._thread is None and not self._closed:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                with suppress(RuntimeError):  # no thread is free: the waiting threads advance tasks
                    thread.start()
                    self._thread = thread
        self._wanted.set()
        self.wake()

    def wake(self) -> None:
        """Wake all threads of this process that wait on the board."""
        self.board.notify(self.board.member or 0)

    def after_fork_in_child(self) -> None:
        """Drop all tasks and the thread in a forked child."""
        self._lock = threading.RLock()
        self._closed, self._thread = True, None
        for executor in self._executors:
            executor.after_fork_in_child()
        self._executors.clear()

    def close(self) -> None:
        """End the background thread. Unfinished tasks then advance only while a thread waits for
        them.

        Joins the thread, except in a signal handler that interrupts `SerialExecutor.poll` or the
        start of the thread: the thread may wait for the interrupted code, and exits after it.
        """
        with self._lock:
            self._closed = True
            thread = self._thread
        self._wanted.set()
        self.wake()
        locks = (self._lock, *(each.polling for each in self._list()))
        awaited = any(lock._is_owned() for lock in locks)  # type: ignore[attr-defined]
        if thread is not None and thread is not threading.current_thread() and not awaited:
            thread.join()

    def _run(self) -> None:
        while not self._closed:
            self._wanted.wait()
            self._wanted.clear()
            try:
                # Not shown: the process's other threads show their own waits.
                self.board.wait(
                    self._settled, NEVER, self._name, self._missing, spin=0, shown=tuple
                )
            except PeerLostError as error:  # executors that do not wait for that peer go on
                for executor in self._list():
                    if self._misses(executor, error):
                        executor.fail(PeerLostError(executor.operation, error.peer))
                self._wanted.set()
            except GroupAbortedError as error:
                for executor in self._list():
                    executor.fail(GroupAbortedError(executor.operation, error.failure))
            except CoordinatorError as error:
                for executor in self._list():
                    executor.fail(error)
            except BaseException as error:  # noqa: BLE001 - the progress of the tasks is unknown
                self.board.abort(error)
                self._wanted.set()

    def _settled(self) -> bool:
        for executor in self._list():
            executor.poll()
            if not executor.handles:
                with self._lock:
                    if not executor.handles:
                        self._executors.pop(executor, None)
        return self._closed or not self._executors

    def _list(self) -> list[SerialExecutor]:
        with self._lock:
            return list(self._executors)

    def _missing(self) -> list[int]:
        return [member for executor in self._list() for member in executor.missing()]

    def _misses(self, executor: SerialExecutor, error: PeerLostError) -> bool:
        return error.rank in [self.board.ranks[member] for member in executor.missing()]
