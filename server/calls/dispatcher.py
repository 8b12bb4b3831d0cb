"""Send a pool's calls to the workers and receive their replies; the tracker decides on both.

Each generation of workers has its own dispatcher. A call that runs again in a later generation is
waited for through its future.

One thread at a time listens: it receives the replies to all calls. A caller that waits for its call
listens itself if no other thread does: a thread switch would take longer than the reply. When it
stops while calls are in flight, the collector thread takes over. A caller sends its call itself if
it can be sent at once; the sender thread sends queued calls. A thread owns the right to send or to
listen only within a block, so a signal handler that raises there releases it.

A listening thread never sends. A send blocks while the queue to the workers is full, and a worker
with a full reply queue receives no calls until its replies are dequeued: a listener that blocked in
a send would deadlock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
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

    from .ledger import CallTracker
    from .pending_call import PendingCall

_ENDS = (GroupAbortedError, GroupClosedError, PeerLostError)
_LOOK_SECONDS = 1e-3
"""Longest spin for a reply before sleeping, while calls take about that or less.

A sleeping worker needs 0.2 ms to wake up and answer; a sleeping driver adds 0.1 ms.
"""
_TURN_SECONDS = 0.1
"""Time that a pool's thread waits to send or listen before it checks for the generation's end.

A signal handler that shuts the pool down waits for these threads, and may have interrupted the
owner.
"""
_REASON_SECONDS = 2.0
"""Time to wait for the supervisor's report, which has the cause, when the queues have ended."""


class Dispatcher:
    """Moves calls and replies between the tracker and the queues. Any thread may call.

    ``threads``, the sender and the collector, end after `release` and the queues' shutdown. The
    last member of ``board`` is this process; ``replies`` are the workers' queues by rank.
    """

    def __init__(
        self,
        ledger: CallTracker,
        generation: int,
        board: Board,
        calls: MessageQueue,
        replies: Sequence[MessageQueue],
    ) -> None:
        self._tracker = ledger
        self._generation = generation
        self._board = board
        self._calls = calls
        self._replies = tuple(replies)
        self._spin = AdaptiveSpin(_LOOK_SECONDS)
        self._sending = Turn()
        self._listening = Turn()
        # Not empty when calls are under way and no thread may be receiving: wakes the collector. An
        # Event's lock would stay taken if a signal handler raised in `set`.
        self._needs_collector: SimpleQueue[None] = SimpleQueue()
        self.threads = [
            threading.Thread(target=self._run, args=(work,), name=f"pool-{name}", daemon=True)
            for name, work in (("sender", self._send_queued), ("collector", self._collect))
        ]
        for thread in self.threads:
            thread.start()

    def send(self, call: PendingCall, deadline: Deadline) -> None:
        """Send ``call``, or queue it behind others or if too many are in flight.

        Raises:
            GroupTimeoutError: the queue to the workers was full until the deadline; no worker
                receives the call.
            Exception: the pool's failure, or an error of pickling the arguments.
        """
        with self._sending as acquired:
            if self._tracker.accept(call, self._generation, may_send=acquired):
                self._send(call, deadline)

    def wait(self, call: PendingCall, deadline: Deadline) -> None:
        """Wait for the end of a sent call; after a GroupTimeoutError it continues."""
        # A future's callback or a signal handler, run by the listening thread, may wait for a call:
        # it listens itself.
        if self._listening.is_owned():
            self._listen(lambda: call.done, deadline)
        else:
            self._listen_in_turn(call, deadline)
        if not call.done:
            self._wait_for_other_listener(call, deadline)

    def release(self) -> None:
        """Let both threads end, as the generation is over."""
        self._needs_collector.put(None)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - also of users' code in messages
            name = threading.current_thread().name
            failure = CoordinatorError(f"the thread {name} has failed: {error!r}")
            failure.__cause__ = error
            self._tracker.break_off(failure, self._generation)

    def _listen_in_turn(self, call: PendingCall, deadline: Deadline) -> None:
        try:
            with self._listening as acquired:
                if acquired:
                    self._listen(lambda: call.done, deadline)
        finally:
            self._wake_collector()

    def _wait_for_other_listener(self, call: PendingCall, deadline: Deadline) -> None:
        if not self._tracker.wait_until_done(call, deadline.remaining()):
            raise GroupTimeoutError(call.method, deadline.timeout)

    def _send(self, call: PendingCall, deadline: Deadline) -> None:
        reply_rank = -1 if call.reply_rank is None else call.reply_rank
        message = Call(
            *(
                call.number,
                call.method,
                call.args,
                call.kwargs,
                reply_rank,
                call.stream,
                call.begins,
            ),
            call.trace,
        )
        try:
            self._calls.enqueue(astuple(message), deadline)
        except _ENDS as error:
            self._end_with_reason(error, deadline)
        except GroupTimeoutError:
            self._tracker.unsent(call)
            raise
        except (TypeError, RecursionError) as error:
            reason = error.__cause__ or error
            raise TypeError(f"the arguments of {call.method} cannot be sent: {reason}") from error

    def _send_queued(self) -> None:
        while self._tracker.wait_to_send(self._generation):
            with self._sending as acquired:
                if acquired or self._sending.take_within(_TURN_SECONDS):
                    self._send_next()
            self._wake_collector()

    def _send_next(self) -> None:
        call = self._tracker.next_to_send(self._generation)
        if call is not None:
            try:
                self._send(call, NEVER)
            except Exception as error:  # noqa: BLE001 - the arguments' own code fails to pickle them
                self._tracker.abandon(call, error)

    def _collect(self) -> None:
        while not self._tracker.state.over(self._generation):
            # Emptied before listening: an item put meanwhile causes another round.
            self._needs_collector.get()
            self._listen_until_idle()
            # A caller may have found this thread listening just before it stopped.
            self._wake_collector()

    def _listen_until_idle(self) -> None:
        with self._listening as acquired:
            while not acquired and not self._tracker.state.over(self._generation):
                acquired = self._listening.take_within(_TURN_SECONDS)
            if acquired:
                self._listen(lambda: not self._tracker.queued.busy, NEVER)

    def _wake_collector(self) -> None:
        if self._tracker.queued.busy and self._needs_collector.empty():
            self._needs_collector.put(None)

    def _listen(self, until: Callable[[], bool], deadline: Deadline) -> None:
        """Receive replies until ``until()`` or the generation's end; caller owns `_listening`."""

        def is_ready() -> bool:
            return until() or any(queue.readable() for queue in self._replies)

        number, since = 0, 0
        while not until():
            # Spin on one queue only, of a rank that the oldest call waits for: the spin is a C call
            # without the GIL. Other ranks' replies wait in their queues until the window is over.
            oldest, rank = self._tracker.awaited
            if oldest != number:
                deadline.check("call")  # `wait` below checks it as well
                self._observe_wait(number, since)
                number, since = oldest, time.monotonic_ns()
            replies = self._replies[rank]
            try:
                if oldest and replies.readable(self._spin.window_ns / 1e9):
                    self._take_reply(rank, replies, deadline)
                    continue
                self._board.wait(
                    *(is_ready, deadline, "call", tuple),
                    spin=0,
                    shown=lambda: self._tracker.late_ranks,
                    lookout=self._spin.lookout(since, replies.readable) if oldest else None,
                )
                for each, queue in enumerate(self._replies):
                    if queue.readable():
                        self._take_reply(each, queue, deadline)
            except _ENDS as error:
                self._end_with_reason(error, deadline)
                return
        self._observe_wait(number, since)

    def _observe_wait(self, number: int, since: int) -> None:
        """Adapt the spin to the wait for call ``number``, which began at ``since`` (ns)."""
        if number:
            self._spin.observe(time.monotonic_ns() - since)

    def _take_reply(self, rank: int, queue: MessageQueue, deadline: Deadline) -> None:
        try:
            reply = Reply(*queue.dequeue(deadline))
        except (MessageDecodeError, SharedMemoryError) as error:
            self._tracker.garbled(rank, error, self._generation)
        else:
            self._tracker.replied(rank, reply)

    def _end_with_reason(self, error: CoordinatorError, deadline: Deadline) -> None:
        """Break the pool because the queues raised ``error``, unless the supervisor does it first.

        The supervisor has the worker's exit status or report, and so the more precise error. After
        a GroupTimeoutError the collector waits instead.
        """
        while not self._tracker.wait_until_over(
            self._generation, deadline.remaining(at_most=_REASON_SECONDS)
        ):
            deadline.check("call")
            if not self._tracker.reason_due():
                self._tracker.break_off(error, self._generation)
