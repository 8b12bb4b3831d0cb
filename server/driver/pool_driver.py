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
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from coordinator.daemon_threads import run_in_thread
from shm_broadcast import (
    NEVER,
    CoordinatorError,
    Deadline,
    GroupAbortedError,
    MemberStatus,
)
from shm_broadcast.state.flight_recorder import VerbTotal

from ..calls.call_table import CallTable, ignore
from ..calls.dispatcher import Dispatcher, complete_futures
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
from ..launchers.local import end
from .limits import translated_limit_errors
from .links import SharedResources
from .supervisor import WorkerEvents
from .worker_processes import WorkerProcesses

if TYPE_CHECKING:
    from .pool_plan import PoolPlan

    Seen: TypeAlias = "tuple[tuple[MemberStatus, ...], str, Mapping[int, str], tuple[int, ...]]"

_log = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_THREAD_SECONDS = 10.0
"""Time that a pool waits at its end for its threads, in which users' callbacks run."""
_LOOK_SECONDS = 1e-3
_LEAVE_SECONDS = 0.5
"""Time for workers to exit if the pool breaks, or is shut down during a call."""


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


class PoolDriver(WorkerEvents):
    """The workers of a pool, in successive generations. Any thread may use it.

    Attributes:
        dispatcher: sends calls to the workers of the latest generation; ``None`` after `stop`.
        table: the pool's calls, which ``lock`` guards.
        changed: called by the supervisor when the pool was restarted, or broke for good.
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
        self._to_send: SimpleQueue[None] = SimpleQueue()
        self._announced: CoordinatorError | None = None
        self.changed: Callable[[], None] = ignore
        self._end_at = math.inf
        self.table = CallTable(
            plan.in_flight,
            plan.config.call_seconds,
            plan.config.settle_seconds,
            name=plan.config.name,
            stuck_seconds=plan.stuck_after,
            restartable=plan.restart != "never",
        )
        self.lock = threading.RLock()  # a signal handler may ask for the status of its pool
        self._released = threading.Condition(self.lock)
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
        if self.table.generation:
            self._end(PoolClosedError("the pool has not started"))
        self._to_send.put(None)  # the sender may run, though the collector could not start
        if self.dispatcher is not None:
            self.dispatcher.release()

    def on_message(self, rank: int, message: FromWorker) -> None:
        """Handle a worker's message; called by the supervisor."""
        match message:
            case Failed():
                with self.lock:
                    self.table.failed(rank, message, self._aborted())
                self._notify_listener()
            case WorkProgress(done, total, what):
                try:
                    self._plan.on_progress(rank, done, total, what)
                except Exception:  # noqa: BLE001 - the caller's own code
                    _log.exception("on_progress failed")

    def on_death(self, rank: int, how: str, stack: str) -> None:
        """Break the pool because a worker's process has ended; called by the supervisor."""
        # After an abort, this death may be a secondary failure. It is the root cause if another
        # rank's report names this rank.
        pid = self._processes.workers[rank].pid
        lost = WorkerLostError(rank, pid, how, stack)
        abort = self._aborted()
        failure = None if abort is None else abort.failure
        with self.lock:
            if failure is None or failure.culprit == rank != failure.rank:
                fields = {"rank": rank, "generation": self.table.generation}
                text = "rank %d (pid %d) of %s was lost: %s"
                _log.info(text, rank, pid, self._name, how, extra=fields)
                self.table.break_off(self._divergence(lost) or lost)
            elif abort is not None:
                self.table.saw_abort(abort, lost if failure.culprit == rank else None)

    def _divergence(self, lost: WorkerLostError) -> CallDivergedError | None:
        """Return the error if a process ended in another collective than the other ranks'."""
        links, call = self._shared, self.table.oldest_of(lost.rank)
        if links is None or call is None:
            return None
        board = links.board
        fingerprints = {
            rank: board.fingerprints.of_member(rank) for rank in range(self._plan.n_workers)
        }
        operation = board.member_status(lost.rank).operation
        divergence = fatal_divergence(lost.rank, operation, fingerprints)
        if divergence is None:
            return None
        error = CallDivergedError(call.number, call.method, *divergence)
        error.__cause__ = lost
        return error

    def _supervisor_failed(self, error: BaseException) -> None:
        # Without a supervisor, no thread detects that a worker ends or hangs.
        self._end(CoordinatorError(f"the pool's supervisor has failed: {error!r}"))
        complete_futures(self.table)
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

    def _aborted(self) -> GroupAbortedError | None:
        links = self._shared
        failure = None if links is None else links.board.aborted
        return None if failure is None else GroupAbortedError("pool", failure)

    def _may_report(self) -> bool:
        abort = self._aborted()
        return self._processes.may_report(None if abort is None else abort.failure)

    def _status(self, links: SharedResources, rank: int) -> MemberStatus:
        # The board shows a worker without a call as busy with `dequeue`.
        status = links.board.member_status(rank)
        if self.table.oldest_of(rank) is not None or status.state not in ("busy", "idle"):
            return status
        return replace(status, state="idle", operation=self.table.last_settled)

    def call(self, call: PendingCall) -> Any:
        """Send a call and wait for its result; raise its error or the pool's failure.

        After a `CallTimeoutError`, workers continue a call that was sent.
        """
        # No local variable holds a dispatcher or an error: a caller may keep the traceback.
        deadline = (self.dispatcher or self._refuse()).call(call)
        if deadline is not None:
            raise self._timed_out(call, deadline)
        return call.result()

    def _refuse(self) -> NoReturn:
        self.table.check()
        raise PoolClosedError("the pool was shut down")

    def _timed_out(self, call: PendingCall, deadline: Deadline) -> CallTimeoutError:
        self._in_lock(self.table.withdraw, call)
        error = self.late(call, deadline.timeout)
        self._in_lock(self.table.cancel, call)
        return error

    def submit(self, call: PendingCall) -> Future[Any]:
        """Queue a call and return the future of its result, or raise the pool's failure."""
        future = call.future()
        abandon = partial(self._in_lock, self.table.abandon, call)
        future.answer_for(partial(self.late, call), abandon)
        with self.lock:
            self.table.submit(call)
        self._to_send.put(None)
        if self.table.attention:
            self._processes.supervisor.wake()
        return future

    def take_waiting(self) -> list[PendingCall]:
        """Remove the calls that wait for a restart and may run in another pool; return them."""
        with self.lock:
            return self.table.take_waiting()

    def late(self, call: PendingCall, timeout: float | None) -> CallTimeoutError:
        """Return the error of a late call: the late ranks, their stacks, and their blockers."""
        ranks = sorted(call.waiting) if call.number else []
        seen = self._seen(ranks) if ranks else ((), self._why_unsent(call), {}, ())
        return located(CallTimeoutError(call.method, timeout, *seen), self._plan.config.name)

    def _why_unsent(self, call: PendingCall) -> str:
        links, oldest, restarting = self._shared, self.table.oldest, self.table.restarting
        if call.number:
            return "answered just afterwards"
        if restarting is not None:
            return f"not sent: the pool is being restarted after this: {restarting}"
        if oldest is None:
            return "not sent in that time"
        detail = "not sent: the workers are busy with calls before it"
        if links is not None and oldest.waiting:
            who = "; ".join(str(links.board.member_status(rank)) for rank in sorted(oldest.waiting))
            detail += f", the first waits for {who}"
        return detail

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
        with self._processes.using:
            seen = [] if self._shared is None else self._processes.diagnoses()
        return [line for each in seen if each.is_hang for line in each.sentences]

    def stop(self, timeout: float, finish: bool) -> None:
        """End everything; idempotent, from any thread but the pool's own.

        Within ``timeout`` seconds calls finish, if ``finish``, for half of the time, and workers
        exit; then they are terminated, and killed after ``kill_seconds`` more.
        """
        if self.is_own(threading.current_thread()):
            raise RuntimeError("a pool cannot be shut down by a callback of its own")
        self._wait_until(lambda: self._stopping.acquire(blocking=False), NEVER)
        try:
            deadline = Deadline.after(timeout)
            finish_by = Deadline.after(timeout / 2 if finish else 0.0)
            idle = self._wait_until(lambda: not self.table.size, finish_by)
            self._end(PoolClosedError("the pool was shut down"))
            self._processes.supervisor.stop()
            self._join(self._processes.supervisor.thread)
            if self.table.finished:  # not in this thread, which a signal handler may interrupt
                run_in_thread(partial(complete_futures, self.table), "pool-futures")
                self._wait_until(lambda: not self.table.finished, Deadline.after(_THREAD_SECONDS))
            links, dispatcher = self._shared, self.dispatcher
            if links is None or dispatcher is None:  # `stop` has run before, or in a signal handler
                return
            if not idle or self.table.failure is not None:
                links.board.abort("the pool was shut down during a call")
                deadline = Deadline.after(deadline.remaining(at_most=_LEAVE_SECONDS))
            links.calls.shutdown()
            dispatcher.release()
            self._join(*dispatcher.threads)
            with self._processes.using:
                self._processes.close(deadline.remaining())
                self._close_resources.close()
                self.table.release()
                self.changed = ignore
                self._shared = self.dispatcher = None
        finally:
            self._stopping.release()

    def _wait_until(self, true: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until ``true()``, which needs other threads; False at the deadline.

        Releases the lock meanwhile: those threads may need it, and a signal handler that ends the
        pool may run inside a block that holds it.
        """
        with self.lock:
            while not true():
                if deadline.expired:
                    return False
                self._released.wait(_LOOK_SECONDS)
            return True

    def _join(self, *threads: threading.Thread | None) -> None:
        """Join threads of this pool, for a limited time: users' callbacks run in them."""

        def ended() -> bool:
            return not any(each is not None and each.is_alive() for each in threads)

        if not self._wait_until(ended, Deadline.after(_THREAD_SECONDS)):
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
                self._processes.assemble(links, self.table.last + 1, tick, show)
        except BaseException as error:
            links.board.abort(error)  # unblocks workers that wait for others
            links.close()
            raise
        before = self._close_resources.pop_all()
        last = self._shared
        if last is not None:
            links.totals_before = last.totals()
        self._shared = self._close_resources.enter_context(closing(links))
        before.close()
        # From here on the generation may answer calls, and break.
        with self.lock:
            self.table.open(generation, links.cancelled.mark)
        self.dispatcher = Dispatcher(
            self.table,
            self.lock,
            self._processes.supervisor.wake,
            self._to_send,
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
            self.table.check()
            return self._tick_calls()

        if self.dispatcher is not None:
            self.dispatcher.release()
        keep, worked = True, bool(self.table.last_settled)
        with suppress(PoolClosedError):
            while (pause := self._budget.take(time.monotonic(), worked)) is not None:
                worked = False
                fields = {"generation": self.table.generation}
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
                        self._end(error)
                        return
                    failure = located(again(error), self._plan.config.name)
                    keep = False  # the workers that stayed may be the cause
                    continue
                fields = {"generation": self.table.generation}
                text = "%s was restarted: generation %d"
                _log.warning(text, self._name, self.table.generation, extra=fields)
                self.changed()
                return
            limit = self._plan.max_restarts, self._plan.window
            limited = RestartLimitError(*limit, str(failure))
            limited.__cause__ = failure
            self._end(limited)

    def _end(self, error: CoordinatorError) -> None:
        with self.lock:
            self.table.end(error)
        self._processes.supervisor.wake()
        self._notify_listener()

    def _in_lock(self, change: Callable[[PendingCall], None], call: PendingCall) -> None:
        with self.lock:
            change(call)

    def _notify_listener(self) -> None:
        """Wake the thread that waits for replies: a call may have ended without one."""
        links = self._shared
        if links is not None:
            links.board.notify(links.driver)

    def _expire(self, calls: list[PendingCall]) -> None:
        """Fail late calls; in a thread of its own, since reading stacks takes time."""
        for call in calls:
            limit = self._plan.config.call_seconds if call.timeout is None else call.timeout
            self._in_lock(self.table.withdraw, call)
            error = self.late(call, limit)
            with self.lock:
                self.table.expire(call, error)
                self.table.cancel(call)  # after `late`: the method may return and change its stack
        complete_futures(self.table)

    def _break_stuck(self, call: PendingCall, generation: int) -> None:
        seen = self._seen(sorted(call.waiting))
        error = CallStuckError(call.method, self._plan.stuck_after, *seen)
        with self.lock:
            self.table.break_off(error, generation)
        self._processes.supervisor.wake()

    def _tick(self) -> float:
        """Carry out the table's decisions; called by the supervisor."""
        seconds = self._tick_calls()
        failure = self.table.failure
        if failure is not None and failure is not self._announced:
            self._announced = failure
            links = self._shared
            if links is not None:
                # This unblocks the workers. `_restart` or `_tick` kills those that still run later.
                links.board.abort(failure, getattr(failure, "rank", None))
            if self.table.ended is None:
                self._restart(failure)
                return 0.0
            self._end_at = time.monotonic() + _LEAVE_SECONDS
            self.changed()
        if self._end_at <= time.monotonic():
            self._end_at = math.inf
            end(list(self._processes.workers.values()), 0.0, self._plan.config.kill_seconds)
        return min(seconds, max(self._end_at - time.monotonic(), 0.0))

    def _tick_calls(self) -> float:
        """Tick the table, and carry out its decisions on calls; return the seconds to the next."""
        with self.lock:
            tick = self.table.tick(self._may_report)
            resumable, self.table.resumable = self.table.resumable, {}
            moving, self.table.moving = self.table.moving, {}
        for rank, number in resumable:
            worker = self._processes.workers.get(rank)
            if worker is not None:
                with suppress(ChannelClosedError):  # the supervisor reports the worker's end
                    worker.channel.send(Resume(number))
        if resumable:  # a queued call has room, and no reply follows if all ranks have failed
            self._to_send.put(None)
        complete_futures(self.table)
        for call in moving:
            if call.move is not None:
                call.move(call)
        if tick.stuck is not None:
            stuck = partial(self._break_stuck, tick.stuck, self.table.generation)
            run_in_thread(stuck, "pool-stuck-call")
        if tick.late:
            run_in_thread(partial(self._expire, tick.late), "pool-late-calls")
        return tick.seconds
