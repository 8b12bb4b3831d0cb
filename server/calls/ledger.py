"""Track a pool's calls: queued, in flight, answered, failed.

The dispatcher sends calls as the tracker decides, and reports their replies.

Guarantees
- Calls are sent in the order of their acceptance, by one thread at a time.
- No two calls have the same number, so each reply belongs to one call.
- At most ``in_flight`` calls are in flight; a call is in flight until every rank has answered it.
- A result is returned only when all ranks have answered that call and every earlier one, and began
  the same collectives and received all messages in each. Otherwise an incomplete operation would
  match the next call's, so the pool breaks.
- A rank that has failed a call resumes when every rank has answered that call, under the same
  condition. The pool breaks if that takes longer than ``settle_seconds``, counted from the answers
  to all earlier calls.
- A call belongs to the generation of workers for which it was accepted. The first failure that
  breaks the pool fails all its calls, queued ones too, and is raised from every later one. If the
  pool is restarted, calls with ``retry``, and later ones, wait for the next generation.
- The error of a call with ``retry`` waits for the answers to the calls before it: one of these may
  be the cause, which then breaks the pool.

Signal handlers: a handler may raise in the main thread, which leaves unknown whether its call was
sent, and which replies were dequeued. A no-op call follows; calls unanswered when it returns are
lost, and pending actions of answered calls are run. Python runs handlers only after calls, so a
failure is recorded by assignments with no call between them: completely or not at all. The main
thread only records why the pool breaks; the thread that calls `tick` breaks it.

Locking: one lock guards all writes; reading needs no lock. Callbacks and futures are collected as
"actions" under the lock and run after its release: they may call the pool again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from shm_broadcast import CoordinatorError, Deadline, MessageDecodeError, SharedMemoryError

from ..control.protocol import Failed, Reply, rebuild
from ..errors import CallTimeoutError, PoolClosedError, WorkerError, again, free_frames, located
from .backlog import CallDeadlines, CallQueue, CallTimer

if TYPE_CHECKING:
    from .pending_call import PendingCall

if TYPE_CHECKING:
    Actions: TypeAlias = "list[Callable[[], None]]"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallTrackerCallbacks:
    """The owner's functions, called by any thread, without the tracker's lock.

    Attributes:
        resume: ``(rank, number)``: resume the rank that has failed call ``number``.
        wake: wake the thread that waits for replies: a call ended without a reply.
        clock: call `CallTracker.tick` now.
        broke: ``(error)``: the pool broke; called once in each generation.
        late: ``(calls)``: call `CallTracker.expire` for each. Called once for each call.
        stuck: ``(call)``: the oldest call exceeds ``stuck_seconds``. Called once for each call.
    """

    resume: Callable[[int, int], None]
    wake: Callable[[], None]
    clock: Callable[[], None]
    broke: Callable[[CoordinatorError], None]
    late: Callable[[list[PendingCall]], None]
    stuck: Callable[[PendingCall], None]


def run_all(actions: Actions) -> None:
    """Run the actions in order.

    In the main thread an exception, which may be a signal handler's, skips the rest; other threads
    log it and continue.
    """
    for action in actions:
        try:
            action()
        except BaseException:
            if in_main_thread():  # it may be a signal handler's exception
                raise
            _log.exception("a callback of the pool's user raised")


def in_main_thread() -> bool:
    """Return whether this is the thread that signal handlers interrupt."""
    return threading.current_thread() is threading.main_thread()


def ignore(*_: object) -> None:
    """Do nothing."""


_BROKEN = "The pool broke with this failure and takes no more calls."


class PoolState:
    """The state of a pool. Not thread-safe.

    Attributes:
        generation: the number of the current or last generation; 0 before the first.
        last_failure: the time of the last failure, in seconds since the epoch, and the failure.
        ended: the failure that ended the pool, or `PoolClosedError`; ``None`` while it takes calls.
        works: whether calls may be sent to the workers.
        breaking: a failure that `CallTracker` has not applied to the calls yet.
    """

    def __init__(self, name: str, restartable: bool) -> None:
        self.generation = 0
        self.restarts = 0
        self.last_failure: tuple[float, CoordinatorError] | None = None
        self.ended: CoordinatorError | None = None
        self.works = False
        self.breaking: CoordinatorError | None = None
        self._name = name
        self._restartable = restartable

    @property
    def restarting(self) -> CoordinatorError | None:
        """Return the failure during a restart; ``None`` otherwise."""
        if self.works or self.ended is not None or self.last_failure is None:
            return None
        return self.last_failure[1]

    @property
    def closed(self) -> bool:
        """Return whether the pool was closed, and had not broken before."""
        return isinstance(self.ended, PoolClosedError)

    def over(self, generation: int) -> bool:
        """Return whether the workers of ``generation`` take no more calls."""
        return not self.works or generation != self.generation

    def check(self) -> None:
        """Raise the failure that ended the pool, or `PoolClosedError`, if any."""
        if self.ended is not None:
            raise again(self.ended, "" if self.closed else _BROKEN)

    def open(self, generation: int) -> None:
        """Start a generation, with a higher number than those before."""
        restarted = self.generation > 0
        self.generation = generation
        self.works = True
        # Last: a reader of the new count must not read `restarting`.
        self.restarts += restarted

    def break_off(self, error: CoordinatorError) -> None:
        """Record the failure of the current generation."""
        self._fail(error, ends=not self._restartable)

    def end(self, error: CoordinatorError) -> None:
        """Record the error that ends the pool."""
        self._fail(error, ends=True)

    def let_go(self) -> None:
        """Free the failure's frames; no thread uses them any more."""
        if self.last_failure is not None:
            free_frames(self.last_failure[1])

    def _fail(self, error: CoordinatorError, *, ends: bool) -> None:
        error = located(again(error), self._name)  # a copy, which the pool keeps
        closed = isinstance(error, PoolClosedError)
        last = self.last_failure if closed else (time.time(), error)
        ended = error if ends else None
        if self.ended is None:
            self.works, self.breaking, self.ended, self.last_failure = False, error, ended, last


_LOOK_SECONDS = 1e-3


class CallTracker:
    """The calls of one pool. Any thread may use it.

    Calls wait until `open` is called: at first, and after each restart.

    Attributes:
        state: whether the pool takes calls, or its failure. Read-only.
        queued: the calls that are queued or in flight. Read-only.
        move: called with the waiting calls when the pool breaks, and by `move_on`; returns those
            that stay. The others belong to another tracker. ``None``: all stay.
        opened: called when the pool has been restarted.
        reason_due: returns whether a worker may still report why the board was aborted; until then
            secondary failures do not break the pool. Called under the lock.

    Args:
        call_seconds: calls are late when none was answered for so long.
        settle_seconds: time for the other ranks to answer a call that one rank has failed.
        name: the pool's name for its errors; ``""``: none.
        stuck_seconds: time after which the oldest call counts as stuck.
        restartable: whether the owner restarts the pool after a failure, or calls `end`.
    """

    def __init__(
        self,
        in_flight: int,
        call_seconds: float,
        settle_seconds: float,
        hooks: CallTrackerCallbacks,
        *,
        name: str = "",
        stuck_seconds: float = math.inf,
        restartable: bool = False,
    ) -> None:
        self.state = PoolState(name, restartable)
        self.move: Callable[[list[PendingCall]], list[PendingCall]] | None = None
        self.opened: Callable[[], None] = ignore
        self.reason_due: Callable[[], object] = ignore
        self._hooks = hooks
        self._name = name
        self._lock = threading.RLock()  # a signal handler may ask for the status of its pool
        self._to_send = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self.queued = CallQueue(in_flight)
        self._lateness = CallDeadlines(call_seconds)
        self._settling = CallTimer(settle_seconds)
        self._stuck = CallTimer(stuck_seconds)
        self._look_seconds = stuck_seconds / 4
        self._moves_on = False
        self._mark: Callable[[int], object] = ignore

    @property
    def awaited(self) -> tuple[int, int]:
        """Return the oldest call in flight, and a rank that must answer it; 0, 0 if none."""
        with self._lock:
            oldest = self.queued.oldest
            return (0, 0) if oldest is None else (oldest.number, min(oldest.waiting, default=0))

    @property
    def late_ranks(self) -> list[int]:
        """Return the ranks that have not answered the oldest call in flight, if any."""
        with self._lock:
            oldest = self.queued.oldest
            return [] if oldest is None else sorted(oldest.waiting)

    def idle(self, rank: int) -> str | None:
        """Return the last call's method if ``rank`` has answered all calls; ``""``: no call yet."""
        with self._lock:
            busy = self.queued.oldest_of(rank) is not None
            return None if busy else self.queued.last_settled

    def oldest_of(self, rank: int) -> PendingCall | None:
        """Return the oldest call in flight that ``rank`` has not answered, if any."""
        with self._lock:
            return self.queued.oldest_of(rank)

    def open(self, generation: int, mark: Callable[[int], object]) -> None:
        """Allow calls to a generation; ``mark(number)`` cancels one whose caller is lost."""
        with self._lock:
            opens = self.state.ended is None
            opened = self.opened if opens and self.state.generation else ignore
            if opens:
                self.queued.last_settled = ""
                self._mark = mark
                self.state.open(generation)
                self._lateness.resumed()
                self._to_send.notify_all()
        run_all([opened])

    def wait_until_over(self, generation: int, timeout: float) -> bool:
        """Wait until a generation has broken or was closed; False after ``timeout`` seconds."""
        with self._lock:
            return self._idle.wait_for(
                lambda: self.state.over(generation), min(timeout, threading.TIMEOUT_MAX)
            )

    def wait_until_idle(self, timeout: float) -> bool:
        """Wait until no call is queued or in flight; False after ``timeout`` seconds."""
        with self._lock:
            return self._idle.wait_for(
                lambda: self.queued.empty, min(timeout, threading.TIMEOUT_MAX)
            )

    def wait_until(self, true: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until ``true()``, which needs other threads; False at the deadline.

        Releases the lock meanwhile: those threads may need it, and a signal handler that ends the
        pool may run inside a block that holds it.
        """
        with self._lock:
            while not true():
                if deadline.expired:
                    return False
                self._idle.wait(_LOOK_SECONDS)
            return True

    def accept(self, call: PendingCall, generation: int, *, may_send: bool = True) -> bool:
        """Accept a call; True: the caller must send it now, else it is queued.

        After True, the caller sends it to the workers of ``generation``, or calls `unsent` or
        `abandon`. ``may_send``: no other thread is sending. Raises as `PoolState.check`.
        """
        with self._lock:
            self.state.check()
            if not may_send or self.state.over(generation) or not self.queued.open:
                self.queued.enqueue(call)
                self._to_send.notify_all()
                return False
            self.queued.begin(call)
            return True

    def queue(self, call: PendingCall) -> None:
        """Queue a call for `next_to_send`, or raise as `PoolState.check`."""
        with self._lock:
            self.state.check()
            self.queued.enqueue(call)
            self._to_send.notify_all()
            sooner = self._lateness.watch(call)
        if sooner:
            self._hooks.clock()

    def wait_until_done(self, call: PendingCall, timeout: float) -> bool:
        """Wait until an accepted call is done; False after ``timeout`` seconds.

        Only the thread that made it may wait, until this returns True.
        """
        with self._lock:
            ending = call.ending()
        return ending.acquire(timeout=min(timeout, threading.TIMEOUT_MAX))

    def wait_to_send(self, generation: int) -> bool:
        """Wait for a queued call that can be sent; False once the generation is over."""
        with self._lock:
            self._to_send.wait_for(lambda: self.state.over(generation) or self.queued.sendable)
            return not self.state.over(generation)

    def next_to_send(self, generation: int) -> PendingCall | None:
        """Return the next queued call that can be sent, or ``None``; one thread sends at a time.

        The caller must send it, or call `abandon`.
        """
        with self._lock:
            while self.queued.sendable and not self.state.over(generation):
                call = self.queued.next()
                if call.begin():
                    self.queued.begin(call)
                    return call
                # Cancelled or done.
                self._lateness.forget(call)
                if self.queued.empty:
                    self._idle.notify_all()
            return None

    def unsent(self, call: PendingCall) -> None:
        """Record that no worker receives ``call``, and that its caller raises an error."""
        with self._lock:
            if self.queued.find(call.number) is call:
                self.queued.unsent(call)
                self._stuck.forget(call)
                self.queued.follow_up(call)
                self._notify_waiters()

    def abandon(self, call: PendingCall, error: BaseException | None = None) -> None:
        """Abandon a call whose send or receive was interrupted; ``error`` is for its future.

        A no-op call is queued behind it; calls still unanswered when that returns are lost.
        """
        with self._lock:
            self.give_up(call)
            self.cancel(call)
            actions = [*self._settle_again(), self._hooks.clock]
            if self.queued.busy and self.state.works:
                self.queued.follow_up(call)
                self._to_send.notify_all()
            call.error = call.error or error
            actions += [] if call.error is None else [call.finish(self._name)]
        run_all(actions)

    def due(self, call: PendingCall) -> Deadline:
        """Return the current deadline of a call; each answer to another call may extend it."""
        with self._lock:
            return self._lateness.due(call)

    def late(self, call: PendingCall) -> list[int]:
        """Return the ranks that have not answered a call; none if it was not sent."""
        with self._lock:
            return sorted(call.waiting) if call.number else []

    def give_up(self, call: PendingCall) -> None:
        """Remove ``call`` from the queue if it was not sent."""
        with self._lock:
            self.queued.withdraw(call)
            self._lateness.forget(call)
            if self.queued.empty:
                self._idle.notify_all()

    def cancel(self, call: PendingCall) -> None:
        """Set the workers' cancellation flag of ``call``, if it is in flight."""
        with self._lock:
            if self.queued.find(call.number) is call:
                self._mark(call.number)

    def expire(self, call: PendingCall, error: CallTimeoutError) -> None:
        """Fail ``call`` because it is late, unless it is done."""
        with self._lock:
            call.error = call.error or error
            action = call.finish(self._name)
        action()

    def replied(self, rank: int, reply: Reply) -> None:
        """Handle the reply of ``rank``."""
        with self._lock:
            call = self.queued.find(reply.number)
            is_oldest = call is self.queued.oldest
            actions = [] if is_oldest else self._spoil_before(rank, reply.number)
            if call is not None:
                call.answer(rank, reply.value, reply.begun)
                actions += self._settle(call)
        run_all(actions)

    def garbled(
        self, rank: int, error: MessageDecodeError | SharedMemoryError, generation: int
    ) -> None:
        """Handle a reply of ``rank`` that ``error`` made unreadable."""
        with self._lock:
            call = None if self.state.over(generation) else self.queued.oldest_of(rank)
            actions: Actions = []
            if call is not None:
                text = f"the reply of rank {rank} to {call.method} cannot be read: {error}"
                spoiled = type(error)(text)
                spoiled.__cause__ = error
                call.spoil(rank, spoiled)
                actions = self._settle(call)
        run_all(actions)

    def failed(self, rank: int, failed: Failed, final: bool) -> None:
        """Handle the failure of a call on ``rank``, which blocks until it is resumed.

        It may overtake the rank's replies to earlier calls: it uses the control channel.
        ``final``: the board is aborted, so no other rank answers.
        """
        with self._lock:
            call = self.queued.find(failed.number)
            if call is None:
                where = f"call {failed.number}" if failed.number else "no call"
                actions = self._break_off(rebuild(failed, rank, where))
            else:
                actions = []
                detail = self.queued.told() if failed.diverged else ""
                error = rebuild(failed, rank, call.method, detail)
                call.cut_off |= final
                call.fail(rank, error, failed)
                # The caller gets the error at once, unless it is a secondary failure: the root
                # cause's report may follow.
                if not (failed.consequence or call.retry):
                    actions.append(call.finish(self._name))
                actions += self._clock()
                if not final:
                    actions += self._settle(call)
                elif not failed.consequence or (call.settled and not self.reason_due()):
                    actions += self._break_with(call)
            actions.append(self._hooks.wake)
        run_all(actions)

    def tick(self) -> float:
        """Break the pool if it is due, and report late and stuck calls; return seconds to the next.

        One thread calls this, and not the main thread. It breaks the pool for a recorded failure,
        or for a failed call that was not answered in time.
        """
        actions: Actions = []
        with self._lock:
            awaits_reason = self._awaits_reason()
            if not awaits_reason:
                actions += self._break_if_unsettled()
            actions += self._break()
            if self._moves_on:
                self._moves_on = False
                if self.state.restarting is not None and self.move is not None:
                    actions.append(partial(self._move, self._withdraw_all()))
            if self.state.closed:
                actions += self._settle_again()
            self._stuck.watch(self.queued.oldest)
            stuck = self._stuck.passed()
            late, next_look = self._lateness.look()
            settling_left = math.inf if awaits_reason else self._settling.next_look()
            left = min(settling_left, self._stuck.next_look(), next_look, self._look_seconds)
        if stuck is not None:
            actions.append(partial(self._hooks.stuck, stuck))
        if late:
            actions.append(partial(self._hooks.late, late))
        run_all(actions)
        return max(left, 0.0)

    def break_off(self, error: CoordinatorError, generation: int | None = None) -> None:
        """Break the pool because of ``error``, if ``generation`` (``None``: any) is current."""
        with self._lock:
            late = generation is not None and self.state.over(generation)
            actions = [] if late else self._break_off(error)
        run_all(actions)

    def move_on(self) -> None:
        """Have `tick` offer the calls that wait for a restart to other trackers again."""
        self._moves_on = True
        self._hooks.clock()

    def end(self, error: CoordinatorError) -> None:
        """End the pool because of ``error``, or close it (`PoolClosedError`); first error wins."""
        if in_main_thread():
            self.move = None  # a signal handler's exception would lose calls that are being moved
        with self._lock:
            before = self._break()  # a failure that was recorded before
            if self.state.ended is None:
                self.state.end(error)
        # The clock first: `tick` completes what a signal handler interrupts here.
        run_all([self._hooks.clock, *before])
        with self._lock:
            actions = self._break() or self._settle_again()
        run_all(actions)

    def let_go(self) -> None:
        """Drop all callbacks after `end`.

        This breaks the reference cycle with the owner, whose shared memory is then freed at once.
        """
        self._hooks = CallTrackerCallbacks(*(ignore,) * 6)
        self._mark = ignore
        self.move = None
        self.opened = self.reason_due = ignore
        self.state.let_go()

    def _spoil_before(self, rank: int, number: int) -> Actions:
        """Count replies of ``rank`` to calls before ``number`` as lost.

        A rank's replies arrive in order. If one is missing, a signal handler has interrupted the
        thread that dequeued it, or that was sending the call.
        """
        actions = self._settle_again()
        while (call := self.queued.oldest_of(rank)) is not None and call.number < number:
            lost = "a signal handler interrupted the thread that sent the call or took the reply"
            call.spoil(rank, WorkerError(rank, call.method, "KeyboardInterrupt", lost, ""))
            actions += self._settle(call)
        return actions

    def _settle_again(self) -> Actions:
        """Return actions of answered and lost calls that a handler may have skipped; idempotent."""
        actions = [action for call in self.queued.settling for action in self._due(call)]
        actions += [action for call in self.queued.answered for action in self._settle(call)]
        if actions and self.state.closed:
            actions.insert(0, self._hooks.wake)
        self._notify_waiters()
        return [*actions, *self._clock()]

    def _settle(self, call: PendingCall) -> Actions:
        """Return a result or break the pool, if all ranks answered without an abort."""
        if not call.settled or call.cut_off or not self.state.works:
            return []
        diverged = call.compare()
        if diverged is not None:
            call.error = call.error or call.failure or diverged
            return [call.finish(self._name), *self._break_off(call.failure or diverged)]
        self._lateness.answered(call)
        self._stuck.forget(call)
        self.queued.settle(call)
        self._notify_waiters()
        return [*self._due(call), *self._clock()]

    def _due(self, call: PendingCall) -> Actions:
        resumed = [partial(self._hooks.resume, rank, call.number) for rank in call.failed]
        return [call.finish(self._name), *resumed, partial(self.queued.settled, call)]

    def _notify_waiters(self) -> None:
        if self.queued.sendable:
            self._to_send.notify_all()
        elif self.queued.empty:
            self._idle.notify_all()

    def _clock(self) -> Actions:
        """Time the oldest call if a rank has failed it; its caller gets the error at once."""
        oldest = self.queued.oldest
        failed = oldest if oldest is not None and oldest.failed else None
        actions = [self._hooks.clock] if self._settling.watch(failed) else []
        if failed is not None and failed.error is not None:
            actions.append(failed.finish(self._name))
        return actions

    def _awaits_reason(self) -> bool:
        """Return whether the root cause of the failed call may still be reported."""
        failed = self._settling.call
        return failed is not None and failed.hearsay and bool(self.reason_due())

    def _break_if_unsettled(self) -> Actions:
        """Break the pool with the failed call after its time, or an abort's reason."""
        failed = self._settling.call
        if failed is None or not (failed.settled and failed.cut_off):
            failed = self._settling.passed()
        return [] if failed is None else self._break_with(failed)

    def _break_with(self, call: PendingCall) -> Actions:
        return [] if call.failure is None else self._break_off(call.failure)

    def _break_off(self, error: CoordinatorError) -> Actions:
        if self.state.works:
            self.state.break_off(error)
        # A signal handler may interrupt the main thread: `tick` breaks the pool.
        return [self._hooks.clock] if in_main_thread() else self._break()

    def _break(self) -> Actions:
        """Fail all calls, or queue them for the next generation, if a failure was recorded."""
        state, error = self.state, self.state.breaking
        if error is None:
            return []
        moving = self.move is not None and not state.closed
        self.queued.lose(error, again=state.ended is None or moving)
        waiting = self._withdraw_all() if moving else []
        self._stuck.watch(None)
        # For `wait_to_send`, `wait_until_over` and `wait_until_idle`.
        self._to_send.notify_all()
        self._idle.notify_all()
        state.breaking = None
        if state.closed:
            return self._settle_again()
        # `broke` also wakes the threads; after it the owner may free what `wake` needs.
        broke = partial(self._hooks.broke, error)
        return [broke, *self._settle_again(), partial(self._move, waiting)]

    def _withdraw_all(self) -> list[PendingCall]:
        waiting = self.queued.withdraw_all()
        for call in waiting:
            self._lateness.forget(call)
        return waiting

    def _move(self, waiting: list[PendingCall]) -> None:
        """Offer calls to other trackers; queue those that stay, or fail them if the pool ended."""
        move = self.move  # read once: `let_go` may reset it
        staying = waiting if move is None else move(waiting)
        actions: Actions = []
        sooner = False
        with self._lock:
            for call in staying:
                if self.state.ended is None:
                    sooner |= self._lateness.watch(call)
                else:
                    call.error = call.error or self.state.ended
                    actions.append(call.finish(self._name))
            if self.state.ended is None:
                self.queued.put_back(staying)
                self._to_send.notify_all()
        if sooner:
            actions.append(self._hooks.clock)
        run_all(actions)
