"""The running workers of one pool, from start to end, and what becomes of their failures."""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from server.channel import ChannelClosedError
from server.dispatcher import Dispatcher
from server.errors import CallTimeoutError, PoolClosedError, WorkerLostError, WorkerStartError
from server.launchers.local import end, launch
from server.ledger import Ledger, LedgerHooks
from server.links import Links
from server.messages import Failed, Progress, Resume
from server.roll_call import RollCall
from server.stacks import read_stacks
from server.supervisor import Supervisor
from shm_broadcast import CoordinatorError, Deadline, GroupAbortedError, GroupTimeoutError

if TYPE_CHECKING:
    from server.calls import PendingCall
    from server.launchers.local import LocalWorker
    from server.messages import FromWorker
    from server.plan import Plan
    from shm_broadcast import MemberStatus

_log = logging.getLogger(__name__)
_LEAVE_SECONDS = 0.5
"""How long workers have to leave a pool by themselves that has broken or is stopped in a call."""


class Crew:
    """Started workers. One thread makes it, any may use it, and `stop` it.

    Attributes:
        dispatcher: sends them calls.
    """

    def __init__(self, plan: Plan) -> None:
        """Start the workers and wait until all are ready.

        Raises:
            WorkerStartError: one did not come up.
            SharedMemoryError: too little memory is free.
            OSError: a process cannot be started.
        """
        self._plan = plan
        self._stopping = threading.Lock()
        self._stopped = False
        self._reading_stacks = threading.Lock()
        self._reason_by = math.inf
        self._end_at = math.inf
        deadline = Deadline.after(plan.start_timeout)
        with ExitStack() as undo:
            self._links = Links(plan)
            undo.callback(self._links.close)
            self._workers = launch(plan.n_workers)
            undo.callback(self._end_workers, 0.0)
            self._supervisor = Supervisor(self._workers)
            undo.callback(self._supervisor.stop)
            for worker in self._workers:
                self._tell(worker, deadline)
            RollCall(self._workers, plan.on_progress, plan.config.stack_seconds).wait(
                self._supervisor, deadline
            )
            self._ledger = Ledger(
                plan.in_flight,
                plan.config.settle_seconds,
                LedgerHooks(self._resume, self._wake, self._supervisor.wake, self._broke),
            )
            self.dispatcher = Dispatcher(
                self._ledger, self._links.board, self._links.calls, self._links.replies
            )
            self._supervisor.start(self, self._tick)
            undo.pop_all()

    def on_message(self, rank: int, message: FromWorker) -> None:
        """Take in what a worker says."""
        match message:
            case Failed():
                final = self._links.board.aborted is not None
                self._ledger.failed(rank, message, final)
            case Progress(done, total, what):
                try:
                    self._plan.on_progress(rank, done, total, what)
                except Exception:  # noqa: BLE001 - the caller's own code
                    _log.exception("on_progress failed")

    def on_death(self, rank: int, how: str, stack: str) -> None:
        """A worker has ended: the pool has broken."""
        failure = self._links.board.aborted
        if failure is None or failure.culprit == rank != failure.rank:
            self._ledger.end(WorkerLostError(rank, self._workers[rank].pid, how, stack))
        elif self._reason_by == math.inf:
            # A worker aborted the others; it will tell why, unless this was that worker.
            self._reason_by = time.monotonic() + self._plan.config.settle_seconds

    @property
    def failure(self) -> CoordinatorError | None:
        """What broke the pool, or that it was shut down; ``None`` while it takes calls."""
        return self._ledger.ended

    def status(self) -> list[MemberStatus]:
        """What every worker was last seen doing.

        Raises:
            PoolClosedError: the pool was shut down.
        """
        if self._stopped:
            raise PoolClosedError("status: the pool was shut down")
        return [self._links.board.member_status(worker.rank) for worker in self._workers]

    def late(self, call: PendingCall, timeout: float | None) -> CallTimeoutError:
        """Whom ``call`` still waits for after its time, and what those were doing.

        A call that was still queued is taken back.
        """
        ranks = self._ledger.give_up(call)
        if not ranks:
            detail = "never sent: the workers were busy with calls before it"
            return CallTimeoutError(call.method, timeout, detail=detail)
        with self._reading_stacks:
            if self._stopped:
                return CallTimeoutError(call.method, timeout, detail="the pool was shut down")
            stacks = read_stacks(
                {rank: self._workers[rank].stack_file for rank in ranks},
                lambda rank: self._workers[rank].ask_stack(),
                Deadline.after(self._plan.config.stack_seconds),
            )
            waiting_for = tuple(self._links.board.member_status(rank) for rank in ranks)
        return CallTimeoutError(call.method, timeout, waiting_for, stacks=stacks)

    def stop(self, timeout: float, finish: bool) -> None:
        """End everything; idempotent, bounded, from any thread but the pool's own.

        Args:
            timeout: seconds for calls to finish and workers to leave; then they are terminated,
                and killed after ``kill_seconds`` more.
            finish: let calls that were accepted finish, for half of the time.
        """
        if self.is_own(threading.current_thread()):
            raise RuntimeError("a pool cannot be shut down by a callback of its own")
        with self._stopping:
            if self._stopped:
                return
            deadline = Deadline.after(timeout)
            idle = self._ledger.wait_until_idle(timeout / 2 if finish else 0.0)
            self._ledger.end(PoolClosedError("the pool was shut down"))
            self._supervisor.stop()
            if not idle:
                self._links.board.abort("the pool was shut down during a call")
                deadline = Deadline.after(deadline.remaining(at_most=_LEAVE_SECONDS))
            self._links.calls.shutdown()
            self.dispatcher.join()
            with self._reading_stacks:
                self._end_workers(deadline.remaining())
                self._links.close()
                self._stopped = True

    def is_own(self, thread: threading.Thread) -> bool:
        """Whether ``thread`` is one that `stop` waits for."""
        return thread in (self._supervisor.thread, *self.dispatcher.threads)

    def _tell(self, worker: LocalWorker, deadline: Deadline) -> None:
        try:
            worker.start(self._links.start_of(worker.rank), deadline)
        except GroupTimeoutError as error:
            raise WorkerStartError(worker.rank, f"it took nothing in: {error}") from error

    def _resume(self, rank: int, number: int) -> None:
        try:
            self._workers[rank].channel.send(Resume(number))
        except ChannelClosedError:
            return  # Its death is the supervisor's to report.

    def _wake(self) -> None:
        self._links.board.ring(self._links.driver)

    def _broke(self, error: CoordinatorError) -> None:
        self._links.board.abort(error, getattr(error, "rank", None))
        self._end_at = time.monotonic() + _LEAVE_SECONDS
        self._supervisor.wake()

    def _tick(self) -> float:
        now = time.monotonic()
        failure = self._links.board.aborted
        if self._reason_by <= now and failure is not None:
            self._reason_by = math.inf
            self._ledger.end(GroupAbortedError("pool", failure))
        if self._end_at <= now:
            self._end_at = math.inf
            end(self._workers, 0.0, self._plan.config.kill_seconds)
        return min(self._ledger.tick(), max(min(self._end_at, self._reason_by) - now, 0.0))

    def _end_workers(self, seconds: float) -> None:
        end(self._workers, seconds, self._plan.config.kill_seconds)
        for worker in self._workers:
            worker.close()
