"""Drive the workers of one pool: send calls, handle failures, restart, shut down.

A pool that is restarted has one *generation* of workers after another. When a generation breaks,
its workers close its groups and queues; workers that cannot are killed and replaced; then all join
the groups and queues of the next generation.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from coordinator.daemon_threads import run_in_thread, submit_in_thread
from shm_broadcast import (
    NEVER,
    CoordinatorError,
    Deadline,
    Failure,
    GroupAbortedError,
    GroupTimeoutError,
    MemberStatus,
)
from shm_broadcast.state.flight_recorder import VerbTotal

from ..calls.dispatcher import Dispatcher
from ..calls.ledger import CallTracker, CallTrackerCallbacks, in_main_thread
from ..calls.pending_call import PendingCall, fatal_divergence
from ..control.channel import ChannelClosedError
from ..control.protocol import Failed, FromWorker, Resume, WorkProgress
from ..errors import (
    CallDivergedError,
    CallStuckError,
    CallTimeoutError,
    HostError,
    PoolClosedError,
    RestartLimitError,
    WorkerLostError,
    again,
    located,
    with_notes,
)
from ..inspection.diagnosis import Diagnosis
from ..launchers.local import end
from .limits import translated_limit_errors
from .links import SharedResources
from .supervisor import REASON_SECONDS, WorkerEvents
from .worker_processes import WorkerProcesses

if TYPE_CHECKING:
    from .pool_plan import PoolPlan


_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0


class RestartBudget:
    """Limits the restarts of one pool: ``most`` within ``window`` seconds."""

    def __init__(self, most: int, window: float) -> None:
        self._most = most
        self._window = window
        self._restarted_at: list[float] = []
        self._failed_restarts = 0

    def take(self, now: float, worked: bool) -> float | None:
        """Count a restart at ``now``; return the seconds to wait before it.

        0, but after consecutive failed restarts 0.1, doubled each time, at most 5. ``worked``: the
        workers have answered a call since the last restart. ``None``: no restart is left, because
        ``most`` were made within the window, or failed consecutively, at any pace.
        """
        self._restarted_at = [at for at in self._restarted_at if at > now - self._window]
        self._failed_restarts = 0 if worked else self._failed_restarts + 1
        if max(len(self._restarted_at), self._failed_restarts - 1) >= self._most:
            return None
        self._restarted_at.append(now)
        if self._failed_restarts <= 1:
            return 0.0
        return min(
            _FIRST_PAUSE_SECONDS * 2.0 ** (self._failed_restarts - 2), _LONGEST_PAUSE_SECONDS
        )


if TYPE_CHECKING:
    Seen: TypeAlias = "tuple[tuple[MemberStatus, ...], str, Mapping[int, str], tuple[int, ...]]"

_SeenT = TypeVar("_SeenT")
_log = logging.getLogger(__name__)
_THREAD_SECONDS = 10.0
"""Time that a pool waits at its end for its threads, in which users' callbacks run."""
_LEAVE_SECONDS = 0.5
"""Time for workers to exit if the pool breaks, or is shut down during a call."""


class PoolDriver(WorkerEvents):
    """The workers of a pool, in successive generations. Any thread may use it.

    Attributes:
        dispatcher: sends calls to the workers of the latest generation; ``None`` after `stop`.
    """

    def __init__(self, plan: PoolPlan) -> None:
        """Start the workers and wait until all are ready; raise as `pool.WorkerPool`."""
        self._n_started = 0
        self._plan = plan
        self._name = plan.config.name or "the pool"
        # A signal handler may stop the pool in the middle of any of its calls, `stop` included.
        self._stopping = threading.RLock()
        self._budget = RestartBudget(plan.max_restarts, plan.window)
        # Both are None after `stop`. A call in progress holds its own references, and the last
        # one frees their memory.
        self._shared: SharedResources | None = None
        self.dispatcher: Dispatcher | None = None
        self._close_resources = ExitStack()
        self._broken: CoordinatorError | None = None
        self._aborted_at = math.inf
        self._reason_seconds = max(plan.config.settle_seconds, REASON_SECONDS)
        self._end_at = math.inf
        self.tracker = CallTracker(
            plan.in_flight,
            plan.config.call_seconds,
            plan.config.settle_seconds,
            CallTrackerCallbacks(
                self._resume, self._wake, self._clock, self._broke, self._expire, self._expose
            ),
            name=plan.config.name,
            stuck_seconds=plan.stuck_after,
            restartable=plan.restart != "never",
        )
        self.tracker.reason_due = self._reason_due
        with self._translated_limit_errors(), ExitStack() as undo:
            undo.callback(self._close_resources.close)
            self._processes = WorkerProcesses(plan)
            undo.callback(self._processes.close, 0.0)
            undo.callback(self._abandon_start)
            try:
                self._begin(lambda: math.inf)
            except CoordinatorError as error:
                located(error, plan.config.name)
                raise
            self._processes.supervisor.start(self, self._tick, self._supervisor_failed)
            undo.pop_all()

    def _abandon_start(self) -> None:
        if self.tracker.state.generation:
            self.tracker.end(PoolClosedError("the pool has not started"))
        if self.dispatcher is not None:
            self.dispatcher.release()

    def on_message(self, rank: int, message: FromWorker) -> None:
        """Handle a worker's message; called by the supervisor."""
        match message:
            case Failed():
                final = self._aborted is not None
                self.tracker.failed(rank, message, final)
                if final and message.consequence:
                    self._await_reason()
            case WorkProgress(done, total, what):
                try:
                    self._plan.on_progress(rank, done, total, what)
                except Exception:  # noqa: BLE001 - the caller's own code
                    _log.exception("on_progress failed")

    def on_death(self, rank: int, how: str, stack: str) -> None:
        """Break the pool because a worker's process has ended; called by the supervisor."""
        # After an abort, this death may be a secondary failure. It is the root cause if another
        # rank's report names this rank.
        failure = self._aborted
        if failure is None or failure.culprit == rank != failure.rank:
            pid = self._processes.workers[rank].pid
            fields = {"rank": rank, "generation": self.tracker.state.generation}
            text = "rank %d (pid %d) of %s was lost: %s"
            _log.info(text, rank, pid, self._name, how, extra=fields)
            lost = WorkerLostError(rank, pid, how, stack)
            self.tracker.break_off(self._divergence(lost) or lost)
        else:
            self._await_reason()

    def _divergence(self, lost: WorkerLostError) -> CallDivergedError | None:
        """Return the error if a process ended in another collective than the other ranks'."""
        links, call = self._shared, self.tracker.oldest_of(lost.rank)
        if links is None or call is None:
            return None
        board = links.board
        fingerprints = {
            rank: board.fingerprints.of_member(rank) for rank in range(self._plan.n_workers)
        }
        operation = board.member_status(lost.rank).operation
        # On a device the numbers of operations are not unique.
        past = board.recorded if self._plan.devices[lost.rank] == "cpu" else lambda _: ()
        divergence = fatal_divergence(lost.rank, operation, fingerprints, past)
        if divergence is None:
            return None
        error = CallDivergedError(call.number, call.method, *divergence)
        error.__cause__ = lost
        return error

    def _await_reason(self) -> None:
        """Start the grace period in which the aborting worker may still report its exception."""
        self._aborted_at = min(self._aborted_at, time.monotonic())

    def _reason_due(self) -> bool:
        """Return whether the grace period runs; the first call starts it. Any thread may call."""
        self._await_reason()
        in_time = time.monotonic() < self._aborted_at + self._reason_seconds
        return in_time and self._processes.may_say_why(self._aborted)

    def _supervisor_failed(self, error: BaseException) -> None:
        # Without a supervisor, no thread detects that a worker ends or hangs.
        self.tracker.end(CoordinatorError(f"the pool's supervisor has failed: {error!r}"))
        end(list(self._processes.workers.values()), _LEAVE_SECONDS, self._plan.config.kill_seconds)

    def status(self) -> list[MemberStatus]:
        """Return every worker's state, by rank, or raise `PoolClosedError`."""
        links = self._shared
        if links is None:
            raise PoolClosedError("status: the pool was shut down")
        return [self._status(links, rank) for rank in range(self._plan.n_workers)]

    def totals(self) -> dict[int, tuple[VerbTotal, ...]]:
        """Return the sums of this host's workers over all generations; raise as `status`."""
        links = self._shared
        if links is None:
            raise PoolClosedError("totals: the pool was shut down")
        return links.totals()

    @property
    def _aborted(self) -> Failure | None:
        links = self._shared
        return None if links is None else links.board.aborted

    def _status(self, links: SharedResources, rank: int) -> MemberStatus:
        # The board shows a worker without a call as busy with `dequeue`.
        status = links.board.member_status(rank)
        method = self.tracker.idle(rank)
        if method is None or status.state not in ("busy", "idle"):
            return status
        return replace(status, state="idle", operation=method)

    def call(self, call: PendingCall) -> Any:
        """Send a call and wait for its result; raise its error or the pool's failure.

        After a `CallTimeoutError`, workers continue a call that was sent.
        """
        deadline = self._carry_out(call)
        if deadline is not None:
            raise self._timed_out(call, deadline)
        return call.result()

    def _carry_out(self, call: PendingCall) -> Deadline | None:
        """Send a call and wait until it is done; return the deadline if that expires first."""
        dispatcher = self.dispatcher
        if dispatcher is None:
            self.tracker.queue(call)  # raises the failure that ended the pool
            return None
        deadline = self.tracker.due(call)
        try:
            dispatcher.send(call, deadline)
            while not call.done:
                try:
                    dispatcher.wait(call, deadline)
                except GroupTimeoutError:
                    deadline = self.tracker.due(call)  # other answers extend it
                    if call.done or deadline.expired:
                        raise
                except KeyboardInterrupt as interrupt:
                    # The caller needs no frames of this wait.
                    raise interrupt.with_traceback(None) from interrupt.__cause__
        except GroupTimeoutError:
            return None if call.done else deadline
        except BaseException:  # it could not be pickled, or a signal handler has raised
            self.tracker.abandon(call)
            raise
        return None

    def _timed_out(self, call: PendingCall, deadline: Deadline) -> CallTimeoutError:
        self.tracker.give_up(call)
        error = self.late(call, deadline.timeout)
        self.tracker.cancel(call)  # after `late`: the method may return and change its stack
        return error

    def submit(self, call: PendingCall) -> Future[Any]:
        """Queue a call and return the future of its result, or raise the pool's failure."""
        future = call.future()
        future.answer_for(
            partial(self.late, call),
            partial(self.tracker.give_up, call),
            partial(self.tracker.cancel, call),
        )
        self.tracker.queue(call)
        return future

    def late(self, call: PendingCall, timeout: float | None) -> CallTimeoutError:
        """Return the error of a late call: the late ranks, their stacks, and their blockers."""
        ranks = self.tracker.late(call)
        if not ranks:
            restarting = self.tracker.state.restarting
            detail = "not sent in that time"
            if call.number:
                detail = "answered just afterwards"
            elif restarting is not None:
                detail = f"not sent: the pool is being restarted after this: {restarting}"
            elif self.tracker.queued.busy:
                detail = "not sent: the workers are busy with calls before it"
                links, late = self._shared, self.tracker.late_ranks
                if links is not None and late:
                    who = "; ".join(str(links.board.member_status(rank)) for rank in late)
                    detail += f", the first waits for {who}"
            seen: Seen = (), detail, {}, ()
        else:
            # Not in the main thread: a signal handler there may need the locks.
            look = partial(self._seen, ranks)
            seen = _in_another_thread(look) if in_main_thread() else look()
        return located(CallTimeoutError(call.method, timeout, *seen), self._plan.config.name)

    def _seen(self, ranks: list[int]) -> Seen:
        """Return the states of ``ranks``, why they are late, their stacks, and their blockers."""
        with self._processes.using:
            links = self._shared
            if links is None:
                return (), "the pool was shut down", {}, ()
            seen = self._processes.look(ranks)
            statuses = tuple(links.board.member_status(rank) for rank in ranks)
            return statuses, seen.why, seen.stacks, seen.blocked_by

    def hang_report(self) -> list[str]:
        """Return sentences that name each blocked worker and its blocker, on all hosts."""
        look = self._diagnoses
        seen = _in_another_thread(look) if in_main_thread() else look()
        return [line for each in seen if each.is_hang for line in each.sentences]

    def _diagnoses(self) -> list[Diagnosis]:
        with self._processes.using:
            return [] if self._shared is None else self._processes.diagnoses()

    def stop(self, timeout: float, finish: bool) -> None:
        """End everything; idempotent, from any thread but the pool's own.

        Within ``timeout`` seconds calls finish, if ``finish``, for half of the time, and workers
        exit; then they are terminated, and killed after ``kill_seconds`` more.
        """
        if self.is_own(threading.current_thread()):
            raise RuntimeError("a pool cannot be shut down by a callback of its own")
        self.tracker.wait_until(lambda: self._stopping.acquire(blocking=False), NEVER)
        try:
            deadline = Deadline.after(timeout)
            idle = self.tracker.wait_until_idle(timeout / 2 if finish else 0.0)
            self.tracker.end(PoolClosedError("the pool was shut down"))
            self._processes.supervisor.stop()
            self._wait_for(self._processes.supervisor.thread)
            links, dispatcher = self._shared, self.dispatcher
            if links is None or dispatcher is None:  # `stop` has run before, or in a signal handler
                return
            if not idle or self._broken is not None:
                links.board.abort("the pool was shut down during a call")
                deadline = Deadline.after(deadline.remaining(at_most=_LEAVE_SECONDS))
            links.calls.shutdown()
            dispatcher.release()
            self._wait_for(*dispatcher.threads)
            with self._processes.using:
                self._processes.close(deadline.remaining())
                self._close_resources.close()
                self.tracker.let_go()
                self._shared = self.dispatcher = None
        finally:
            self._stopping.release()

    def _wait_for(self, *threads: threading.Thread | None) -> None:
        """Join threads of this pool, for a limited time: users' callbacks run in them."""

        def ended() -> bool:
            return not any(each is not None and each.is_alive() for each in threads)

        if not self.tracker.wait_until(ended, Deadline.after(_THREAD_SECONDS)):
            names = [each.name for each in threads if each is not None and each.is_alive()]
            _log.warning("%s ends without %s, which a callback blocks", self._name, names)

    def is_own(self, thread: threading.Thread) -> bool:
        """Return whether `stop` joins ``thread``, which must therefore not call `stop`."""
        dispatcher = self.dispatcher
        threads = [] if dispatcher is None else dispatcher.threads
        return thread in (self._processes.supervisor.thread, *threads)

    def _begin(self, tick: Callable[[], float]) -> None:
        """Start a generation in place of the last one."""
        self._n_started += 1
        generation = self._n_started
        links = SharedResources(self._plan, generation)
        try:
            with links.board.published_wait("the start of the pool") as show:
                self._processes.meet(tick, show)
                links.open(self._processes.hosts)
                self._processes.assemble(links, self.tracker.queued.last + 1, tick, show)
        except BaseException as error:
            links.board.abort(error)  # unblocks workers that wait for others
            links.close()
            raise
        before = self._close_resources.pop_all()
        last = self._shared
        if last is not None:
            links.totals_before = last.totals()
        self._shared = self._close_resources.enter_context(closing(links))
        self._broken = None
        before.close()
        # From here on the generation may answer calls, and break.
        self.tracker.open(generation, links.cancelled.mark)
        self.dispatcher = Dispatcher(
            self.tracker,
            generation,
            links.board,
            links.calls,
            [links.replies[rank] for rank in range(self._plan.n_workers)],
        )
        fields, workers = {"generation": generation}, len(self._processes.workers)
        text = "%s has started: %d workers, generation %d"
        _log.info(text, self._name, workers, generation, extra=fields)

    def _translated_limit_errors(self, kept: Collection[int] = ()) -> AbstractContextManager[None]:
        """Wrap a block that starts all workers but ``kept``; all hosts reconnect."""
        local = self._plan.ranks_of(0)
        n_remote = None if self._plan.hosts is None else self._plan.n_workers - len(local)
        return translated_limit_errors(len({*local} - {*kept}), n_remote)

    def _restart(self, failure: Exception) -> None:
        """Start generations until one is ready, or the limit of restarts is reached."""

        def tick() -> float:
            self.tracker.state.check()
            return self.tracker.tick()

        if self.dispatcher is not None:
            self.dispatcher.release()
        keep, worked = True, bool(self.tracker.queued.last_settled)
        with suppress(PoolClosedError):
            while (pause := self._budget.take(time.monotonic(), worked)) is not None:
                worked = False
                fields = {"generation": self.tracker.state.generation}
                reason = with_notes(failure)
                _log.error("the pool has broken, and is restarted: %s", reason, extra=fields)
                try:
                    tick()  # the pool may have been shut down while a callback blocked this thread
                    self._processes.stop_survivors(pause, tick, keep=keep)
                    with self._translated_limit_errors(kept=self._processes.workers):
                        self._begin(tick)
                except PoolClosedError:
                    raise
                except Exception as error:  # noqa: BLE001 - it becomes the pool's failure
                    if isinstance(error, HostError) and error.absent:
                        self.tracker.end(error)
                        return
                    failure = located(again(error), self._plan.config.name)
                    keep = False  # the workers that stayed may be the cause
                    continue
                fields = {"generation": self.tracker.state.generation}
                text = "%s was restarted: generation %d"
                _log.warning(text, self._name, self.tracker.state.generation, extra=fields)
                return
            limit = self._plan.max_restarts, self._plan.window
            limited = RestartLimitError(*limit, str(failure))
            limited.__cause__ = failure
            self.tracker.end(limited)

    def _resume(self, rank: int, number: int) -> None:
        worker = self._processes.workers.get(rank)
        if worker is not None:
            with suppress(ChannelClosedError):  # the supervisor reports the worker's end
                worker.channel.send(Resume(number))

    def _wake(self) -> None:
        links = self._shared
        if links is not None:
            links.board.notify(links.driver)

    def _clock(self) -> None:
        self._processes.supervisor.wake()

    def _expire(self, calls: list[PendingCall]) -> None:
        # Reading stacks takes time that the supervisor, which calls this, must not spend.
        def expire() -> None:
            for call in calls:
                self.tracker.give_up(call)
                limit = self._plan.config.call_seconds if call.timeout is None else call.timeout
                self.tracker.expire(call, self.late(call, limit))
                self.tracker.cancel(call)

        run_in_thread(expire, "pool-late-calls")

    def _expose(self, call: PendingCall) -> None:
        def expose() -> None:
            seen = self._seen(self.tracker.late(call))
            self.tracker.break_off(
                CallStuckError(call.method, self._plan.stuck_after, *seen), generation
            )

        generation = self.tracker.state.generation
        run_in_thread(expose, "pool-stuck-call")

    def _broke(self, error: CoordinatorError) -> None:
        # The abort unblocks the workers. `_restart` or `_tick` kills those that still run later.
        links = self._shared
        if links is not None:
            links.board.abort(error, getattr(error, "rank", None))
        self._broken = error
        if self.tracker.state.ended is not None:
            self._end_at = time.monotonic() + _LEAVE_SECONDS
        self._processes.supervisor.wake()

    def _tick(self) -> float:
        if self._broken is not None and self.tracker.state.ended is None:
            self._restart(self._broken)
            self._aborted_at = math.inf
        left = self.tracker.tick()  # first: a worker's report is more precise than the board
        now = time.monotonic()
        reason_by = self._aborted_at + self._plan.config.settle_seconds
        if reason_by <= now and self._reason_due():
            reason_by = self._aborted_at + self._reason_seconds
        elif reason_by <= now:
            self._aborted_at = reason_by = math.inf
            failure = self._aborted
            if failure is not None:
                self.tracker.break_off(GroupAbortedError("pool", failure))
        if self._end_at <= now:
            self._end_at = math.inf
            end(list(self._processes.workers.values()), 0.0, self._plan.config.kill_seconds)
        return min(left, max(min(self._end_at, reason_by) - now, 0.0))


def _in_another_thread(look: Callable[[], _SeenT]) -> _SeenT:
    """Return the result of ``look``, called in another thread if one can be started."""
    try:
        looking = submit_in_thread(look, "pool-apart")
    except RuntimeError:
        return look()
    return looking.result()
