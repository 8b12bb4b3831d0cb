"""The book of a pool's calls: which are queued, which are under way, and what their answers mean.

No processes and no queues here: a dispatcher sends what the ledger says, and tells it what came
back.

Guarantees
- Calls are sent in the order in which they were accepted, by one thread at a time.
- At most ``in_flight`` calls are under way; a call is under way until every rank has answered it.
- A rank that has failed a call may go on once every rank has answered that call, and only if all
  ranks began equally many group operations in it. Otherwise some are half done, the next call's
  would be taken for them, and the pool breaks with that failure.
- The first failure ends the pool; it fails every call, and refuses later ones.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from server.errors import PoolClosedError, WorkerError, again
from server.failures import rebuild

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
        broke: ``(error)``: the pool broke; called once.
    """

    resume: Callable[[int, int], None]
    wake: Callable[[], None]
    broke: Callable[[CoordinatorError], None]


class Ledger:
    """The calls of one pool. Any thread may use it.

    Args:
        n_ranks: how many workers answer each call.
        in_flight: how many calls may be under way.
        settle_seconds: how long ranks have to answer a call that one of them has failed.
        hooks: what the owner does.
    """

    def __init__(
        self, n_ranks: int, in_flight: int, settle_seconds: float, hooks: LedgerHooks
    ) -> None:
        self._n_ranks = n_ranks
        self._in_flight = in_flight
        self._settle_seconds = settle_seconds
        self._hooks = hooks
        # Re-entrant: a forgotten pool is closed by the garbage collector, in whichever thread.
        self._lock = threading.RLock()
        self._to_send = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._last = 0
        self._sending = False
        self._under_way: dict[int, PendingCall] = {}
        self._queued: deque[PendingCall] = deque()
        self._settle_by: dict[int, float] = {}
        self._end: CoordinatorError | None = None
        self._ended = threading.Event()

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._under_way)

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
            return self._idle.wait_for(lambda: not self._under_way and not self._queued, timeout)

    def accept(self, call: PendingCall) -> bool:
        """Take a call in; whether the caller has to send it now (`sent` or `unsent` follows).

        Raises:
            What broke the pool, or `PoolClosedError`.
        """
        with self._lock:
            self.check()
            if self._queued or not self._may_send():
                self._queued.append(call)
                self._to_send.notify()
                return False
            self._begin(call)
            return True

    def queue(self, call: PendingCall) -> None:
        """Take a call in, for the thread that sends queued calls.

        Raises:
            What broke the pool, or `PoolClosedError`.
        """
        with self._lock:
            self.check()
            self._queued.append(call)
            self._to_send.notify()

    def future(self, call: PendingCall) -> Future[Any]:
        """The future of a call that was taken in."""
        with self._lock:
            return call.future()

    def next_to_send(self) -> PendingCall | None:
        """Wait for a queued call that can be sent, for the caller to do so; ``None`` at the end."""
        with self._lock:
            while True:
                self._to_send.wait_for(
                    lambda: self._end is not None or (self._queued and self._may_send())
                )
                if self._end is not None:
                    return None
                call = self._queued.popleft()
                if call.begin():
                    self._begin(call)
                    return call

    def sent(self) -> None:
        """The sending of a call is over; another may be sent."""
        with self._lock:
            self._sending = False
            if self._queued:
                self._to_send.notify()

    def unsent(self, call: PendingCall, error: BaseException | None) -> None:
        """The sending of a call is over; no worker got it: because of ``error``, or given up."""
        with self._lock:
            self._sending = False
            self._last -= 1
            del self._under_way[call.number]
            call.number = 0
            self._to_send.notify()
            call.error = error
            actions = [] if error is None else [call.finish()]
        _run(actions)

    def give_up(self, call: PendingCall) -> list[int]:
        """Wait for ``call`` no more; the ranks that had not answered.

        A call that is still queued is taken back: no rank ever gets it.
        """
        with self._lock:
            if call in self._queued:
                self._queued.remove(call)
            return sorted(call.waiting) if call.number else []

    def replied(self, rank: int, reply: Reply) -> None:
        """``rank`` has answered."""
        with self._lock:
            actions = self._spoil_before(rank, reply.number)
            call = self._under_way.get(reply.number)
            if call is not None:
                call.answer(rank, reply.value, reply.operations)
                actions += self._settle(call)
        _run(actions)

    def garbled(self, rank: int, error: BaseException) -> None:
        """``rank`` has answered, and nobody knows what: ``error``."""
        with self._lock:
            call = self._oldest(rank)
            actions: Actions = []
            if call is not None:
                call.spoil(rank, error)
                actions = self._settle(call)
        _run(actions)

    def failed(self, rank: int, failed: Failed, final: bool) -> None:
        """``rank`` has failed a call, and waits to be told to go on.

        Args:
            rank: who.
            failed: what it told.
            final: the board is aborted: no other rank will answer any more.
        """
        with self._lock:
            call = self._under_way.get(failed.number)
            if call is None:
                actions = self._break(rebuild(failed, rank, f"call {failed.number}"))
            else:
                actions = self._spoil_before(rank, failed.number)
                error = rebuild(failed, rank, call.method)
                call.fail(rank, error, failed.operations, failed.consequence)
                if not failed.consequence:
                    actions.append(call.finish())
                self._settle_by.setdefault(call.number, time.monotonic() + self._settle_seconds)
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
            if not self._settle_by:
                return math.inf
            number, at = next(iter(self._settle_by.items()))
            left = at - time.monotonic()
            if left <= 0:
                call = self._under_way[number]
                actions = self._break_with(call)
        _run(actions)
        return max(left, 0.0)

    def end(self, error: CoordinatorError) -> None:
        """The pool breaks with ``error``, or is closed; nothing if it was ended before."""
        with self._lock:
            actions = self._break(error)
        _run(actions)

    def _may_send(self) -> bool:
        return not self._sending and len(self._under_way) < self._in_flight

    def _begin(self, call: PendingCall) -> None:
        self._sending = True
        self._last += 1
        call.number = self._last
        self._under_way[call.number] = call

    def _oldest(self, rank: int) -> PendingCall | None:
        for call in self._under_way.values():
            if rank in call.waiting:
                return call
        return None

    def _spoil_before(self, rank: int, number: int) -> Actions:
        """Replies come in order: one that did not come was dropped by an interrupted listener."""
        actions: Actions = []
        while (call := self._oldest(rank)) is not None and call.number < number:
            lost = "the reply was lost when the thread that took it was interrupted"
            call.spoil(rank, WorkerError(rank, call.method, "KeyboardInterrupt", lost, ""))
            actions += self._settle(call)
        return actions

    def _settle(self, call: PendingCall) -> Actions:
        if not call.settled:
            return []
        del self._under_way[call.number]
        self._settle_by.pop(call.number, None)
        if self._queued:
            self._to_send.notify()
        elif not self._under_way:
            self._idle.notify_all()
        actions: Actions = [call.finish()]
        if call.matched:
            actions += [partial(self._hooks.resume, rank, call.number) for rank in call.failed]
        elif call.failed:
            actions += self._break_with(call)
        return actions

    def _break_with(self, call: PendingCall) -> Actions:
        return [] if call.failure is None else self._break(call.failure)

    def _break(self, error: CoordinatorError) -> Actions:
        if self._end is not None:
            return []
        self._end = error
        doomed = [*self._under_way.values(), *self._queued]
        for pending in (self._under_way, self._queued, self._settle_by):
            pending.clear()
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
