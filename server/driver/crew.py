"""Run the workers of one pool: pass calls on to them, handle their failures, restart and end them.

A pool that is restarted has one *generation* of workers after another. When one breaks, all workers
leave its groups and queues; those that cannot are ended, and replaced; then all join new ones.
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
    """Counts the restarts of one pool.

    Args:
        most: how many restarts there may be within ``window``.
        window: seconds.
    """

    def __init__(self, most: int, window: float) -> None:
        self._most = most
        self._window = window
        self._restarted_at: list[float] = []
        self._in_vain = 0

    def take(self, now: float, worked: bool) -> float | None:
        """Count a restart.

        Args:
            now: the time, in seconds of any clock.
            worked: whether the workers have answered a call since the last restart.

        Returns:
            The seconds to wait before it: none at first, and after each restart in vain twice as
            many. ``None``: the pool may not be restarted: there were as many within the window, or
            in vain one after the other, however long they took.
        """
        self._restarted_at = [at for at in self._restarted_at if at > now - self._window]
        self._in_vain = 0 if worked else self._in_vain + 1
        if max(len(self._restarted_at), self._in_vain - 1) >= self._most:
            return None
        self._restarted_at.append(now)
        if self._in_vain <= 1:
            return 0.0
        return min(_FIRST_PAUSE_SECONDS * 2.0 ** (self._in_vain - 2), _LONGEST_PAUSE_SECONDS)


if TYPE_CHECKING:
    Seen: TypeAlias = "tuple[tuple[MemberStatus, ...], str, Mapping[int, str], tuple[int, ...]]"

_SeenT = TypeVar("_SeenT")
_log = logging.getLogger(__name__)
_THREAD_SECONDS = 10.0
"""How long a pool that ends waits for its threads: users' callbacks run in them."""
_LEAVE_SECONDS = 0.5
"""How long workers have to leave by themselves if the pool breaks, or is stopped during a call."""


class PoolDriver(WorkerEvents):
    """The workers of a pool, one generation after another. Any thread may use it.

    Attributes:
        tracker: the book of the pool's calls.
        dispatcher: sends calls to the workers of the latest generation; ``None`` after `stop`.
    """

    def __init__(self, plan: PoolPlan) -> None:
        """Start the workers and wait until all are ready.

        Raises:
            WorkerStartError: a worker failed, or was not ready in time.
            SharedMemoryError: too little memory is free.
            DescriptorLimitError: too few files may be open.
            ProcessLimitError: no further process or thread can be started.
            OSError: a process cannot be started.
        """
        self._begun = 0
        self._plan = plan
        self._name = plan.config.name or "the pool"
        # A signal handler may stop the pool in the middle of any of its calls, `stop` included.
        self._stopping = threading.RLock()
        self._budget = RestartBudget(plan.max_restarts, plan.window)
        # Neither is kept after `stop`: who still uses them does so in a call that holds them, and
        # their memory goes with the last such call.
        self._shared: SharedResources | None = None
        self.dispatcher: Dispatcher | None = None
        self._leave_links = ExitStack()
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
            undo.callback(self._leave_links.close)
            self._processes = WorkerProcesses(plan)
            undo.callback(self._processes.close, 0.0)
            undo.callback(self._call_off)
            try:
                self._begin(lambda: math.inf)
            except CoordinatorError as error:
                located(error, plan.config.name)
                raise
            self._processes.supervisor.start(self, self._tick, self._unwatched)
            undo.pop_all()

    def _call_off(self) -> None:
        """Where the pool does not start: let the threads end that were to move its calls."""
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
        # If the board was aborted before, this death may be a mere consequence. It is the cause if
        # another rank's report names this one.
        failure = self._aborted
        if failure is None or failure.culprit == rank != failure.rank:
            pid = self._processes.workers[rank].pid
            where = {"rank": rank, "generation": self.tracker.state.generation}
            told = "rank %d (pid %d) of %s was lost: %s"
            _log.info(told, rank, pid, self._name, how, extra=where)
            lost = WorkerLostError(rank, pid, how, stack)
            self.tracker.break_off(self._divergence(lost) or lost)
        else:
            self._await_reason()

    def _divergence(self, lost: WorkerLostError) -> CallDivergedError | None:
        """The error if the collective in which a process ended is not the other ranks'."""
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
        found = fatal_divergence(lost.rank, operation, fingerprints, past)
        if found is None:
            return None
        error = CallDivergedError(call.number, call.method, *found)
        error.__cause__ = lost
        return error

    def _await_reason(self) -> None:
        """Give the worker that has aborted the board time to report why over its control channel,
        but not for ever: it may be the one that has just ended.
        """
        self._aborted_at = min(self._aborted_at, time.monotonic())

    def _reason_due(self) -> bool:
        """Whether a worker may still report it; the first question begins its time. Any thread may
        call.
        """
        self._await_reason()
        in_time = time.monotonic() < self._aborted_at + self._reason_seconds
        return in_time and self._processes.may_say_why(self._aborted)

    def _unwatched(self, error: BaseException) -> None:
        """End the pool, and its workers: nobody would notice any more that they end or hang."""
        self.tracker.end(CoordinatorError(f"the pool's supervisor has failed: {error!r}"))
        end(list(self._processes.workers.values()), _LEAVE_SECONDS, self._plan.config.kill_seconds)

    def status(self) -> list[MemberStatus]:
        """What every worker was last seen doing, by rank.

        Raises:
            PoolClosedError: the pool was shut down.
        """
        links = self._shared
        if links is None:
            raise PoolClosedError("status: the pool was shut down")
        return [self._status(links, rank) for rank in range(self._plan.n_workers)]

    def totals(self) -> dict[int, tuple[VerbTotal, ...]]:
        """What all operations of each worker of this host came to, in all generations, by rank.

        Raises:
            PoolClosedError: the pool was shut down.
        """
        links = self._shared
        if links is None:
            raise PoolClosedError("totals: the pool was shut down")
        return links.totals()

    @property
    def _aborted(self) -> Failure | None:
        """Why the workers leave their groups and queues, if they do."""
        links = self._shared
        return None if links is None else links.board.aborted

    def _status(self, links: SharedResources, rank: int) -> MemberStatus:
        # On the board a worker without a call is busy with `dequeue`: show it as idle instead.
        status = links.board.member_status(rank)
        method = self.tracker.idle(rank)
        if method is None or status.state not in ("busy", "idle"):
            return status
        return replace(status, state="idle", operation=method)

    def call(self, call: PendingCall) -> Any:
        """Send a call and wait for its result.

        Raises:
            CallTimeoutError: the call is late; it goes on if it was sent.
            The call's error, or what broke the pool.
        """
        passed = self._carry_out(call)
        if passed is not None:
            raise self._given_up(call, passed)
        return call.result()

    def _carry_out(self, call: PendingCall) -> Deadline | None:
        """Send a call and wait until it is done; the deadline if that has passed before."""
        dispatcher = self.dispatcher
        if dispatcher is None:
            self.tracker.queue(call)  # which raises what ended the pool
            return None
        deadline = self.tracker.due(call)
        try:
            dispatcher.send(call, deadline)
            while not call.done:
                try:
                    dispatcher.wait(call, deadline)
                except GroupTimeoutError:
                    deadline = self.tracker.due(call)  # others may have been answered meanwhile
                    if call.done or deadline.expired:
                        raise
                except KeyboardInterrupt as interrupt:
                    # To whoever waits it says nothing in which line of the wait it came.
                    raise interrupt.with_traceback(None) from interrupt.__cause__
        except GroupTimeoutError:
            return None if call.done else deadline
        except BaseException:  # it could not be pickled, or a signal handler has raised
            self.tracker.abandon(call)
            raise
        return None

    def _given_up(self, call: PendingCall, deadline: Deadline) -> CallTimeoutError:
        """Give up waiting for a call; the error for that."""
        self.tracker.give_up(call)
        error = self.late(call, deadline.timeout)
        self.tracker.cancel(call)  # only now: it may leave the place that its stack shows
        return error

    def submit(self, call: PendingCall) -> Future[Any]:
        """Queue a call and return the future of its result. Does not wait for workers.

        Raises:
            What broke the pool.
        """
        future = call.future()
        future.answer_for(
            partial(self.late, call),
            partial(self.tracker.give_up, call),
            partial(self.tracker.cancel, call),
        )
        self.tracker.queue(call)
        return future

    def late(self, call: PendingCall, timeout: float | None) -> CallTimeoutError:
        """The error for a call that is late after ``timeout`` seconds: who has not answered, what
        these ranks are doing, who holds them up, and their stacks.
        """
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
                    detail += f", the first of which waits for {who}"
            seen: Seen = (), detail, {}, ()
        else:
            # Not in the main thread: signal handlers, which interrupt that, may need what it holds.
            look = partial(self._seen, ranks)
            seen = _elsewhere(look) if in_main_thread() else look()
        return located(CallTimeoutError(call.method, timeout, *seen), self._plan.config.name)

    def _seen(self, ranks: list[int]) -> Seen:
        """What ranks are doing, why they are late, their stacks, and who holds them up."""
        with self._processes.using:
            links = self._shared
            if links is None:
                return (), "the pool was shut down", {}, ()
            seen = self._processes.look(ranks)
            statuses = tuple(links.board.member_status(rank) for rank in ranks)
            return statuses, seen.why, seen.stacks, seen.blocked_by

    def hang_report(self) -> list[str]:
        """Who holds up whom on all hosts, in sentences; none if nobody has to wait."""
        look = self._diagnoses
        seen = _elsewhere(look) if in_main_thread() else look()
        return [line for each in seen if each.is_hang for line in each.sentences]

    def _diagnoses(self) -> list[Diagnosis]:
        with self._processes.using:
            return [] if self._shared is None else self._processes.diagnoses()

    def stop(self, timeout: float, finish: bool) -> None:
        """End everything; idempotent, from any thread but the pool's own.

        Args:
            timeout: seconds for calls to finish and workers to leave; then they are terminated,
                and killed after ``kill_seconds`` more.
            finish: let calls that were accepted finish, for half of the time.
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
            if links is None or dispatcher is None:  # stopped before, or by a handler meanwhile
                return
            if not idle or self._broken is not None:
                links.board.abort("the pool was shut down during a call")
                deadline = Deadline.after(deadline.remaining(at_most=_LEAVE_SECONDS))
            links.calls.shutdown()
            dispatcher.release()
            self._wait_for(*dispatcher.threads)
            with self._processes.using:
                self._processes.close(deadline.remaining())
                self._leave_links.close()
                self.tracker.let_go()
                self._shared = self.dispatcher = None
        finally:
            self._stopping.release()

    def _wait_for(self, *threads: threading.Thread | None) -> None:
        """Wait until threads of this pool have ended; not for ever for what users run in them."""

        def ended() -> bool:
            return not any(each is not None and each.is_alive() for each in threads)

        if not self.tracker.wait_until(ended, Deadline.after(_THREAD_SECONDS)):
            names = [each.name for each in threads if each is not None and each.is_alive()]
            _log.warning("%s ends without %s, which a callback holds up", self._name, names)

    def is_own(self, thread: threading.Thread) -> bool:
        """Whether `stop` joins ``thread``, which must therefore not call it."""
        dispatcher = self.dispatcher
        threads = [] if dispatcher is None else dispatcher.threads
        return thread in (self._processes.supervisor.thread, *threads)

    def _begin(self, tick: Callable[[], float]) -> None:
        """Begin a generation in the place of the last one."""
        self._begun += 1
        generation = self._begun
        links = SharedResources(self._plan, generation)
        try:
            with links.board.published_wait("the start of the pool") as show:
                self._processes.meet(tick, show)
                links.open(self._processes.hosts)
                self._processes.assemble(links, self.tracker.queued.last + 1, tick, show)
        except BaseException as error:
            links.board.abort(error)  # those that wait for others leave
            links.close()
            raise
        before = self._leave_links.pop_all()
        last = self._shared
        if last is not None:
            links.totals_before = last.totals()
        self._shared = self._leave_links.enter_context(closing(links))
        self._broken = None
        before.close()
        # From here on the generation may answer calls, and break: all about it must be in place.
        self.tracker.open(generation, links.cancelled.mark)
        self.dispatcher = Dispatcher(
            self.tracker,
            generation,
            links.board,
            links.calls,
            [links.replies[rank] for rank in range(self._plan.n_workers)],
        )
        of, workers = {"generation": generation}, len(self._processes.workers)
        told = "%s has started: %d workers, generation %d"
        _log.info(told, self._name, workers, generation, extra=of)

    def _translated_limit_errors(self, kept: Collection[int] = ()) -> AbstractContextManager[None]:
        """A block that starts the workers that are missing; ``kept`` are the ranks of the others.

        All that are elsewhere meet this host anew.
        """
        here = self._plan.ranks_of(0)
        elsewhere = None if self._plan.hosts is None else self._plan.n_workers - len(here)
        return translated_limit_errors(len({*here} - {*kept}), elsewhere)

    def _restart(self, failure: Exception) -> None:
        """Begin generations until one stands, or there were too many."""

        def tick() -> float:
            self.tracker.state.check()
            return self.tracker.tick()

        if self.dispatcher is not None:
            self.dispatcher.release()
        keep, worked = True, bool(self.tracker.queued.last_settled)
        with suppress(PoolClosedError):
            while (pause := self._budget.take(time.monotonic(), worked)) is not None:
                worked = False
                of = {"generation": self.tracker.state.generation}
                why = with_notes(failure)
                _log.error("the pool has broken, and is restarted: %s", why, extra=of)
                try:
                    tick()  # it may have been shut down while a callback held this thread up
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
                    keep = False  # those that stayed may be why it failed
                    continue
                of = {"generation": self.tracker.state.generation}
                told = "%s was restarted: generation %d"
                _log.warning(told, self._name, self.tracker.state.generation, extra=of)
                return
            limit = self._plan.max_restarts, self._plan.window
            limited = RestartLimitError(*limit, str(failure))
            limited.__cause__ = failure
            self.tracker.end(limited)

    def _resume(self, rank: int, number: int) -> None:
        worker = self._processes.workers.get(rank)
        if worker is not None:
            with suppress(ChannelClosedError):  # its death is the supervisor's to report
                worker.channel.send(Resume(number))

    def _wake(self) -> None:
        links = self._shared
        if links is not None:
            links.board.notify(links.driver)

    def _clock(self) -> None:
        self._processes.supervisor.wake()

    def _expire(self, calls: list[PendingCall]) -> None:
        """Fail late calls, in a new thread: reading their workers' stacks takes a while, and the
        supervisor, whose thread this is called in, must not wait for it.
        """

        def expire() -> None:
            for call in calls:
                self.tracker.give_up(call)
                limit = self._plan.config.call_seconds if call.timeout is None else call.timeout
                self.tracker.expire(call, self.late(call, limit))
                self.tracker.cancel(call)

        run_in_thread(expire, "pool-late-calls")

    def _expose(self, call: PendingCall) -> None:
        """Break the pool because of a call that is stuck, in a new thread as in `_expire`."""

        def expose() -> None:
            seen = self._seen(self.tracker.late(call))
            self.tracker.break_off(
                CallStuckError(call.method, self._plan.stuck_after, *seen), generation
            )

        generation = self.tracker.state.generation
        run_in_thread(expose, "pool-stuck-call")

    def _broke(self, error: CoordinatorError) -> None:
        # The abort lets the workers leave. Those that have not by then are ended: by `_restart`, or
        # by `_tick`.
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
        left = self.tracker.tick()  # first: what a worker has reported says more than the board
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


def _elsewhere(look: Callable[[], _SeenT]) -> _SeenT:
    """What ``look`` returns, called in another thread, or in this one if none can be started."""
    try:
        looking = submit_in_thread(look, "pool-apart")
    except RuntimeError:
        return look()
    return looking.result()
