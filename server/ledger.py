"""The book of a pool's calls: which are queued, which are under way, and what their answers mean.

No processes and no queues here: a dispatcher sends what the ledger says, and tells it what came
back.

Guarantees
- Calls are sent in the order in which they were accepted, by one thread at a time.
- At most ``in_flight`` calls are under way; a call is under way until every rank has answered it.
- A rank that has failed a call may go on once every rank has answered that call, and only if all
  ranks began equally many group operations in it, or those that failed have refused it in order.
  Otherwise some operations are half done, the next call's would be taken for them, and the pool
  breaks with that failure. It breaks as well if ranks are late to answer a call that one of them
  has failed, counted from when they have answered all calls before it.
- The first failure ends the pool; it fails every call, and refuses later ones.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from server.backlog import Backlog
from server.errors import PoolClosedError, WorkerError, again
from server.failures import rebuild
from server.settling import SettleClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from server.calls import PendingCall
    from server.messages import Failed, Reply
    from shm_broadcast import CoordinatorError

    Actions: TypeAlias = "list[Callable[[], None]]"

_BROKEN = "The pool broke with this failure and takes no more calls."


@dataclass(frozen=True, slots=True)
class LedgerHooks:
    """What a ledger asks its owner to do; called without locks, from whichever thread it is.

    Attributes:
        resume: ``(rank, number)``: tell a rank to go on after the call of that number.
        wake: a call became done by other means than a reply: wake whoever listens for replies.
        clock: a failed call is waited for from now on: call `Ledger.tick`.
        broke: ``(error)``: the pool broke; called once.
    """

    resume: Callable[[int, int], None]
    wake: Callable[[], None]
    clock: Callable[[], None]
    broke: Callable[[CoordinatorError], None]


class Ledger:
    """The calls of one pool. Any thread may use it.

    Args:
        in_flight: how many calls may be under way.
        settle_seconds: how long ranks have to answer a call that one of them has failed.
        hooks: what the owner does.
    """

    def __init__(self, in_flight: int, settle_seconds: float, hooks: LedgerHooks) -> None:
        self._hooks = hooks
        self._lock = threading.Lock()
        self._to_send = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._calls = Backlog(in_flight)
        self._settling = SettleClock(settle_seconds)
        self._end: CoordinatorError | None = None
        self._ended = threading.Event()

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return self._calls.busy

    @property
    def awaited(self) -> tuple[int, int]:
        """The number of the oldest call and a rank that has to answer it; 0, 0: there is none."""
        with self._lock:
            oldest = self._calls.oldest
            return (0, 0) if oldest is None else (oldest.number, min(oldest.waiting, default=0))

    @property
    def ended(self) -> CoordinatorError | None:
        """What broke the pool, or that it was closed; ``None`` while it takes calls."""
        return self._end

    def check(self) -> None:
        """Raise what broke the pool, or that it was shut down, if so."""
        if self._end is not None:
            raise again(self._end, "" if isinstance(self._end, PoolClosedError) else _BROKEN)

    def wait_for_end(self, timeout: float) -> bool:
        """Whether the pool is broken or closed within ``timeout`` seconds."""
        return self._ended.wait(timeout)

    def wait_until_idle(self, timeout: float) -> bool:
        """Whether no call is queued or under way within ``timeout`` seconds."""
        with self._lock:
            return self._idle.wait_for(lambda: self._calls.empty, timeout)

    def accept(self, call: PendingCall) -> bool:
        """Take a call in; whether the caller has to send it now (`sent` or `unsent` follows).

        Raises:
            What broke the pool, or `PoolClosedError`.
        """
        with self._lock:
            self.check()
            if not self._calls.open:
                self._calls.enqueue(call)
                self._to_send.notify()
                return False
            self._calls.begin(call)
            return True

    def queue(self, call: PendingCall) -> None:
        """Take a call in, for the thread that sends queued calls.

        Raises:
            What broke the pool, or `PoolClosedError`.
        """
        with self._lock:
            self.check()
            self._calls.enqueue(call)
            self._to_send.notify()

    def future(self, call: PendingCall) -> Future[Any]:
        """The future of a call that was taken in."""
        with self._lock:
            return call.future()

    def next_to_send(self) -> PendingCall | None:
        """Wait for a queued call that can be sent, for the caller to do so; ``None`` at the end."""
        with self._lock:
            while True:
                self._to_send.wait_for(lambda: self._end is not None or self._calls.sendable)
                if self._end is not None:
                    return None
                call = self._calls.next()
                if call.begin():
                    self._calls.begin(call)
                    return call
                if self._calls.empty:
                    self._idle.notify_all()

    def sent(self) -> None:
        """The sending of a call is over; another may be sent."""
        with self._lock:
            self._calls.sent()
            if self._calls.sendable:
                self._to_send.notify()

    def unsent(self, call: PendingCall, error: BaseException | None) -> None:
        """The sending of a call is over; no worker got it: because of ``error``, or given up."""
        with self._lock:
            actions: Actions = []
            if self._end is None:
                self._calls.unsent(call)
                self._left()
                call.error = error
                actions = [] if error is None else [call.finish()]
        _run(actions)

    def give_up(self, call: PendingCall) -> list[int]:
        """Wait for ``call`` no more; the ranks that had not answered.

        A call that is still queued is taken back: no rank ever gets it.
        """
        with self._lock:
            self._calls.withdraw(call)
            if self._calls.empty:
                self._idle.notify_all()
            return sorted(call.waiting) if call.number else []

    def replied(self, rank: int, reply: Reply) -> None:
        """``rank`` has answered."""
        with self._lock:
            actions = self._spoil_before(rank, reply.number)
            call = self._calls.find(reply.number)
            if call is not None:
                call.answer(rank, reply.value, reply.operations)
                actions += self._settle(call)
        _run(actions)

    def garbled(self, rank: int, error: BaseException) -> None:
        """``rank`` has answered, and nobody knows what: ``error``."""
        with self._lock:
            call = self._calls.oldest_of(rank)
            actions: Actions = []
            if call is not None:
                call.spoil(rank, error)
                actions = self._settle(call)
        _run(actions)

    def failed(self, rank: int, failed: Failed, final: bool) -> None:
        """``rank`` has failed a call, and waits to be told to go on.

        Its replies to earlier calls may still be on their way: they travel elsewhere.

        Args:
            rank: who.
            failed: what it told.
            final: the board is aborted: no other rank will answer any more.
        """
        with self._lock:
            call = self._calls.find(failed.number)
            if call is None:
                actions = self._break(rebuild(failed, rank, f"call {failed.number}"))
            else:
                actions = []
                error = rebuild(failed, rank, call.method)
                call.fail(rank, error, failed)
                if not failed.consequence:
                    actions.append(call.finish())
                actions += self._clock()
                if not final:
                    actions += self._settle(call)
                elif call.settled or not failed.consequence:
                    actions += self._break_with(call)
            actions.append(self._hooks.wake)
        _run(actions)

    def tick(self) -> float:
        """Break the pool if a failed call is overdue; in how many seconds the next one will be."""
        actions: Actions = []
        with self._lock:
            left = self._settling.left()
            if left <= 0 and self._settling.call is not None:
                actions = self._break_with(self._settling.call)
        _run(actions)
        return max(left, 0.0)

    def end(self, error: CoordinatorError) -> None:
        """The pool breaks with ``error``, or is closed; nothing if it was ended before."""
        with self._lock:
            actions = self._break(error)
        _run(actions)

    def _spoil_before(self, rank: int, number: int) -> Actions:
        """Replies come in order: one that did not come was dropped by an interrupted listener."""
        actions: Actions = []
        while (call := self._calls.oldest_of(rank)) is not None and call.number < number:
            lost = "the reply was lost when the thread that took it was interrupted"
            call.spoil(rank, WorkerError(rank, call.method, "KeyboardInterrupt", lost, ""))
            actions += self._settle(call)
        return actions

    def _settle(self, call: PendingCall) -> Actions:
        if not call.settled:
            return []
        self._calls.settle(call)
        self._left()
        actions: Actions = [call.finish(), *self._clock()]
        if call.matched:
            actions += [partial(self._hooks.resume, rank, call.number) for rank in call.failed]
        elif call.failed:
            actions += self._break_with(call)
        return actions

    def _left(self) -> None:
        """A call is under way no more."""
        if self._calls.sendable:
            self._to_send.notify()
        elif self._calls.empty:
            self._idle.notify_all()

    def _clock(self) -> Actions:
        """Wait for the oldest call from now on, if a rank has failed it."""
        return [self._hooks.clock] if self._settling.watch(self._calls.oldest) else []

    def _break_with(self, call: PendingCall) -> Actions:
        return [] if call.failure is None else self._break(call.failure)

    def _break(self, error: CoordinatorError) -> Actions:
        if self._end is not None:
            return []
        self._end = error
        doomed = self._calls.clear()
        self._clock()
        self._ended.set()
        self._to_send.notify_all()
        self._idle.notify_all()
        for call in doomed:
            call.error = call.error or error
        closed = isinstance(error, PoolClosedError)
        broke: Actions = [] if closed else [partial(self._hooks.broke, error)]
        return [*broke, *(call.finish() for call in doomed), self._hooks.wake]


def _run(actions: Actions) -> None:
    for action in actions:
        action()
