"""Keep the state of a pool's calls: which are queued, which are in flight, what replies mean.

Actions are collected under the ledger's lock, and run after it was released.

Plain bookkeeping, guarded by the ledger's lock; reading needs no lock. A failure is noted by
assignments with no call between them. Python runs signal handlers only after calls, so when one
raises, the failure is noted completely or not at all, and one that ends the pool takes effect.

No processes and no queues here: the dispatcher sends the calls that the ledger tells it to, and
reports the replies.

Guarantees
- Calls are sent in the order in which they were accepted, by one thread at a time.
- No two calls have the same number, so no reply is taken for another call's.
- At most ``in_flight`` calls are under way; a call is under way until every rank has answered it.
- A signal handler may raise in the main thread: then it is unknown whether its call was sent, or
  which replies were taken. A void call follows, and calls that are not answered before it are lost;
  for calls that all ranks had answered, pending actions are run then. No other thread is
  interrupted, so the main thread only notes why the pool breaks; the thread that calls `tick`
  breaks it.
- A result is handed out only when all ranks have answered that call and every earlier one, and did
  the same in each: they began the same collectives, and all messages were received. If they did
  not, an operation is left half done that the next call would meet, so the pool breaks.
- A rank that has failed a call is told to go on when every rank has answered that call, under the
  same condition. The pool breaks if that takes longer than ``settle_seconds``, counted from when
  all earlier calls were answered.
- A call belongs to the generation of workers for which it was accepted. The first failure that
  breaks the pool fails all its calls, queued ones too, and is raised from every later one. If the
  pool is restarted, calls that may be made again, and later ones, wait for the next generation.
- The error of a call that may be made again waits for the answers to the calls before it: one of
  these may be the cause, and breaks the pool then.

Locking: one lock guards all state. Hooks and futures' callbacks are collected as "actions" under
the lock and run after it was released: they write to sockets, wake threads and run users' code,
which may call the pool again and would wait for this very lock.
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
    """What a ledger asks its owner to do. Called by any thread, without the ledger's lock.

    Attributes:
        resume: ``(rank, number)``: tell the rank, which has failed call ``number``, to go on.
        wake: wake the thread that listens for replies: a call ended without a reply.
        clock: call `CallTracker.tick` now: it has to look earlier than it said last, or to break
        the
            pool.
        broke: ``(error)``: the pool broke; called once in each generation.
        late: ``(calls)``: these calls are late: call `CallTracker.expire`. Each call once.
        stuck: ``(call)``: this call has been the oldest one for too long. Each call once.
    """

    resume: Callable[[int, int], None]
    wake: Callable[[], None]
    clock: Callable[[], None]
    broke: Callable[[CoordinatorError], None]
    late: Callable[[list[PendingCall]], None]
    stuck: Callable[[PendingCall], None]


def run_all(actions: Actions) -> None:
    """Run the actions in order.

    Raises:
        BaseException: in the main thread, what a signal handler, or an action, raises; the rest is
            not done then. In other threads that is logged.
    """
    for action in actions:
        try:
            action()
        except BaseException:
            if in_main_thread():  # maybe a signal handler's
                raise
            _log.exception("what a user of the pool wants to be called has raised")


def in_main_thread() -> bool:
    """Whether this is the thread that signal handlers interrupt."""
    return threading.current_thread() is threading.main_thread()


def ignore(*_: object) -> None:
    """Do nothing."""


_BROKEN = "The pool broke with this failure and takes no more calls."


class PoolState:
    """The state of a pool. Not thread-safe.

    Attributes:
        generation: the number of the generation that works, or worked last; 0 before the first.
        restarts: how often there was a new generation in the place of a broken one.
        last_failure: when the pool broke last, in seconds since the epoch, and why.
        ended: what broke the pool for good, or `PoolClosedError`; ``None`` while it takes calls.
        works: whether calls may go to the workers.
        breaking: a failure whose consequences for the calls are still to be drawn.

    Args:
        name: the pool's, for its errors; ``""``: none.
        restartable: whether it is restarted when it has broken, or ended.
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
        """What broke the pool, while it is restarted because of that."""
        if self.works or self.ended is not None or self.last_failure is None:
            return None
        return self.last_failure[1]

    @property
    def closed(self) -> bool:
        """Whether the pool was closed, and had not broken before."""
        return isinstance(self.ended, PoolClosedError)

    def over(self, generation: int) -> bool:
        """Whether the workers of ``generation`` take no more calls."""
        return not self.works or generation != self.generation

    def check(self) -> None:
        """Raise the error that broke the pool, or `PoolClosedError`; nothing while it is usable."""
        if self.ended is not None:
            raise again(self.ended, "" if self.closed else _BROKEN)

    def open(self, generation: int) -> None:
        """Begin a generation, whose number is higher than those before."""
        restarted = self.generation > 0
        self.generation = generation
        self.works = True
        # Whoever sees the restart counted must not find the pool restarting any more.
        self.restarts += restarted

    def break_off(self, error: CoordinatorError) -> None:
        """Note what broke the generation that works."""
        self._fail(error, ends=not self._restartable)

    def end(self, error: CoordinatorError) -> None:
        """Note what ended the pool for good."""
        self._fail(error, ends=True)

    def let_go(self) -> None:
        """Keep no memory of where the failure came from, once no thread is there any more."""
        if self.last_failure is not None:
            free_frames(self.last_failure[1])

    def _fail(self, error: CoordinatorError, *, ends: bool) -> None:
        error = located(again(error), self._name)  # the pool keeps it
        closed = isinstance(error, PoolClosedError)
        last = self.last_failure if closed else (time.time(), error)
        ended = error if ends else None
        if self.ended is None:
            self.works, self.breaking, self.ended, self.last_failure = False, error, ended, last


_LOOK_SECONDS = 1e-3


class CallTracker:
    """The calls of one pool. Any thread may use it.

    Calls wait until `open` is called: when the workers are there, and again after each restart.

    Attributes:
        state: whether the pool takes calls, and why not. To be read.
        queued: the calls that are queued or under way. To be read.
        move: called when the pool breaks, and by `move_on`, with the calls that wait: those that it
            does not return are another ledger's from then on. ``None``: all stay.
        opened: called when the pool has been restarted.
        reason_due: whether a worker may still say why the board was aborted: until then, reports
            that only tell that it was do not break the pool. Called under the lock.

    Args:
        in_flight: how many calls may be under way at once.
        call_seconds: calls are late when none was answered for so long.
        settle_seconds: how long the other ranks have to answer a call that one of them has failed.
        name: the pool's, for its errors; ``""``: none.
        stuck_seconds: how long a call may be the oldest one, before it counts as stuck.
        restartable: whether the owner restarts the pool when it has broken, or calls `end`.
        hooks: the owner's functions.
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
        """The number of the oldest call under way, and a rank that has not answered it.

        0, 0 if no call is under way.
        """
        with self._lock:
            oldest = self.queued.oldest
            return (0, 0) if oldest is None else (oldest.number, min(oldest.waiting, default=0))

    @property
    def late_ranks(self) -> list[int]:
        """The ranks that have not answered the oldest call under way; none if there is no call."""
        with self._lock:
            oldest = self.queued.oldest
            return [] if oldest is None else sorted(oldest.waiting)

    def idle(self, rank: int) -> str | None:
        """The method of the last call, if ``rank`` has answered all; ``None`` while it has not.

        ``""`` if there was no call yet.
        """
        with self._lock:
            busy = self.queued.oldest_of(rank) is not None
            return None if busy else self.queued.last_settled

    def oldest_of(self, rank: int) -> PendingCall | None:
        """The oldest call under way that ``rank`` has not answered; ``None`` if there is none."""
        with self._lock:
            return self.queued.oldest_of(rank)

    def open(self, generation: int, mark: Callable[[int], object]) -> None:
        """Let calls go to the workers of a new generation.

        Args:
            generation: its number, higher than those before.
            mark: called with the number of a call, which they have, and nobody waits for.
        """
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
        """Wait until no call is queued or under way; False after ``timeout`` seconds."""
        with self._lock:
            return self._idle.wait_for(
                lambda: self.queued.empty, min(timeout, threading.TIMEOUT_MAX)
            )

    def wait_until(self, true: Callable[[], bool], deadline: Deadline) -> bool:
        """Wait until ``true()``, which needs other threads; False at the deadline.

        A signal handler that ends the pool may have interrupted what holds the lock, and those
        threads may need it: it is free meanwhile.
        """
        with self._lock:
            while not true():
                if deadline.expired:
                    return False
                self._idle.wait(_LOOK_SECONDS)
            return True

    def accept(self, call: PendingCall, generation: int, *, may_send: bool = True) -> bool:
        """Take a call in. If it returns True, the caller must send the call now, to the workers of
        ``generation``, or call `unsent` or `abandon`; otherwise the call is queued.

        Args:
            call: the call.
            generation: to which workers the caller can send.
            may_send: whether the caller may send now: no other thread does.

        Raises:
            What broke the pool, or `PoolClosedError`.
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
        """Queue a call for the thread that calls `next_to_send`; `tick` reports it if it is late.

        Raises:
            What broke the pool, or `PoolClosedError`.
        """
        with self._lock:
            self.state.check()
            self.queued.enqueue(call)
            self._to_send.notify_all()
            sooner = self._lateness.watch(call)
        if sooner:
            self._hooks.clock()

    def wait_until_done(self, call: PendingCall, timeout: float) -> bool:
        """Wait until ``call``, which was taken in, is done; False after ``timeout`` seconds.

        Only the thread that made the call may wait for it, until this returns True.
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
        """The next queued call; the caller must send it, or call `abandon`. ``None`` if there is
        none, or none can be sent. One thread sends at a time.
        """
        with self._lock:
            while self.queued.sendable and not self.state.over(generation):
                call = self.queued.next()
                if call.begin():
                    self.queued.begin(call)
                    return call
                # Nobody waits for it: take the next one.
                self._lateness.forget(call)
                if self.queued.empty:
                    self._idle.notify_all()
            return None

    def unsent(self, call: PendingCall) -> None:
        """Note that ``call`` was not sent, no worker gets it, and its caller knows."""
        with self._lock:
            if self.queued.find(call.number) is call:
                self.queued.unsent(call)
                self._stuck.forget(call)
                self.queued.follow_up(call)
                self._notify_waiters()

    def abandon(self, call: PendingCall, error: BaseException | None = None) -> None:
        """Note that its caller does not wait for ``call`` any more, and that it may not have been
        sent, or replies to it and to others may be lost: all that is not answered by the time when
        a void call is.

        Args:
            call: the call; one that is queued is not sent any more.
            error: what its future gets, if it has one.
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
        """Until when to wait for a call, as of now; later, once other calls were answered."""
        with self._lock:
            return self._lateness.due(call)

    def late(self, call: PendingCall) -> list[int]:
        """The ranks that have not answered a call; none if it was not sent."""
        with self._lock:
            return sorted(call.waiting) if call.number else []

    def give_up(self, call: PendingCall) -> None:
        """Take ``call`` off the queue if it is still there. One that was sent goes on."""
        with self._lock:
            self.queued.withdraw(call)
            self._lateness.forget(call)
            if self.queued.empty:
                self._idle.notify_all()

    def cancel(self, call: PendingCall) -> None:
        """Tell the workers that nobody waits for ``call``, if it is under way."""
        with self._lock:
            if self.queued.find(call.number) is call:
                self._mark(call.number)

    def expire(self, call: PendingCall, error: CallTimeoutError) -> None:
        """Fail ``call`` because it is late, unless its result is known."""
        with self._lock:
            call.error = call.error or error
            action = call.finish(self._name)
        action()

    def replied(self, rank: int, reply: Reply) -> None:
        """Take in the reply of ``rank``."""
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
        """Take in a reply of ``rank`` that cannot be read, because of ``error``."""
        with self._lock:
            call = None if self.state.over(generation) else self.queued.oldest_of(rank)
            actions: Actions = []
            if call is not None:
                told = f"what rank {rank} answers to {call.method} cannot be taken in: {error}"
                spoiled = type(error)(told)
                spoiled.__cause__ = error
                call.spoil(rank, spoiled)
                actions = self._settle(call)
        run_all(actions)

    def failed(self, rank: int, failed: Failed, final: bool) -> None:
        """Take in that ``rank`` has failed a call; it waits to be told to go on.

        Its replies to earlier calls may arrive after this: they come through its queue, failures
        through its control channel.

        Args:
            rank: the rank that failed.
            failed: its report.
            final: whether the board is aborted: no other rank will answer any more.
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
                # The caller gets the error at once. One that only says that another rank has failed
                # is kept back: that rank's own report is the better one.
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
        """Break the pool if that was noted, or if a failed call was not answered in time; report
        calls that are late, or stuck. One thread calls this, and it is not the main thread.

        Returns:
            The seconds until it has to be called again.
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
        """Break the pool because of ``error``; nothing if it has broken already.

        Args:
            error: what happened.
            generation: to which generation of workers; ``None``: the present one.
        """
        with self._lock:
            late = generation is not None and self.state.over(generation)
            actions = [] if late else self._break_off(error)
        run_all(actions)

    def move_on(self) -> None:
        """While the pool is restarted, have `tick` let other ledgers have the calls that wait, as
        when it broke: by now they may be answered there.
        """
        self._moves_on = True
        self._hooks.clock()

    def end(self, error: CoordinatorError) -> None:
        """End the pool for good because of ``error``, or close it (`PoolClosedError`). The first
        error counts; another call does what a signal handler has kept the first from.
        """
        if in_main_thread():
            self.move = None  # calls on their way would be lost with what a signal handler raises
        with self._lock:
            before = self._break()  # what was noted has a reason of its own
            if self.state.ended is None:
                self.state.end(error)
        # The clock first: what a signal handler keeps this thread from, `tick` does.
        run_all([self._hooks.clock, *before])
        with self._lock:
            actions = self._break() or self._settle_again()
        run_all(actions)

    def let_go(self) -> None:
        """Ask nobody any more, after `end`: the owner is freed with its last reference, not by a
        garbage collection, for which its shared memory would wait.
        """
        self._hooks = CallTrackerCallbacks(*(ignore,) * 6)
        self._mark = ignore
        self.move = None
        self.opened = self.reason_due = ignore
        self.state.let_go()

    def _spoil_before(self, rank: int, number: int) -> Actions:
        """Count replies of ``rank`` to calls before ``number`` as lost.

        A rank's replies come in order. If one is missing, a signal handler has interrupted the
        thread that took it out of the queue, or the one that was to send the call.
        """
        actions = self._settle_again()
        while (call := self.queued.oldest_of(rank)) is not None and call.number < number:
            lost = "a signal handler interrupted the thread that sent the call or took the reply"
            call.spoil(rank, WorkerError(rank, call.method, "KeyboardInterrupt", lost, ""))
            actions += self._settle(call)
        return actions

    def _settle_again(self) -> Actions:
        """What may not have been done for calls that all ranks have answered, or that are lost: a
        signal handler has interrupted it. To do it twice does no harm.
        """
        actions = [action for call in self.queued.settling for action in self._due(call)]
        actions += [action for call in self.queued.answered for action in self._settle(call)]
        if actions and self.state.closed:
            actions.insert(0, self._hooks.wake)
        self._notify_waiters()
        return [*actions, *self._clock()]

    def _settle(self, call: PendingCall) -> Actions:
        """If every rank has answered ``call``: compare the ranks, then hand out or break. One that
        is cut off waits for the reason.
        """
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
        """What is to be done for a call that is over."""
        resumed = [partial(self._hooks.resume, rank, call.number) for rank in call.failed]
        return [call.finish(self._name), *resumed, partial(self.queued.settled, call)]

    def _notify_waiters(self) -> None:
        """A call has left those under way: wake the sender, or `wait_until_idle`."""
        if self.queued.sendable:
            self._to_send.notify_all()
        elif self.queued.empty:
            self._idle.notify_all()

    def _clock(self) -> Actions:
        """Time the oldest call if a rank has failed it; ask for a `tick` if its time begins now.
        No call before it is the cause: its caller gets the error.
        """
        oldest = self.queued.oldest
        failed = oldest if oldest is not None and oldest.failed else None
        actions = [self._hooks.clock] if self._settling.watch(failed) else []
        if failed is not None and failed.error is not None:
            actions.append(failed.finish(self._name))
        return actions

    def _awaits_reason(self) -> bool:
        """Whether all that is known of the failed call is hearsay, and the reason may follow."""
        failed = self._settling.call
        return failed is not None and failed.hearsay and bool(self.reason_due())

    def _break_if_unsettled(self) -> Actions:
        """Break the pool with the failed call if its time has passed. One that is cut off, and that
        all ranks have answered, has only waited for the reason: it breaks the pool at once.
        """
        failed = self._settling.call
        if failed is None or not (failed.settled and failed.cut_off):
            failed = self._settling.passed()
        return [] if failed is None else self._break_with(failed)

    def _break_with(self, call: PendingCall) -> Actions:
        return [] if call.failure is None else self._break_off(call.failure)

    def _break_off(self, error: CoordinatorError) -> Actions:
        """Break the pool, if it works. The main thread, which a signal handler may interrupt, only
        notes why; `tick` does the rest.
        """
        if self.state.works:
            self.state.break_off(error)
        return [self._hooks.clock] if in_main_thread() else self._break()

    def _break(self) -> Actions:
        """Let all calls fail, or wait for the next generation, if the pool was to be broken.

        If it is closed, by a thread that a signal handler interrupts, the next one goes on here.
        """
        state, error = self.state, self.state.breaking
        if error is None:
            return []
        moving = self.move is not None and not state.closed
        self.queued.lose(error, again=state.ended is None or moving)
        waiting = self._withdraw_all() if moving else []
        self._stuck.watch(None)
        # Wakes `next_to_send`, `wait_until_over` and `wait_until_idle`, which look at what changed.
        self._to_send.notify_all()
        self._idle.notify_all()
        state.breaking = None
        if state.closed:
            return self._settle_again()
        # `broke` wakes all who wait, and after it the owner may take down what `wake` needs.
        told = partial(self._hooks.broke, error)
        return [told, *self._settle_again(), partial(self._move, waiting)]

    def _withdraw_all(self) -> list[PendingCall]:
        """Take all calls off the queue."""
        waiting = self.queued.withdraw_all()
        for call in waiting:
            self._lateness.forget(call)
        return waiting

    def _move(self, waiting: list[PendingCall]) -> None:
        """Let other ledgers have calls. Those that stay are queued again, or fail if it is over."""
        move = self.move  # read once: `let_go` may take it away meanwhile
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
