"""Sends a pool's calls and takes the replies, as its ledger says.

Who listens for replies: a caller that waits for its own call does, so that no other thread stands
between it and the workers; meanwhile it takes everybody's. When it leaves and calls are still under
way, the collector thread listens. Who sends: a caller whose call can go at once does; calls that
had to queue are sent by the sender thread. Sending may have to wait until workers have taken their
replies off their hands, so whoever listens never sends.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from msgspec.structs import astuple

from server.messages import Call, Reply
from shm_broadcast import (
    NEVER,
    CoordinatorError,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    MessageDecodeError,
    PeerLostError,
)
from shm_broadcast.doorbell import AdaptiveSpin

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from server.calls import PendingCall
    from server.ledger import Ledger
    from shm_broadcast import Board, Deadline, MessageQueue

_ENDS = (GroupAbortedError, GroupClosedError, PeerLostError)
_LOOK_SECONDS = 1e-3
"""How long to look for a reply before sleeping, while calls take about as long or less.

A sleeping worker takes 0.2 ms to wake and answer; if this process then sleeps as well, another 0.1.
"""
_REASON_SECONDS = 2.0
"""How long the supervisor has to hear why the queues ended."""


class Dispatcher:
    """The threads and queues of a pool's calls. Any thread may call.

    Attributes:
        threads: its own, which must not wait for it.

    Args:
        ledger: the pool's calls.
        board: the pool's board; its last member is this process.
        calls: the queue to the workers.
        replies: the queue from each worker, by rank.
    """

    def __init__(
        self, ledger: Ledger, board: Board, calls: MessageQueue, replies: Sequence[MessageQueue]
    ) -> None:
        self._ledger = ledger
        self._board = board
        self._calls = calls
        self._replies = tuple(replies)
        self._spin = AdaptiveSpin(_LOOK_SECONDS)
        self._listening = threading.RLock()
        self._unheard = threading.Event()
        self.threads = [
            threading.Thread(target=target, name=f"pool-{name}", daemon=True)
            for name, target in (("sender", self._send_queued), ("collector", self._collect))
        ]
        for thread in self.threads:
            thread.start()

    def call(self, call: PendingCall, deadline: Deadline) -> Any:
        """Send ``call`` and wait for its result.

        Raises:
            GroupTimeoutError: the deadline passed.
            The call's error, or what broke the pool.
        """
        if self._ledger.accept(call):
            self._send(call, deadline)
        if self._listening.acquire(blocking=False):
            try:
                self._listen(lambda: call.done, deadline)
            finally:
                self._listening.release()
                self._listen_on()
        else:
            self._follow(call, deadline)
        return call.result()

    def submit(self, call: PendingCall) -> Future[Any]:
        """Queue ``call``; the future of its result. Does not wait for workers.

        Raises:
            What broke the pool.
        """
        future = call.future()
        self._ledger.queue(call)
        return future

    def join(self) -> None:
        """Wait for the threads to end, once the ledger has ended and the queues let go."""
        self._unheard.set()
        for thread in self.threads:
            thread.join()

    def _follow(self, call: PendingCall, deadline: Deadline) -> None:
        """Wait for a call while another thread listens."""
        future = self._ledger.future(call)
        try:
            future.exception(None if deadline is NEVER else deadline.remaining())
        except TimeoutError:
            raise GroupTimeoutError(call.method, deadline.timeout) from None

    def _send(self, call: PendingCall, deadline: Deadline) -> None:
        wanted = -1 if call.reply_rank is None else call.reply_rank
        message = Call(call.number, call.method, call.args, call.kwargs, wanted)
        try:
            self._calls.enqueue(astuple(message), deadline)
        except _ENDS as error:
            self._ledger.sent()
            self._await_reason(error)
        except GroupTimeoutError:
            self._ledger.unsent(call, None)
            raise
        except Exception as error:  # noqa: BLE001 - the arguments' own code fails to pickle them
            self._ledger.unsent(call, error)
        except BaseException:
            # Interrupted, maybe after it was sent: its replies will be taken as they come.
            self._ledger.sent()
            raise
        else:
            self._ledger.sent()

    def _send_queued(self) -> None:
        while (call := self._ledger.next_to_send()) is not None:
            self._send(call, NEVER)
            self._listen_on()

    def _collect(self) -> None:
        while not self._ledger.ended:
            self._unheard.wait()
            self._unheard.clear()
            with self._listening:
                self._listen(lambda: not self._ledger.busy, NEVER)

    def _listen_on(self) -> None:
        if self._ledger.busy:
            self._unheard.set()

    def _listen(self, until: Callable[[], bool], deadline: Deadline) -> None:
        """Take replies until ``until()``; whoever calls this holds the lock to listen."""

        def something() -> bool:
            return until() or any(queue.readable() for queue in self._replies)

        number, since = 0, 0
        while not until():
            deadline.check("call")
            oldest, rank = self._ledger.awaited
            if oldest != number:
                self._learn(number, since)
                number, since = oldest, time.monotonic_ns()
            try:
                if not oldest or not self._replies[rank].readable(self._spin.window_ns / 1e9):
                    self._board.wait(something, deadline, "call", tuple, spin=0)
                for each, queue in enumerate(self._replies):
                    if queue.readable():
                        self._hear(each, queue, deadline)
            except _ENDS as error:
                self._await_reason(error)
        self._learn(number, since)

    def _learn(self, number: int, since: int) -> None:
        """A call was waited for, since that moment."""
        if number:
            self._spin.observe(time.monotonic_ns() - since)

    def _hear(self, rank: int, queue: MessageQueue, deadline: Deadline) -> None:
        try:
            reply = Reply(*queue.dequeue(deadline))
        except MessageDecodeError as error:
            self._ledger.garbled(rank, error)
        else:
            self._ledger.replied(rank, reply)

    def _await_reason(self, error: CoordinatorError) -> None:
        """The queues have ended. The supervisor knows why, or will soon."""
        if not self._ledger.wait_for_end(_REASON_SECONDS):
            self._ledger.end(error)
