"""Send a pool's calls to the workers of one generation, and receive their replies.

One thread at a time listens: it receives the replies to all calls. A caller that waits for its call
listens itself if no other thread does: a thread switch would take longer than the reply. When it
stops while calls are in flight, the collector thread takes over. A caller sends its call itself if
it can be sent at once; the sender thread sends queued calls. The collector completes all futures. A
thread owns the right to send or to listen only within a block, so a signal handler that raises
there releases it.

A caller that is interrupted while it waits abandons its call: the reply is received and dropped. A
caller that is interrupted amid sending, or amid receiving a reply, breaks the pool: the call may
have been sent, or the reply lost.

A listening thread never sends. A send blocks while the queue to the workers is full, and a worker
with a full reply queue receives no calls until its replies are dequeued: a listener that blocked in
a send would deadlock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from msgspec.structs import astuple

from shm_broadcast import (
    NEVER,
    CoordinatorError,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    MessageDecodeError,
    PeerLostError,
    SharedMemoryError,
)
from shm_broadcast._native import Turn
from shm_broadcast.eventcount import AdaptiveSpin

from ..control.protocol import Call, Reply

if TYPE_CHECKING:
    from shm_broadcast import Board, Deadline, MessageQueue

    from .call_table import CallTable
    from .pending_call import PendingCall

_ENDS = (GroupAbortedError, GroupClosedError, PeerLostError)
_log = logging.getLogger(__name__)
_LOOK_SECONDS = 1e-3
"""Longest spin for a reply before sleeping, while calls take about that or less.

A sleeping worker needs 0.2 ms to wake up and answer; a sleeping driver adds 0.1 ms.
"""
_TURN_SECONDS = 0.1
"""Time that the sender waits for its turn before it checks for the generation's end.

A signal handler that shuts the pool down waits for the sender, and may have interrupted the owner.
"""


def complete_futures(table: CallTable) -> None:
    """Complete the futures of calls that are done; not in a caller's thread, nor under its lock."""
    for call in tuple(table.finished):
        try:
            call.hand_out()
        except BaseException:  # noqa: BLE001 - the code of the pool's user
            _log.exception("a callback of the pool's user raised")
        table.finished.pop(call, None)


class Dispatcher:
    """Moves calls and replies between the table and the queues. Any thread may call.

    ``threads``, the sender and the collector, end after `release` and the queues' shutdown. The
    last member of ``board`` is this process; ``replies`` are the workers' queues by rank. ``lock``
    guards ``table``; ``wake`` has another thread call `CallTable.tick`. ``to_send`` is the doorbell
    of the sender, of each generation in turn.
    """

    def __init__(
        self,
        table: CallTable,
        lock: threading.RLock,
        wake: Callable[[], None],
        to_send: SimpleQueue[None],
        board: Board,
        calls: MessageQueue,
        replies: Sequence[MessageQueue],
    ) -> None:
        self._table = table
        self._lock = lock
        self._wake = wake
        self._to_send = to_send
        self._generation = table.generation
        self._board = board
        self._calls = calls
        self._replies = tuple(replies)
        self._spin = AdaptiveSpin(_LOOK_SECONDS)
        self._sending = Turn()
        self._listening = Turn()
        self._queues_ended = False
        # A doorbell. An Event's lock would stay taken if a signal handler raised in `set`.
        self._to_collect: SimpleQueue[None] = SimpleQueue()
        self.threads = [
            threading.Thread(target=self._run, args=(work,), name=f"pool-{name}", daemon=True)
            for name, work in (("sender", self._send_queued), ("collector", self._collect))
        ]
        for thread in self.threads:
            thread.start()
        to_send.put(None)  # calls may wait for this generation

    def call(self, call: PendingCall) -> Deadline | None:
        """Send ``call``, behind queued ones, and wait until it is done.

        Return the deadline if that passes first: the call continues if it was sent.

        Raises:
            Exception: the failure that ended the pool, or an error of pickling the arguments.
        """
        deadline = self._table.due(call)
        try:
            with self._sending as acquired:
                call.amid = True
                with self._lock:
                    sent = self._table.accept(call, self._generation if acquired else 0)
                if sent:
                    self._send(call, deadline, own=True)
                else:
                    self._to_send.put(None)
                call.amid = False
            while not call.done:
                try:
                    self._wait(call, deadline)
                except GroupTimeoutError:
                    deadline = self._table.due(call)  # other answers extend it
                    if deadline.expired:
                        break
        except GroupTimeoutError:
            pass
        except BaseException as error:
            self._interrupted(call, error)
            raise
        return None if call.done else deadline

    def release(self) -> None:
        """Let both threads end, as the generation is over."""
        self._to_send.put(None)
        self._to_collect.put(None)

    def _interrupted(self, call: PendingCall, error: BaseException) -> None:
        """Abandon a call after ``error`` in its caller's thread, or break the pool if amid I/O."""
        if call.amid:
            text = "was raised amid the sending of a call or the receiving of a reply"
            self._break_off(f"{error!r} {text}: the pool breaks", error)
        else:
            with self._lock:
                self._table.abandon(call)
        self._wake_collector()

    def _break_off(self, text: str, cause: BaseException) -> None:
        failure = CoordinatorError(text)
        failure.__cause__ = cause
        with self._lock:
            self._table.break_off(failure, self._generation)
        self._wake()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - also of users' code in messages
            name = threading.current_thread().name
            self._break_off(f"the thread {name} has failed: {error!r}", error)

    def _wait(self, call: PendingCall, deadline: Deadline) -> None:
        """Wait until ``call`` is done, listening if no other thread does."""
        try:
            with self._listening as acquired:
                if acquired and not self._queues_ended:
                    self._listen(call, deadline)
        finally:
            self._wake_collector()
        if not call.done:
            self._wait_for_other_listener(call, deadline)

    def _wait_for_other_listener(self, call: PendingCall, deadline: Deadline) -> None:
        left = min(deadline.remaining(), threading.TIMEOUT_MAX)
        if not call.ended.acquire(timeout=left):
            raise GroupTimeoutError(call.method, deadline.timeout)

    def _send(self, call: PendingCall, deadline: Deadline, *, own: bool) -> None:
        """Send a call in flight; the caller owns `_sending`. ``own``: it is this thread's call."""
        left: list[None] = []  # not empty once readers may get the message
        reply_rank = -1 if call.reply_rank is None else call.reply_rank
        what = call.number, call.method, call.args, call.kwargs
        message = Call(*what, reply_rank, call.stream, call.begins, call.trace)
        try:
            self._calls.enqueue_noted(astuple(message), deadline, partial(left.append, None))
        except _ENDS as error:
            self._end(error)
        except BaseException as error:
            if left and not isinstance(error, GroupTimeoutError):
                raise
            with self._lock:
                self._table.unsent(call)
            self._to_send.put(None)
            call.amid &= not own
            if isinstance(error, (TypeError, RecursionError)):
                reason = error.__cause__ or error
                text = f"the arguments of {call.method} cannot be sent: {reason}"
                raise TypeError(text) from error
            raise

    def _send_queued(self) -> None:
        while not self._table.over(self._generation) and not self._queues_ended:
            self._to_send.get()
            while self._send_next():
                self._wake_collector()
        self._to_send.put(None)  # for the next generation's sender

    def _send_next(self) -> bool:
        """Send the next queued call; return whether there may be more."""
        with self._sending as acquired:
            if not acquired and not self._sending.take_within(_TURN_SECONDS):
                return not self._table.over(self._generation)
            if self._queues_ended:
                return False
            with self._lock:
                call = self._table.next_to_send(self._generation)
            if call is None:
                return False
            try:
                self._send(call, NEVER, own=False)
            except Exception as error:
                if call.number:  # it may have been sent
                    raise
                with self._lock:
                    self._table.expire(call, error)
        return True

    def _collect(self) -> None:
        while not self._table.over(self._generation):
            self._to_collect.get()
            while True:
                complete_futures(self._table)
                if self._queues_ended or not self._table.in_flight:
                    break
                with self._listening as acquired:
                    if not acquired:  # a caller listens, which wakes this thread when it stops
                        break
                    self._listen(None, NEVER)
        complete_futures(self._table)

    def _wake_collector(self) -> None:
        if (self._table.in_flight or self._table.finished) and self._to_collect.empty():
            self._to_collect.put(None)

    def _end(self, error: CoordinatorError) -> None:
        """Record that a queue has ended; the supervisor breaks the pool with the root cause."""
        self._queues_ended = True
        with self._lock:
            if not self._table.over(self._generation):
                self._table.saw_abort(error)
        self._wake()

    def _listen(self, call: PendingCall | None, deadline: Deadline) -> None:
        """Receive replies until ``call`` is done, or the queues end; the caller owns `_listening`.

        Without a call, that of the collector, until a future can be completed.
        """
        table, spin = self._table, self._spin
        waited: PendingCall | None = None
        since = 0

        def is_over() -> bool:
            return bool(table.finished or not table.in_flight) if call is None else call.done

        def is_ready() -> bool:
            return is_over() or any(queue.readable() for queue in self._replies)

        def late_ranks() -> list[int]:
            oldest = table.oldest
            return [] if oldest is None else sorted(oldest.waiting)

        while not (is_over() if call is None else call.done):
            # Spin on one queue only, of a rank that the oldest call waits for: the spin is a C call
            # without the GIL. Other ranks' replies wait in their queues until the window is over.
            oldest = table.oldest
            if oldest is not waited:
                if waited is not None:
                    deadline.check("call")  # `wait` below checks it as well
                    spin.observe(time.monotonic_ns() - since)
                waited, since = oldest, time.monotonic_ns()
            rank = 0 if oldest is None else min(oldest.waiting, default=0)
            replies = self._replies[rank]
            try:
                if oldest is not None and replies.readable(spin.window_ns / 1e9):
                    self._receive(rank, call, deadline)
                    continue
                self._board.wait(
                    *(is_ready, deadline, "call", tuple),
                    spin=0,
                    shown=late_ranks,
                    lookout=spin.lookout(since, replies.readable) if oldest is not None else None,
                )
                for each, queue in enumerate(self._replies):
                    if queue.readable():
                        self._receive(each, call, deadline)
            except _ENDS as error:
                self._end(error)
                return
        if waited is not None:
            spin.observe(time.monotonic_ns() - since)

    def _receive(self, rank: int, call: PendingCall | None, deadline: Deadline) -> None:
        """Receive a reply of ``rank``; ``call`` is awaited by this thread."""
        table = self._table
        if call is not None:
            call.amid = True
        try:
            reply = Reply(*self._replies[rank].dequeue(deadline))
        except (MessageDecodeError, SharedMemoryError) as error:
            with self._lock:
                table.garbled(rank, error, self._generation)
        except (GroupTimeoutError, *_ENDS):
            if call is not None:
                call.amid = False
            raise
        else:
            with self._lock:
                table.replied(rank, reply)
        if call is not None:
            call.amid = False
        if table.queued and table.has_room and self._to_send.empty():
            self._to_send.put(None)
        if table.attention:
            self._wake()
        if table.finished and call is not None:
            self._wake_collector()
