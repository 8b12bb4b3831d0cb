"""The table of a pool's calls: queued, in flight, answered, failed. Without I/O, locks and threads.

Invariants
- Calls are sent in the order of their submission, numbered 1, 2, ... without gaps.
- At most ``in_flight`` calls are in flight; a call is in flight until it settles.
- Calls settle in the order of their numbers. A call settles when every rank has answered or failed
  it, and began the same collectives and received all messages in it. If ranks differ, the pool
  breaks: an incomplete operation would match the next call's. Only then is a result returned, and
  do failed ranks resume. An error is returned at once, but that of a call with ``retry`` when all
  earlier calls have settled: one of these may be the cause.
- A rank replies in the order of the calls. A gap means that a reply is lost: the pool breaks.
- Nothing settles after an abort of the board. The pool then breaks with its root cause.
- A call belongs to the generation of workers for which it was submitted. The first failure that
  breaks the pool fails all its calls, queued ones too, and is raised from every later one. If the
  pool is restarted, calls with ``retry``, and later ones, wait for the next generation.

Signal handlers raise between any two steps of a method in the main thread. Each method stores the
decisive state first, and `tick`, in another thread, completes the rest.

Who may call: any thread that holds the owner's lock. Reading an attribute needs no lock. The owner
acts on `finished`, `resumable`, `moving` and `failure` without the lock, if `attention` is set.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from shm_broadcast import CoordinatorError, Deadline, MessageDecodeError, SharedMemoryError

from ..control.protocol import Failed, Reply, rebuild
from ..errors import PoolClosedError, WorkerLostError, again, free_frames, located

if TYPE_CHECKING:
    from .pending_call import PendingCall

REPORT_SECONDS = 5.0
"""Time in which a worker may report the exception for which it aborted the groups."""
_BROKEN = "The pool broke with this failure and takes no more calls."


def ignore(*_: object) -> None:
    """Do nothing."""


class Timer:
    """Measures how long the same key is watched, up to ``seconds``.

    A pause of all processes, as of a container, counts as at most a quarter of the limit.
    """

    def __init__(self, seconds: float) -> None:
        self.left = math.inf
        self._seconds = seconds
        self._key: object = None
        self._read_at = 0.0

    def watch(self, key: object, now: float) -> None:
        """Count the time since the last call, or start again with another key; ``None``: stop."""
        if key != self._key:
            self._key = key
            self.left = math.inf if key is None else self._seconds
        else:
            self.left -= min(now - self._read_at, self._seconds / 4)
        self._read_at = now

    @property
    def next_tick(self) -> float:
        """Return the seconds until the next call of `watch`."""
        return self.left if self.left == math.inf else max(min(self.left, self._seconds / 4), 0.0)


class DueCalls(NamedTuple):
    """Calls whose time is over: the result of `CallTable.tick`.

    Attributes:
        late: submitted calls whose deadline has passed; each once.
        stuck: the oldest call, after ``stuck_seconds``; once.
        seconds: the time until the next tick.
    """

    late: list[PendingCall]
    stuck: PendingCall | None
    seconds: float


class CallTable:
    """The calls of one pool. Calls wait until `open` is called: at first, and after each restart.

    Attributes:
        generation: the number of the current or last generation; 0 before the first.
        restarts: the number of restarts.
        works: whether calls may be sent to the workers.
        failure: the failure that broke the current generation, or ended the pool.
        last_failure: the time of the last failure, in seconds since the epoch, and the failure.
        ended: the failure that ended the pool, or `PoolClosedError`; ``None`` while it takes calls.
        in_flight: the calls in flight by number, in order; ``oldest`` is the first.
        queued: the calls that wait to be sent.
        last: the number of the last call that was sent.
        last_settled: the method of the last call of this generation that has settled; ``""``: none.
        finished: calls that are done, whose future is to be completed by `PendingCall.hand_out`.
        resumable: ranks to resume, and the number of the call that each has failed.
        moving: calls with `PendingCall.move` that are to be submitted to another pool.
        attention: whether the owner's thread has to call `tick`; that resets it.

    Args:
        in_flight: the most calls in flight.
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
        *,
        name: str = "",
        stuck_seconds: float = math.inf,
        restartable: bool = False,
    ) -> None:
        self.generation = 0
        self.restarts = 0
        self.works = False
        self.failure: CoordinatorError | None = None
        self.last_failure: tuple[float, CoordinatorError] | None = None
        self.ended: CoordinatorError | None = None
        self.in_flight: dict[int, PendingCall] = {}
        self.oldest: PendingCall | None = None
        self.queued: deque[PendingCall] = deque()
        self.last = 0
        self.last_settled = ""
        self.finished: dict[PendingCall, None] = {}
        self.resumable: dict[tuple[int, int], None] = {}
        self.moving: dict[PendingCall, None] = {}
        self.attention = False
        self._name = name
        self._restartable = restartable
        self._most_in_flight = in_flight
        self._call_seconds = call_seconds
        self._mark: Callable[[int], object] = ignore
        self._breaking: CoordinatorError | None = None
        self._abort: CoordinatorError | None = None
        self._exit: WorkerLostError | None = None
        self._answered_at = -math.inf
        self._next_tick = math.inf
        self._look_seconds = stuck_seconds / 4
        self._settling = Timer(settle_seconds)
        self._reporting = Timer(max(settle_seconds, REPORT_SECONDS))
        self._stuck = Timer(stuck_seconds)

    @property
    def restarting(self) -> CoordinatorError | None:
        """Return the failure during a restart; ``None`` otherwise."""
        if self.works or self.ended is not None or self.last_failure is None:
            return None
        return self.last_failure[1]

    @property
    def size(self) -> int:
        """Return the number of calls in flight, queued or to be moved."""
        return len(self.in_flight) + len(self.queued) + len(self.moving)

    @property
    def has_room(self) -> bool:
        """Return whether another call may be in flight."""
        return len(self.in_flight) < self._most_in_flight

    def over(self, generation: int) -> bool:
        """Return whether the workers of ``generation`` take no more calls."""
        return not self.works or generation != self.generation

    def check(self) -> None:
        """Raise the failure that ended the pool, or `PoolClosedError`, if any."""
        if self.ended is not None:
            raise again(self.ended, "" if isinstance(self.ended, PoolClosedError) else _BROKEN)

    def open(self, generation: int, mark: Callable[[int], object]) -> None:
        """Start a generation, with a higher number than those before, unless the pool has ended.

        ``mark(number)`` sets the workers' cancellation flag of a call.
        """
        if self.ended is None:
            restarted = self.generation > 0
            self.generation = generation
            self.failure = None
            self.last_settled = ""
            self._mark = mark
            self._answered_at = time.monotonic()
            self.works = True
            self.restarts += restarted  # last: a reader of the new count must find `works`

    def accept(self, call: PendingCall, generation: int) -> bool:
        """Accept a call; True: it is in flight, and the caller sends it; False: it is queued.

        ``generation``: the one to whose workers the caller can send now; 0: none. One thread at a
        time sends. Raises as `check`.
        """
        if self.ended is not None:
            self.check()
        if self.queued or not self.has_room or self.over(generation):
            self.queued.append(call)
            return False
        self._begin(call)
        return True

    def submit(self, call: PendingCall) -> None:
        """Queue a call, whose deadline `tick` watches, or raise as `check`."""
        self.check()
        call.timed = True
        self.queued.append(call)
        self.attention |= self.due(call).at < self._next_tick

    def next_to_send(self, generation: int) -> PendingCall | None:
        """Return the next queued call, now in flight, for the caller to send; None: none can be."""
        while self.queued and self.has_room and not self.over(generation):
            call = self.queued.popleft()
            if call.begin():
                self._begin(call)
                return call
        return None

    def unsent(self, call: PendingCall) -> None:
        """Revert the start of a call that no worker receives.

        The caller is the thread that sends: no later call has a number.
        """
        if self.in_flight.get(call.number) is call:
            del self.in_flight[call.number]
            self.oldest = next(iter(self.in_flight.values()), None)
            self.last -= 1
            call.number = 0

    def withdraw(self, call: PendingCall) -> None:
        """Remove a call from the queue, if it is queued."""
        if call in self.queued:
            self.queued.remove(call)

    def abandon(self, call: PendingCall) -> None:
        """Drop a call without a caller; if it is in flight, its workers see that."""
        self.withdraw(call)
        self.cancel(call)

    def cancel(self, call: PendingCall) -> None:
        """Set the workers' cancellation flag of ``call``, if it is in flight."""
        if self.in_flight.get(call.number) is call:
            self._mark(call.number)

    def take_waiting(self) -> list[PendingCall]:
        """Remove the calls with `PendingCall.move` that wait for a restart, and return them."""
        if self.works:
            return []
        waiting = [call for call in self.queued if call.move is not None]
        self.queued = deque(call for call in self.queued if call.move is None)
        return waiting

    def expire(self, call: PendingCall, error: BaseException) -> None:
        """Fail ``call``, which is late or unsent, unless it is done."""
        self._finish(call, error)

    def replied(self, rank: int, reply: Reply) -> None:
        """Record the reply of ``rank``."""
        call = self.in_flight.get(reply.number)
        if call is None:
            return
        if call is not self.oldest:
            expected = self.oldest_of(rank)
            if expected is not None and expected.number < reply.number:
                self.break_off(CoordinatorError(f"a reply of rank {rank} is lost"))
                return
        call.begun[rank] = reply.begun
        call.values[rank] = reply.value
        call.waiting.discard(rank)
        if not call.waiting:
            self._settle()

    def garbled(
        self, rank: int, error: MessageDecodeError | SharedMemoryError, generation: int
    ) -> None:
        """Record a reply of ``rank`` that ``error`` made unreadable: the call fails."""
        call = None if self.over(generation) else self.oldest_of(rank)
        if call is not None:
            text = f"the reply of rank {rank} to {call.method} cannot be read: {error}"
            unreadable = type(error)(text)
            unreadable.__cause__ = error
            call.error = call.error or unreadable
            call.waiting.discard(rank)
            self._settle()

    def failed(self, rank: int, failed: Failed, abort: CoordinatorError | None = None) -> None:
        """Record the failure of a call on ``rank``, which blocks until it is resumed.

        It may overtake the rank's replies to earlier calls: it uses the control channel. ``abort``:
        the abort of the board, if any.
        """
        call = self.in_flight.get(failed.number)
        if call is None:
            where = f"call {failed.number}" if failed.number else "no call"
            self.break_off(rebuild(failed, rank, where))
            return
        detail = ""
        if failed.diverged:
            calls = ", ".join(f"call {each.number} ({each.method})" for each in self._in_order())
            detail = f"under way: {calls}"
        call.fail(rank, rebuild(failed, rank, call.method, detail), failed)
        if not failed.consequence and not call.retry:
            self._finish(call)
        if abort is not None:
            self.saw_abort(abort)
        self._settle()

    def saw_abort(self, abort: CoordinatorError, exited: WorkerLostError | None = None) -> None:
        """Record that the board was aborted, or a queue ended; the root cause may be reported yet.

        ``exited``: the end of the process that caused it, if known.
        """
        if self.works:
            self._abort = self._abort or abort
            self._exit = self._exit or exited
            self.attention = True

    def break_off(self, error: CoordinatorError, generation: int | None = None) -> None:
        """Break the pool because of ``error``, if ``generation`` (``None``: any) is current."""
        if self.works and generation in (None, self.generation):
            self._fail(error, ends=not self._restartable)

    def end(self, error: CoordinatorError) -> None:
        """End the pool because of ``error``, or close it (`PoolClosedError`); first error wins."""
        self._lose()
        if self.ended is None:
            self._fail(error, ends=True)

    def tick(self, may_report: Callable[[], bool]) -> DueCalls:
        """Break the pool if it is due, and return late and stuck calls.

        One thread calls this, and not the main thread. ``may_report``: whether a worker may still
        report why the board was aborted.
        """
        self.attention = False
        now = time.monotonic()
        oldest = self.oldest
        number = oldest.number if oldest is not None else None
        sign: object = self._abort and "abort"
        if sign is None and oldest is not None and oldest.failed:
            sign = number
            if oldest.error is not None:
                self._finish(oldest)
        for timer in (self._settling, self._reporting):
            timer.watch(sign, now)
        self._stuck.watch(number, now)
        waits = sign is not None and self.works and not self._break_if_due(may_report)
        self._lose()
        stuck = self.oldest if self._stuck.left <= 0 else None
        if stuck is not None:
            self._stuck.left = math.inf
        late, next_due = self._late(now)
        timer = self._reporting if self._settling.left <= 0 else self._settling
        seconds = min(
            self._look_seconds,
            self._stuck.next_tick,
            next_due,
            timer.next_tick if waits else math.inf,
        )
        self._next_tick = now + seconds
        return DueCalls(late, stuck, seconds)

    def due(self, call: PendingCall) -> Deadline:
        """Return the current deadline of a call; each answer to another call may extend it."""
        if call.timeout is not None:
            return Deadline(call.since + call.timeout, call.timeout)
        since = max(call.since, self._answered_at)
        return Deadline(since + self._call_seconds, self._call_seconds)

    def oldest_of(self, rank: int) -> PendingCall | None:
        """Return the oldest call in flight that ``rank`` has not answered, if any."""
        return next((call for call in self._in_order() if rank in call.waiting), None)

    def release(self) -> None:
        """Drop the flags and the failure's frames after `end`; no thread uses them any more."""
        self._mark = ignore
        if self.last_failure is not None:
            free_frames(self.last_failure[1])

    def _in_order(self) -> tuple[PendingCall, ...]:
        return tuple(self.in_flight.values())

    def _begin(self, call: PendingCall) -> None:
        self.last += 1
        call.number = self.last
        self.in_flight[call.number] = call
        if self.oldest is None:
            self.oldest = call

    def _finish(self, call: PendingCall, error: BaseException | None = None) -> None:
        call.finish(error, self._name)
        if call.has_future:
            self.finished[call] = None

    def _settle(self) -> None:
        while (call := self.oldest) is not None and not call.waiting:
            if self._abort is not None or not self.works:
                return
            diverged = call.compare()
            if diverged is not None:
                self._finish(call, call.failure or diverged)
                self.break_off(call.failure or diverged)
                return
            self._answered_at = time.monotonic()
            self.last_settled = call.method
            self._finish(call)
            if call.failed:
                self.resumable.update(dict.fromkeys((rank, call.number) for rank in call.failed))
                self.attention = True
            self.in_flight.pop(call.number, None)
            self.oldest = oldest = next(iter(self.in_flight.values()), None)
            if oldest is not None and oldest.failed:
                self.attention = True

    def _break_if_due(self, may_report: Callable[[], bool]) -> bool:
        """Break the pool with the root cause, once it is known or can no longer be reported.

        The best evidence is an exception of a rank's own, then the end of the process that was
        named, then the abort, which names the rank that reported it, then another rank's report.
        """
        failed = [call for call in self._in_order() if call.failure is not None]
        own = next((call.failure for call in failed if not call.secondary), None)
        if own is not None and self._abort is not None:
            self.break_off(own)
            return True
        if own is None and may_report():
            due = self._reporting.left <= 0
        else:
            answered = not any(call.waiting for call in self._in_order())
            due = self._settling.left <= 0 or (self._abort is not None and answered)
        report = failed[0].failure if failed else None
        cause = own or self._exit or self._abort or report
        if due and cause is not None:
            self.break_off(cause)
        return due

    def _fail(self, error: CoordinatorError, *, ends: bool) -> None:
        error = located(again(error), self._name)  # a copy, which the pool keeps
        closed = isinstance(error, PoolClosedError)
        last = self.last_failure if closed else (time.time(), error)
        failure = self.failure if closed else error
        ended = error if ends else None
        # Without a call in between: a signal handler raises before all of this or after it.
        self.works, self._breaking, self.ended = False, error, ended
        self.last_failure, self.failure, self.attention = last, failure, True
        self._lose()

    def _lose(self) -> None:
        """Fail all calls if the pool breaks, and keep those that may run again. Idempotent."""
        error = self._breaking
        if error is None:
            return
        queued: deque[PendingCall] = deque()
        moving: dict[PendingCall, None] = {}
        closed = isinstance(error, PoolClosedError)
        for call in (*self.in_flight.values(), *self.queued, *self.moving):
            moves = call.move is not None and not closed
            if not ((moves or self.ended is None) and call.take_back()):
                call.failed = []
                self._finish(call, error)
            elif moves:
                moving[call] = None
            else:
                queued.append(call)
        # Without a call in between, as above.
        self.in_flight, self.oldest, self.queued, self.moving = {}, None, queued, moving
        self._breaking = self._abort = self._exit = None
        self.resumable.clear()

    def _late(self, now: float) -> tuple[list[PendingCall], float]:
        """Return calls that have become late, and the seconds until the next one does."""
        late, next_due = [], math.inf
        for call in (*self._in_order(), *self.queued):
            if call.timed and not call.done:
                due = self.due(call).at
                if due <= now:
                    call.timed = False
                    late.append(call)
                next_due = min(next_due, due if due > now else math.inf)
        return late, next_due - now
