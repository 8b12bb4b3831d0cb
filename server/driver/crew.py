"""Starts the workers of one pool, passes calls on to them, handles their failures, ends them."""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shm_broadcast import CoordinatorError, Deadline, GroupAbortedError, GroupTimeoutError

from ..calls.dispatcher import Dispatcher
from ..calls.ledger import Ledger, LedgerHooks
from ..control.channel import ChannelClosedError
from ..control.protocol import Failed, Resume, WorkProgress
from ..control.stacks import read_stacks
from ..errors import CallTimeoutError, PoolClosedError, WorkerLostError, WorkerStartError
from ..launchers.local import end, launch
from .links import Links
from .roll_call import RollCall
from .supervisor import Supervisor

if TYPE_CHECKING:
    from concurrent.futures import Future

    from shm_broadcast import MemberStatus

    from ..calls.pending_call import PendingCall
    from ..control.protocol import FromWorker
    from ..launchers.local import LocalWorker
    from .pool_plan import PoolPlan

_log = logging.getLogger(__name__)
_LEAVE_SECONDS = 0.5
"""How long workers have to leave by themselves if the pool breaks, or is stopped during a call."""


class Crew:
    """The started workers of a pool. Any thread may use it.

    Attributes:
        dispatcher: sends calls to the workers.
    """

    def __init__(self, plan: PoolPlan) -> None:
        """Start the workers and wait until all are ready.

        Raises:
            WorkerStartError: a worker failed, or was not ready in time.
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
            self._workers = launch(self._links.meeting.seats, deadline, fork=plan.config.fork)
            undo.callback(self._end_workers, 0.0)
            self._links.meeting.seated()
            self._supervisor = Supervisor(self._workers)
            undo.callback(self._supervisor.stop)
            for worker in self._workers:
                self._tell(worker, deadline)
            RollCall(self._workers, plan.on_progress, plan.config.stack_seconds).wait(
                self._supervisor, deadline
            )
            self._ledger = Ledger(
                plan.in_flight,
                plan.config.call_seconds,
                plan.config.settle_seconds,
                LedgerHooks(
                    self._resume, self._wake, self._supervisor.wake, self._broke, self._expire
                ),
                self._links.cancelled,
            )
            self.dispatcher = Dispatcher(
                self._ledger, self._links.board, self._links.calls, self._links.replies
            )
            self._supervisor.start(self, self._tick)
            undo.pop_all()

    def on_message(self, rank: int, message: FromWorker) -> None:
        """Handle a worker's message; called by the supervisor."""
        match message:
            case Failed():
                final = self._links.board.aborted is not None
                self._ledger.failed(rank, message, final)
            case WorkProgress(done, total, what):
                try:
                    self._plan.on_progress(rank, done, total, what)
                except Exception:  # noqa: BLE001 - the caller's own code
                    _log.exception("on_progress failed")

    def on_death(self, rank: int, how: str, stack: str) -> None:
        """Break the pool because a worker's process has ended; called by the supervisor."""
        # If the board was aborted before, this death may be a mere consequence. It is the cause if
        # another rank's report names this one.
        failure = self._links.board.aborted
        if failure is None or failure.culprit == rank != failure.rank:
            self._ledger.end(WorkerLostError(rank, self._workers[rank].pid, how, stack))
        elif self._reason_by == math.inf:
            # The worker that aborted the board reports why over its control channel. Give it time,
            # but not for ever: it may be the one that has just ended.
            self._reason_by = time.monotonic() + self._plan.config.settle_seconds

    @property
    def failure(self) -> CoordinatorError | None:
        """The error that broke the pool, or `PoolClosedError`; ``None`` while it takes calls."""
        return self._ledger.ended

    def status(self) -> list[MemberStatus]:
        """What every worker was last seen doing, by rank.

        Raises:
            PoolClosedError: the pool was shut down.
        """
        if self._stopped:
            raise PoolClosedError("status: the pool was shut down")
        return [self._status(worker.rank) for worker in self._workers]

    def _status(self, rank: int) -> MemberStatus:
        # On the board a worker without a call is busy with `dequeue`: show it as idle instead.
        status = self._links.board.member_status(rank)
        method = self._ledger.idle(rank)
        if method is None or status.state not in ("busy", "idle"):
            return status
        return replace(status, state="idle", operation=method)

    def call(self, call: PendingCall) -> Any:
        """Send a call and wait for its result.

        Raises:
            CallTimeoutError: the call is late; it goes on if it was sent.
            The call's error, or what broke the pool.
        """
        deadline = self._ledger.due(call)
        try:
            self.dispatcher.send(call, deadline)
            while True:
                try:
                    return self.dispatcher.wait(call, deadline)
                except GroupTimeoutError:
                    deadline = self._ledger.due(call)  # others may have been answered meanwhile
                    if call.done or deadline.expired:
                        raise
        except GroupTimeoutError:
            if call.done:
                return call.result()
            self._ledger.give_up(call)
            error = self.late(call, deadline.timeout)
            self._ledger.cancel(call)  # only now: it may leave the place that its stack shows
            raise error from None

    def submit(self, call: PendingCall) -> Future[Any]:
        """Queue a call and return the future of its result.

        Raises:
            What broke the pool.
        """
        call.future(partial(self.late, call), partial(self._ledger.cancel, call))
        return self.dispatcher.submit(call)

    def late(self, call: PendingCall, timeout: float | None) -> CallTimeoutError:
        """The error for a call that is late after ``timeout`` seconds: who has not answered, what
        these ranks are doing, and their stacks.
        """
        ranks = self._ledger.late(call)
        if not ranks:
            busy = "not sent: the workers are busy with calls before it"
            detail = "answered just afterwards" if call.number else busy
            return CallTimeoutError(call.method, timeout, detail=detail)
        with self._reading_stacks:  # two readers would clear each other's; `stop` closes the files
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
        """Whether `stop` joins ``thread``, which must therefore not call it."""
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

    def _expire(self, calls: list[PendingCall]) -> None:
        """Fail late calls, in a new thread: reading their workers' stacks takes a while, and the
        supervisor, whose thread this is called in, must not wait for it.
        """

        def expire() -> None:
            for call in calls:
                self._ledger.give_up(call)
                limit = self._plan.config.call_seconds if call.timeout is None else call.timeout
                self._ledger.expire(call, self.late(call, limit))
                self._ledger.cancel(call)

        threading.Thread(target=expire, name="pool-late-calls", daemon=True).start()

    def _broke(self, error: CoordinatorError) -> None:
        self._links.board.abort(error, getattr(error, "rank", None))
        # The abort lets the workers leave; those that have not by then are terminated by `_tick`.
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
