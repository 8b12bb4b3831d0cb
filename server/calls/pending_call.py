"""One call: its arguments, the ranks' answers, its future or stream, and the ranks' divergence.

In a correct call all members of a group begin the same collectives in the same order, and every
message is both sent and received. Otherwise an operation stays incomplete, and the next call's
operations match it: one request's data would reach another's answer. Where the transport does not
compare operations, their data are wrong, or end a process. `device_comm.call_number` fingerprints
the operations in each rank; the board has the fingerprints of ended processes.

A call is *done* when its result is known: every rank has answered, or one has failed. It is
*settled* when every rank has answered or failed; only then do failed ranks resume.

In a stream, every rank runs the generator, and each item is a separate call: all ranks continue or
stop at the same item, and other calls may interleave. A worker computes at most one item ahead of
the consumer.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, TypeVar

from coordinator.call_counts import GroupOperationCounts
from coordinator.daemon_threads import is_future_timeout
from device_comm.call_number import CALL_ENTRIES, VERBS, CollectiveLog, log_memory
from shm_broadcast import CoordinatorError, Deadline
from shm_broadcast._native import Turn
from shm_broadcast.errors import counted
from shm_broadcast.state.fingerprint import Fingerprint

from ..control.protocol import Failed
from ..errors import (
    CallDivergedError,
    CallStuckError,
    CallTimeoutError,
    PoolClosedError,
    StreamLostError,
    WorkerError,
    WorkerLostError,
    again,
    located,
)
from ..spans import carried


class Difference(NamedTuple):
    """Two ranks of a group that began different operations in a call; ``did`` is their text.

    The first of ``ranks``, which are global, is one of the majority, if any.
    """

    group: str
    ranks: tuple[int, int]
    did: tuple[str, str]


def first_divergence(reports: Mapping[int, Sequence[GroupOperationCounts]]) -> Difference | None:
    """Return the first difference between the ranks of a call, if any.

    ``reports`` has, by rank, the result of `coordinator.call_counts.take_operation_counts`; missing
    ranks are not compared.
    """
    if not any(reports.values()):
        return None
    groups: dict[tuple[str, tuple[int, ...], bytes], dict[int, tuple[bytes, tuple[int, ...]]]] = {}
    for rank, report in reports.items():
        for name, ranks, token, log, messages in report:
            groups.setdefault((name, ranks, token), {})[rank] = log, messages
    for (name, ranks, _), begun in groups.items():
        known = {rank: begun.get(rank, (b"", ())) for rank in ranks if rank in reports}
        difference = _compare(ranks, known)
        if difference is not None:
            return Difference(name, *difference)
    return None


def fatal_divergence(
    rank: int, operation: str, fingerprints: Mapping[int, Sequence[Fingerprint]]
) -> Difference | None:
    """Return the difference in the collective in which a rank's process ended, if any.

    Gloo aborts a process that receives more bytes than it expects, whichever rank is wrong.
    ``operation`` is the rank's `MemberStatus.operation`.
    """
    group, _, verb = operation.rpartition(" ")
    for lost in fingerprints[rank]:
        logs = {
            each: CollectiveLog(bytearray(fingerprint.log))
            for each, all_of_rank in sorted(fingerprints.items())
            for fingerprint in all_of_rank
            if fingerprint.group == lost.group
        }
        number = logs[rank].count
        if verb not in VERBS or logs[rank].signature(number)[:1] != bytes([VERBS.index(verb)]):
            continue
        digests = {each: log.digest(number) for each, log in logs.items()}
        ranks = _unlike_ranks({each: it for each, it in digests.items() if it is not None})
        if ranks is not None:
            ours, theirs = (_began(logs[each].signature(number)) for each in ranks)
            theirs += ", after others" if ours == theirs else ""
            return Difference(group, ranks, (ours, theirs))
    return None


def _compare(
    ranks: tuple[int, ...], known: Mapping[int, tuple[bytes, tuple[int, ...]]]
) -> tuple[tuple[int, int], tuple[str, str]] | None:
    # The bytes first: nearly always they are equal, and no point-to-point message was sent.
    first = next(iter(known.values()))
    if all(begun == first for begun in known.values()) and not first[1]:
        return None
    logs = {
        rank: CollectiveLog(bytearray(log) or log_memory(CALL_ENTRIES))
        for rank, (log, _) in known.items()
    }
    unlike = _unlike_ranks({rank: (log.count, log.digest(log.count)) for rank, log in logs.items()})
    if unlike is not None:
        return unlike, _unlike(logs[unlike[0]], logs[unlike[1]])
    messages = {rank: counts or (0,) * 2 * len(ranks) for rank, (_, counts) in known.items()}
    for sender in known:
        for receiver in known:
            sent = messages[sender][ranks.index(receiver)]
            received = messages[receiver][len(ranks) + ranks.index(sender)]
            if sent != received:
                return (sender, receiver), (
                    f"sent {_messages(sent)} to rank {receiver}",
                    f"received {_messages(received)} from it",
                )
    return None


def _unlike_ranks(marks: Mapping[int, Hashable]) -> tuple[int, int] | None:
    """Return the first rank with the most frequent mark, and the first with another one."""
    most = Counter(marks.values()).most_common(1)[0][0]
    first = next(rank for rank, mark in marks.items() if mark == most)
    return next(((first, rank) for rank, mark in marks.items() if mark != most), None)


def _unlike(ours: CollectiveLog, theirs: CollectiveLog) -> tuple[str, str]:
    """Return texts on the first collective that is known to differ."""
    last = max(ours.count, theirs.count)
    for number in range(max(last - CALL_ENTRIES, 0) + 1, last + 1):
        our_text, their_text = (_collective(each, number) for each in (ours, theirs))
        if our_text and their_text and ours.signature(number) != theirs.signature(number):
            same = our_text == their_text
            return our_text, f"{their_text}, of other sizes" if same else their_text
    did = f"began {ours.count} collectives", f"began {theirs.count} others"
    return did[0], f"{did[1]}: they differ before the last {CALL_ENTRIES}"


def _collective(log: CollectiveLog, number: int) -> str:
    """Return the text of a rank's collective ``number``; ``""`` if it is not kept."""
    if number > log.count:
        return f"began {counted(log.count, 'collective') if log.count else 'no collective'}"
    signature = log.signature(number)
    return f"{_began(signature)} (collective {number})" if signature else ""


def _began(signature: bytes) -> str:
    from device_comm.shm.signature import collective_text  # noqa: PLC0415 - loads torch

    return f"began {collective_text(signature)}"


def _messages(count: int) -> str:
    return counted(count, "message") if count else "no messages"


if TYPE_CHECKING:
    Late: TypeAlias = Callable[[float | None], CallTimeoutError]
    NextItem: TypeAlias = Callable[[int, bool], Future[Any]]

T = TypeVar("T")


class _Condition(threading.Condition):
    # `with` acquires the lock in C. In Condition's Python code a signal handler could raise after
    # the acquisition, and the lock would stay held.
    __enter__ = property(lambda self: self._lock.__enter__)
    __exit__ = property(lambda self: self._lock.__exit__)


class CallFuture(Future[Any]):
    """A `concurrent.futures.Future` whose time-out errors name late workers, with their stacks."""

    def __init__(self) -> None:
        super().__init__()
        self._owner = os.getpid()
        self._condition = _Condition()
        self._late: Late | None = None
        self._abandon: Callable[[], None] | None = None

    def answer_for(self, late: Late, abandon: Callable[[], None]) -> None:
        """Set the functions of its call.

        ``late`` makes the error after a timeout in seconds, after which the call continues;
        `cancel` calls ``abandon``.
        """
        self._late = late
        self._abandon = abandon

    def cancel(self) -> bool:
        """Cancel a queued call; False if it was sent, is over, or belongs to the parent process.

        A sent call continues, but its workers see `worker.WorkerContext.cancelled`.
        """
        if os.getpid() != self._owner:
            return False
        cancelled = super().cancel()
        abandon = self._abandon
        if abandon is not None:
            abandon()
        if cancelled:
            self.set_running_or_notify_cancel()  # the queue drops the call: nothing else calls this
            self._forget()
        return cancelled

    def set_running_or_notify_cancel(self) -> bool:
        """Extend the base method: False, too, if a result or a cancellation was set already."""
        with self._condition:
            over = self._state in ("FINISHED", "CANCELLED_AND_NOTIFIED")
            return not over and super().set_running_or_notify_cancel()

    def set_result(self, result: Any) -> None:
        """Set the result, and drop the call."""
        super().set_result(result)
        self._forget()

    def set_exception(self, exception: BaseException | None) -> None:
        """Set the exception, and drop the call."""
        super().set_exception(exception)
        self._forget()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the call's result.

        Raises:
            CallTimeoutError: no result within ``timeout`` seconds; the call continues.
            CancelledError: the call was cancelled.
            PoolClosedError: this process was forked before the call had ended.
            ValueError, TypeError: ``timeout`` is not a duration.
            Exception: the call's error.
        """
        return self._within(timeout, super().result)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call to end; return its error, if any. Raises as `result` on a time-out."""
        return self._within(timeout, super().exception)

    def _within(self, timeout: float | None, outcome: Callable[[float | None], T]) -> T:
        """Wait for the call's ``outcome``; a time-out error names late workers."""
        Deadline.within(timeout)
        if os.getpid() != self._owner and not self.done():
            raise PoolClosedError(
                f"the call is one of process {self._owner}, from which this one was forked"
            )
        try:
            return outcome(timeout)
        except TimeoutError as error:
            if not is_future_timeout(error):
                raise
            late = self._late
            if self.done():  # it ended just now
                return outcome(None)
            raise (TimeoutError() if late is None else late(timeout)) from None

    def _forget(self) -> None:
        self._late = self._abandon = None


async def awaited(begin: Callable[[], Future[Any]]) -> Any:
    """Await the future of ``begin()``; cancelling the task cancels it.

    Without an asyncio loop, as under trio, raises RuntimeError and does not call ``begin``.
    """
    import asyncio  # noqa: PLC0415 - a third of this package's import time

    loop = asyncio.get_running_loop()
    return await asyncio.wrap_future(begin(), loop=loop)


MOST_TRIES = 3
"""Most tries of one call: each loses its workers, so the call may be the cause."""


class PendingCall:
    """A call that is queued or sent. Not thread-safe: the owner's lock guards it.

    Attributes:
        reply_rank: the only rank whose value is returned; ``None``: all ranks.
        number: 1, 2, ... in the order of sending; 0 until it is sent.
        waiting: the ranks that have neither answered nor failed.
        values, begun: by rank, its result and the group operations that it began.
        failed: the ranks whose method raised; they block until they are resumed.
        error: the caller's error, so far.
        failure: the first failure that a rank reported; a root cause replaces a secondary one.
        secondary: whether ``failure`` is a secondary failure.
        done: whether the result is known.
        ended: a lock that is released once the call is done. Callers wait on it and not on the
            future: a signal handler that raises in `Future.result` could leave that locked.
        amid: whether the caller's thread is in the middle of sending, or of receiving a reply.
        timeout: seconds from ``since``; ``None``: `PoolConfig.call_seconds`.
        since: the time of its creation, in seconds of ``time.monotonic()``.
        timed: whether the table watches its deadline.
        stream, begins, trace: as in `control.protocol.Call`.
        retry: whether the call runs again in the next generation after a restart.
        move: submits the call to another pool when its generation is lost; see `Replicas`.
    """

    __slots__ = (
        "_future", "_n_ranks", "_tries", "amid", "args", "begins", "begun", "done", "ended",
        "error", "failed", "failure", "kwargs", "method", "move", "number", "reply_rank", "retry",
        "secondary", "since", "stream", "timed", "timeout", "trace", "values", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        n_ranks: int,
        reply_rank: int | None,
        timeout: float | None = None,
        stream: int = 0,
        *,
        begins: bool = False,
        retry: bool = False,
    ) -> None:
        # Raises ValueError.
        self.timeout = None if timeout is None else Deadline.after(timeout).timeout
        self.since = time.monotonic()
        self.method = method
        self.args = tuple(args)
        self.kwargs = dict(kwargs)
        self.reply_rank = reply_rank
        self.stream = stream
        self.begins = begins
        self.retry = retry
        self.move: Callable[[PendingCall], None] | None = None
        # Without OpenTelemetry, the program has no spans.
        self.trace = carried() if "opentelemetry.trace" in sys.modules else None
        self.done = self.amid = self.timed = False
        self.ended = threading.Lock()
        self.ended.acquire()
        self._n_ranks = n_ranks
        self._tries = 0
        self._future: CallFuture | None = None
        self._forget_answers()

    def _forget_answers(self) -> None:
        self.number = 0
        self.waiting = set(range(self._n_ranks))
        self.failed: list[int] = []
        self.error: BaseException | None = None
        self.failure: WorkerError | StreamLostError | None = None
        self.secondary = False
        self.values: list[Any] = [None] * self._n_ranks
        self.begun: dict[int, tuple[GroupOperationCounts, ...]] = {}

    @property
    def has_future(self) -> bool:
        """Return whether the call was submitted, and has a future to complete."""
        return self._future is not None

    def compare(self) -> CallDivergedError | None:
        """Return the error if ranks began different group operations in this call."""
        difference = first_divergence(self.begun)
        return difference and CallDivergedError(self.number, self.method, *difference)

    def fail(self, rank: int, error: WorkerError | StreamLostError, failed: Failed) -> None:
        """Record the failure of ``rank``: its report, and the error made from it."""
        self.begun[rank] = failed.begun
        self.failed.append(rank)
        if not failed.consequence:
            self.error = self.error or error
        if self.failure is None or (self.secondary and not failed.consequence):
            self.failure, self.secondary = error, failed.consequence
        self.waiting.discard(rank)

    def finish(self, error: BaseException | None, pool: str) -> None:
        """Fix the result, once; idempotent. An error's text names the ``pool``, if it has a name.

        ``error``: the call's error, unless it has one.
        """
        if not self.done:
            self.error = self.error or error or self.failure
            if self.error is None and self.stream > 0:
                self.error = self._uneven_end()
            if self.error is not None:
                located(self.error, pool)
            self.done = True
        if self.ended.locked():
            self.ended.release()

    def result(self) -> Any:
        """Return the value of ``reply_rank`` or all values, or raise a copy of the error."""
        if self.error is not None:
            raise again(self.error)
        return self.values if self.reply_rank is None else self.values[self.reply_rank]

    def future(self) -> CallFuture:
        """Return the future of the result, always the same one."""
        if self._future is None:
            self._future = CallFuture()
            if self.done:
                self.hand_out()
        return self._future

    def hand_out(self) -> None:
        """Complete the future of a call that is done; idempotent.

        Call that without locks: it runs the future's callbacks, which may call the pool.
        """
        if self._future is not None:
            with suppress(InvalidStateError):  # cancelled, or has a result
                if self.error is not None:
                    self._future.set_exception(again(self.error))
                else:
                    self._future.set_result(self.result())

    def begin(self) -> bool:
        """Return whether to send the call: not cancelled, done or late. Ends cancellation."""
        future = self._future
        if self.done or future is None or future.running():
            return not self.done
        return future.set_running_or_notify_cancel()

    def take_back(self) -> bool:
        """Return whether the call runs again, as a new one, after its workers' loss.

        Being queued counts as no try.
        """
        self._tries += self.number > 0
        if self.done or not self.retry or self._tries >= MOST_TRIES:
            return False
        self._forget_answers()
        return True

    def _uneven_end(self) -> CallDivergedError | None:
        """Return the error if a stream has ended on some ranks only."""
        if self.waiting:
            return None
        ended = [not value for value in self.values]
        if len(set(ended)) == 1:
            return None
        ranks = ended.index(True), ended.index(False)
        did = "ended the stream", "went on with it"
        return CallDivergedError(self.number, self.method, "world", ranks, did)


_log = logging.getLogger(__name__)


class CallStream:
    """Iterator over the items of a worker's generator.

    One thread at a time may request an item; any thread may close the stream. `close`, garbage
    collection, the end of a ``with`` block and a failed item close the generator on all ranks.
    ``step(stream, first)`` queues a call for the next item; a negative number closes the stream,
    and ``first`` creates the generator.
    """

    def __init__(self, number: int, step: NextItem) -> None:
        self._number = number
        self._step = step
        self._begun = False
        self._over = False
        self._asked: Future[Any] | None = None
        self._taking = Turn()
        self._in_order = threading.RLock()  # no generator is closed before it has begun

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Wait for the next item.

        Raises:
            RuntimeError: another thread waits for an item, which it still receives.
            CallDivergedError: the generator ended on some ranks only. The pool stays usable.
            Exception: the errors of `pool.WorkerPool.call`.
        """
        with self._taking as acquired:
            if not acquired:
                raise RuntimeError("another thread waits for an item of this stream")
            try:
                items = self.ask().result()
            except CancelledError:  # another thread has closed the stream
                raise StopIteration from None
            except BaseException:
                self.close()
                raise
            if not self.take(items):
                raise StopIteration
            return items[0]

    def ask(self) -> Future[Any]:
        """Request the next item, unless that was done; return the future of its tuple, for `take`.

        The tuple is ``(item,)``, or ``()`` at the end.
        """
        with self._in_order:
            if self._over:
                return _finished()
            if self._asked is None:
                first, self._begun = not self._begun, True
                self._asked = self._step(self._number, first)
            return self._asked

    def take(self, found: tuple[Any, ...]) -> bool:
        """Accept the result of `ask`, and request the next item; False at the end."""
        self._asked = None
        if not found:
            self.close()
            return False
        with suppress(CoordinatorError):  # the next `ask` raises it; this item is valid
            self.ask()
        return True

    def close(self) -> None:
        """Close the generator on all ranks, after all earlier calls. Idempotent; does not wait.

        A worker that computes an item sees `worker.WorkerContext.cancelled`. Another thread that
        waits for that item receives it, or StopIteration if no worker had begun it.
        """
        with self._in_order:
            if self._over:
                return
            self._over = True
            if self._asked is not None:
                self._asked.cancel()
            if self._begun:
                with suppress(CoordinatorError):  # a pool that has ended has no generators
                    self._step(-self._number, False).add_done_callback(_log_failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self, _at_the_end: Callable[[], bool] = sys.is_finalizing) -> None:
        """Close the stream in another thread: this one may hold the pool's lock.

        Not at the interpreter's exit, when no thread can start and the pool ends too.
        """
        if self._begun and not self._over and not _at_the_end():
            threading.Thread(target=self.close, name="pool-stream-end", daemon=True).start()


def _finished() -> Future[Any]:
    over: Future[Any] = Future()
    over.set_result(())
    return over


def _log_failure(closed: Future[Any]) -> None:
    error = None if closed.cancelled() else closed.exception()
    # These errors mean that the generator ended with its worker or pool.
    ended = (CallStuckError, PoolClosedError, WorkerLostError)
    if error is not None and not isinstance(error, ended):
        _log.warning("a stream's generator could not be closed: %s", error)
