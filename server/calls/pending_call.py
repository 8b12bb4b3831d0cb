"""Hold one call: its arguments, the ranks' answers, its future or stream, and whether the ranks
agree.

In a correct call all members of a group begin the same collectives in the same order, and every
message is both sent and received. If not, an operation is left half done, and the next call's
operations would be matched with it: one request's data would end up in another's answer; or the
data of an operation are wrong, or end a process, where the transport does not compare what the
ranks call. Pure functions here; `device_comm.call_number` fingerprints the operations in each rank,
and the board has the tallies of a rank whose process has ended.

A call is *done* when its result is known: every rank has answered, or one has failed. It is
*settled* when every rank has answered or failed; only then may the ranks that failed it go on.

Every rank runs the generator. Each item is a separate call, so all ranks continue, or stop, at the
same item, and other calls and streams can run in between. A worker is at most one item ahead of the
consumer: it computes the next item while the consumer has the last one.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeAlias, TypeVar

from coordinator.call_counts import GroupOperationCounts
from coordinator.daemon_threads import is_future_timeout
from device_comm.call_number import BEGUN_KEPT, SIGNATURE_WORDS, VERBS, Did, did_of, has_messages
from shm_broadcast import CoordinatorError, Deadline
from shm_broadcast._native import Turn
from shm_broadcast.errors import counted
from shm_broadcast.state.fingerprint import Fingerprint
from shm_broadcast.state.flight_recorder import OperationRecord

from ..control.protocol import VOID, Failed
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

_U32: Final = (1 << 32) - 1
_AHEAD: Final = 1 << 31


class Difference(NamedTuple):
    """Two ranks of a group that began different operations in a call.

    Attributes:
        group: the group's name.
        ranks: the two global ranks; most ranks did as the first, if there are more.
        did: what each of them began in the group, as text.
    """

    group: str
    ranks: tuple[int, int]
    did: tuple[str, str]


def first_divergence(reports: Mapping[int, Sequence[GroupOperationCounts]]) -> Difference | None:
    """The first difference between the ranks of a call; ``None`` if they have done the same.

    Args:
        reports: by rank, what `coordinator.call_counts.take_operation_counts` returned there. A
        rank that
            is missing is not compared.
    """
    if not any(reports.values()):
        return None
    groups: dict[tuple[str, tuple[int, ...], int], dict[int, bytes]] = {}
    for rank, report in reports.items():
        for name, ranks, number, did in report:
            groups.setdefault((name, ranks, number), {})[rank] = did
    for (name, ranks, _), begun in groups.items():
        known = {rank: begun.get(rank, b"") for rank in ranks if rank in reports}
        found = _compare(ranks, known)
        if found is not None:
            return Difference(name, *found)
    return None


def fatal_divergence(
    rank: int,
    operation: str,
    fingerprints: Mapping[int, Sequence[Fingerprint]],
    past: Callable[[int], Sequence[OperationRecord]],
) -> Difference | None:
    """The difference in the collective in which a rank's process ended; ``None`` if there is none.

    Gloo aborts a process that receives more bytes than it expects, whichever rank is wrong.

    Args:
        rank: the rank whose process ended.
        operation: its last operation, as `MemberStatus.operation`.
        tallies: by rank, those that the board has.
        past: the last operations of a rank, as far as the board has them. Only asked about ranks
            that have begun that collective.
    """
    group, _, verb = operation.rpartition(" ")
    for lost in fingerprints[rank]:
        if verb in VERBS and lost.last.startswith(bytes([VERBS.index(verb)])):
            begun = {
                each: tally
                for each, its in sorted(fingerprints.items())
                for tally in its
                if tally.group == lost.group and (tally.count - lost.count) & _U32 < _AHEAD
            }
            last = {each: tally for each, tally in begun.items() if tally.count == lost.count}
            found = _compare_last(last) or _compare_past(rank, verb, begun, past)
            if found is not None:
                return Difference(group, *found)
    return None


def _compare_last(
    last: Mapping[int, Fingerprint],
) -> tuple[tuple[int, int], tuple[str, str]] | None:
    ranks = _unlike_ranks({rank: tally.digest for rank, tally in last.items()})
    if ranks is None:
        return None
    ours, theirs = (_began(last[rank].last) for rank in ranks)
    return ranks, (ours, theirs if ours != theirs else f"{theirs}, after others")


def _compare_past(
    rank: int, verb: str, begun: Iterable[int], past: Callable[[int], Sequence[OperationRecord]]
) -> tuple[tuple[int, int], tuple[str, str]] | None:
    """Compare the last collective of ``rank`` with what the ranks have begun that are further."""
    number = next(
        ((each.group, each.number) for each in reversed(past(rank)) if each.verb == verb), None
    )
    known = {}
    for each in begun:
        alike = [
            one for one in past(each) if (one.group, one.number) == number and one.verb in VERBS
        ]
        if len(alike) == 1:  # more: another group has the same name
            known[each] = alike[0]
    if rank not in known:
        return None
    ranks = _unlike_ranks(
        {each: (one.verb, one.dtype, one.size, one.peer) for each, one in known.items()}
    )
    if ranks is None:
        return None
    from device_comm.divergence import first_difference, past_text  # noqa: PLC0415 - loads torch

    ours, theirs = (known[each] for each in ranks)
    if first_difference([ours], [theirs], ours.group, 0) is None:
        return None
    return ranks, (f"began {past_text(ours)}", f"began {past_text(theirs)}")


def _compare(
    ranks: tuple[int, ...], known: Mapping[int, bytes]
) -> tuple[tuple[int, int], tuple[str, str]] | None:
    # The bytes first: nearly always they are equal, and no point-to-point message was sent.
    one = next(iter(known.values()))
    if all(begun == one for begun in known.values()) and not has_messages(one):
        return None
    did = {rank: did_of(begun, len(ranks)) for rank, begun in known.items()}
    unlike = _unlike_ranks({rank: (each.collectives, each.checksum) for rank, each in did.items()})
    if unlike is not None:
        return unlike, _unlike(did[unlike[0]], did[unlike[1]])
    for sender in did:
        for receiver in did:
            out = did[sender].sent[ranks.index(receiver)]
            taken = did[receiver].received[ranks.index(sender)]
            if out != taken:
                return (sender, receiver), (
                    f"sent {_messages(out)} to rank {receiver}",
                    f"received {_messages(taken)} from it",
                )
    return None


def _unlike_ranks(marks: Mapping[int, Hashable]) -> tuple[int, int] | None:
    """The first rank that has the most frequent mark, and the first that has another one."""
    most = Counter(marks.values()).most_common(1)[0][0]
    first = next(rank for rank, mark in marks.items() if mark == most)
    return next(((first, rank) for rank, mark in marks.items() if mark != most), None)


def _unlike(ours: Did, theirs: Did) -> tuple[str, str]:
    """For two ranks, what the first collective was that is known to differ."""
    for number in sorted(ours.last.keys() | theirs.last.keys()):
        here, there = (_collective(each, number) for each in (ours, theirs))
        if here and there and ours.last.get(number) != theirs.last.get(number):
            return here, f"{there}, of other sizes" if here == there else there
    did = f"began {ours.collectives} collectives", f"began {theirs.collectives} others"
    return did[0], f"{did[1]}: they differ before the last {BEGUN_KEPT}"


def _collective(did: Did, number: int) -> str:
    """What a rank's collective of that number was; ``""``: it is not kept."""
    if number > did.collectives:
        count = counted(did.collectives, "collective") if did.collectives else "no collective"
        return f"began {count}"
    if number not in did.last:
        return ""
    return f"{_began(did.last[number])} (collective {number})"


def _began(signature: bytes) -> str:
    from device_comm.shm.signature import signature_text, with_chunk  # noqa: PLC0415 - loads torch

    whole = signature.ljust(SIGNATURE_WORDS * 8, b"\0")
    return f"began {signature_text(with_chunk(whole, 0))}"


def _messages(count: int) -> str:
    return counted(count, "message") if count else "no messages"


if TYPE_CHECKING:
    Late: TypeAlias = Callable[[float | None], CallTimeoutError]

T = TypeVar("T")


class _Condition(threading.Condition):
    """A condition that ``with`` takes as it takes a lock: by no code of Python's, in which a signal
    handler could raise once it is taken. It would stay taken, and hold up the pool's threads.
    """

    __enter__ = property(lambda self: self._lock.__enter__)
    __exit__ = property(lambda self: self._lock.__exit__)


class CallFuture(Future[Any]):
    """A `concurrent.futures.Future` whose time-out errors name late workers, with their stacks."""

    def __init__(self) -> None:
        super().__init__()
        self._owner = os.getpid()
        self._condition = _Condition()
        self._late: Late | None = None
        self._withdraw: Callable[[], None] | None = None
        self._cancelled: Callable[[], None] | None = None

    def answer_for(
        self, late: Late, withdraw: Callable[[], None], cancelled: Callable[[], None]
    ) -> None:
        """Say whose call it is.

        Args:
            late: makes the error for a ``timeout`` in seconds that has passed; the call goes on.
            withdraw: called when a call is cancelled that is queued.
            cancelled: called when a call is cancelled that the workers have already.
        """
        self._late = late
        self._withdraw = withdraw
        self._cancelled = cancelled

    def cancel(self) -> bool:
        """Cancel the call if it is queued; False if the workers have it, or it is over, or it is
        another process's, from which this one was forked.

        A call that the workers have goes on, but they hear that nobody waits for it: see
        `worker.WorkerContext.cancelled`.
        """
        if os.getpid() != self._owner:
            return False
        if super().cancel():
            withdraw = self._withdraw
            if withdraw is not None:
                withdraw()
            self._forget()
            return True
        cancelled = self._cancelled
        if cancelled is not None:
            cancelled()
        return False

    def set_running_or_notify_cancel(self) -> bool:
        """As every future's; False, too, if its owner has set a result already."""
        with self._condition:
            finished = self.done() and not self.cancelled()
            return not finished and super().set_running_or_notify_cancel()

    def set_result(self, result: Any) -> None:
        """As every future's."""
        super().set_result(result)
        self._forget()

    def set_exception(self, exception: BaseException | None) -> None:
        """As every future's."""
        super().set_exception(exception)
        self._forget()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the call's result.

        Raises:
            CallTimeoutError: there is none within ``timeout`` seconds; the call goes on.
            CancelledError: the call was cancelled.
            PoolClosedError: this process was forked before the call had ended.
            ValueError, TypeError: ``timeout`` is not a duration.
            What the call raises.
        """
        return self._within(timeout, super().result)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call to end; its error, or ``None``. Raises as `result` on a time-out."""
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
        """Let go of the call, which holds this future: no garbage collection has to find them."""
        self._late = self._withdraw = self._cancelled = None


async def awaited(begin: Callable[[], Future[Any]]) -> Any:
    """The result of the future that ``begin`` returns; a task that is cancelled meanwhile cancels
    it.

    Raises:
        RuntimeError: no loop of asyncio runs here, as under trio. Nothing was begun.
        What ``begin`` raises, or the future.
    """
    import asyncio  # noqa: PLC0415 - takes a third of this package's time, and few need it

    loop = asyncio.get_running_loop()
    return await asyncio.wrap_future(begin(), loop=loop)


MOST_TRIES = 3
"""How often a call is made. The workers are lost each time, so it may be the call that kills them.
"""


class PendingCall:
    """A call that the workers have, or will get. Not thread-safe: the ledger's lock guards it.

    Attributes:
        method: the name of the worker's method.
        args: positional arguments.
        kwargs: keyword arguments.
        reply_rank: the only rank whose value is wanted; ``None``: all ranks' are.
        number: 1, 2, ... in the order of sending; 0 until it is sent.
        waiting: the ranks that have neither answered nor failed.
        failed: the ranks whose method raised; they wait until they are told to go on.
        error: what the caller gets instead of a result; ``None`` if nothing is wrong yet.
        failure: the first failure that a rank reported. One that is only the consequence of another
            rank's failure counts until a real cause is reported.
        hearsay: whether ``failure`` is such a consequence.
        cut_off: whether the board was aborted when a rank reported: the pool breaks, whoever else
            answers.
        done: whether the result is known.
        timeout: seconds that it may take, from ``since``; ``None``: `PoolConfig.call_seconds`.
        since: when it was made, in seconds of ``time.monotonic()``.
        stream: as in `control.protocol.Call`.
        begins: as in `control.protocol.Call`.
        retry: whether to make the call again, on the next generation, when the pool is restarted.
        trace: as in `control.protocol.Call`: that of whoever makes this object.
    """

    __slots__ = (
        "_begun", "_ending", "_future", "_n_ranks", "_tries", "_values", "args", "begins",
        "cut_off", "done", "error", "failed", "failure", "hearsay", "kwargs", "method", "number",
        "reply_rank", "retry", "since", "stream", "timeout", "trace", "waiting",
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
        deadline = Deadline.after(timeout)  # raises ValueError for what is not a duration
        self.timeout = deadline.timeout
        self.since = time.monotonic()
        self.method = method
        self.args = tuple(args)
        self.kwargs = dict(kwargs)
        self.reply_rank = reply_rank
        self.stream = stream
        self.begins = begins
        self.retry = retry
        self.trace = carried()
        self.done = False
        self._n_ranks = n_ranks
        self._tries = 0
        self._future: CallFuture | None = None
        self._ending: threading.Lock | None = None
        self._forget_answers()

    def _forget_answers(self) -> None:
        self.number = 0
        self.waiting = set(range(self._n_ranks))
        self.failed: list[int] = []
        self.error: BaseException | None = None
        self.failure: WorkerError | StreamLostError | None = None
        self.hearsay = False
        self.cut_off = False
        self._values: list[Any] = [None] * self._n_ranks
        self._begun: dict[int, tuple[GroupOperationCounts, ...]] = {}

    @property
    def is_void(self) -> bool:
        """Whether it calls nothing: see `void`."""
        return self.method == VOID

    def void(self) -> PendingCall:
        """A call, of the same ranks, of nothing. Its replies tell that those before it are lost, if
        they have not come: a rank's replies come in order.
        """
        return PendingCall(VOID, (), {}, self._n_ranks, 0)

    @property
    def settled(self) -> bool:
        """Whether every rank has answered or failed."""
        return not self.waiting

    def compare(self) -> CallDivergedError | None:
        """The error if ranks began different group operations in this call; ``None`` if not."""
        found = first_divergence(self._begun)
        return found and CallDivergedError(self.number, self.method, *found)

    def answer(self, rank: int, value: Any, begun: tuple[GroupOperationCounts, ...]) -> None:
        """Note the result of ``rank``, and the group operations that it began."""
        self._begun[rank] = begun
        self._values[rank] = value
        self.waiting.discard(rank)  # last: a signal handler may raise before

    def spoil(self, rank: int, error: BaseException) -> None:
        """Note that ``rank`` has answered, but that its answer was lost because of ``error``."""
        self.error = self.error or error
        self.waiting.discard(rank)

    def fail(self, rank: int, error: WorkerError | StreamLostError, told: Failed) -> None:
        """Note that ``rank`` has failed: its report, and the error that was made of it."""
        self._begun[rank] = told.begun
        self.failed.append(rank)
        self.hearsay = told.consequence and (self.hearsay or self.failure is None)
        if not told.consequence:
            self.error = self.error or error
            reported = isinstance(self.error, (WorkerError, StreamLostError))
            self.failure = self.error if reported else error  # type: ignore[assignment]
        self.failure = self.failure or error
        self.waiting.discard(rank)

    def finish(self, pool: str) -> Callable[[], None]:
        """Fix the result, once; returns the function that passes it to the future, if there is one.
        The text of an error names the ``pool``, if that has a name.

        Run that without holding locks: a future runs its callbacks at once, and they may call the
        pool.
        """
        if not self.done:
            self.error = self.error or self.failure or self._uneven_end()
            if self.error is not None:
                located(self.error, pool)
            self.done = True
            if self._ending is not None:
                self._ending.release()
        future = self._future
        return _nothing if future is None else lambda: self._hand_out(future)

    def result(self) -> Any:
        """The result of a call that is done: the value of ``reply_rank``, or a list by rank.

        Raises:
            The call's error, as a copy.
        """
        if self.error is not None:
            raise again(self.error)
        return self._values if self.reply_rank is None else self._values[self.reply_rank]

    def ending(self) -> threading.Lock:
        """A lock that can be taken, once, when the call is done. The same one each time.

        Waiting for a future is no way for a caller: its own lock would stay taken if a signal
        handler raised at the wrong moment.
        """
        if self._ending is None:
            self._ending = threading.Lock()
            if not self.done:
                self._ending.acquire()
        return self._ending

    def future(self) -> CallFuture:
        """The future of the result, the same one each time."""
        if self._future is None:
            self._future = CallFuture()
            if self.done:
                self._hand_out(self._future)
        return self._future

    def begin(self) -> bool:
        """Whether to send the call: False if its future was cancelled or given a result, or it was
        late. Its future cannot be cancelled from now on.
        """
        future = self._future
        if self.done or future is None or future.running():
            return not self.done
        return future.set_running_or_notify_cancel()

    def take_back(self) -> bool:
        """Whether the call, whose workers are lost, is to be made again: if so it is as if new.

        One that was queued may be made as often as before.
        """
        self._tries += self.number > 0
        if self.done or not self.retry or self._tries >= MOST_TRIES:
            return False
        self._forget_answers()
        return True

    def lose(self, error: BaseException) -> None:
        """Note that the workers for which it was accepted are lost because of ``error``: none of
        them waits any more.
        """
        self.error = self.error or error
        self.failed = []

    def _uneven_end(self) -> CallDivergedError | None:
        """The error if a stream has ended on some ranks only."""
        if self.stream <= 0 or not self.settled:
            return None
        ended = [not value for value in self._values]
        if len(set(ended)) == 1:
            return None
        ranks = ended.index(True), ended.index(False)
        did = "ended the stream", "went on with it"
        return CallDivergedError(self.number, self.method, "world", ranks, did)

    def _hand_out(self, future: Future[Any]) -> None:
        with suppress(InvalidStateError):  # it was cancelled, or its owner has set a result
            if self.error is not None:
                future.set_exception(again(self.error))
            else:
                future.set_result(self.result())


def _nothing() -> None:
    """Hand nothing out."""


if TYPE_CHECKING:
    NextItem: TypeAlias = Callable[[int, bool], Future[Any]]

_log = logging.getLogger(__name__)


class CallStream:
    """Iterates over what a worker's generator yields. One thread at a time may ask for an item; any
    thread may close it.

    It closes the generator on all ranks when it is closed or collected as garbage, at the end of a
    ``with`` block, and when an item fails: after that the stream is over.

    Args:
        number: the stream's number, from 1; no other stream of the pool has it.
        step: ``(stream, first)``: queue a call for the next item of stream ``stream``, or, if it is
            negative, to close it. ``first``: whether the call begins the generator.
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
            RuntimeError: another thread waits for an item; it gets that, and the stream goes on.
            CallDivergedError: the generator ended on some ranks only. The pool goes on.
            What `pool.WorkerPool.call` raises.
        """
        with self._taking as mine:
            if not mine:
                raise RuntimeError("another thread waits for an item of this stream")
            try:
                found = self.ask().result()
            except CancelledError:  # another thread has closed the stream
                raise StopIteration from None
            except BaseException:
                self.close()
                raise
            if not self.take(found):
                raise StopIteration
            return found[0]

    def ask(self) -> Future[Any]:
        """Ask for the next item, unless that was done.

        Returns:
            The future of a tuple: ``(item,)``, or ``()`` at the end. Pass it to `take`.
        """
        with self._in_order:
            if self._over:
                return _finished()
            if self._asked is None:
                first, self._begun = not self._begun, True
                self._asked = self._step(self._number, first)
            return self._asked

    def take(self, found: tuple[Any, ...]) -> bool:
        """Take what `ask` has found, and ask for the next item; False at the end."""
        self._asked = None
        if not found:
            self.close()
            return False
        with suppress(CoordinatorError):  # the next `ask` raises it; this item is there
            self.ask()
        return True

    def close(self) -> None:
        """Close the generator on all ranks, behind the calls that were made before. Idempotent.

        Returns at once. A worker that computes an item just now hears that nobody waits for it:
        see `worker.WorkerContext.cancelled`. Another thread that waits for that item gets it all
        the same, or StopIteration if no worker had begun with it.
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
        """Close the stream in another thread: this one may hold the pool's lock at any moment.

        Not while the interpreter ends, and the pool with it: a thread would not start any more.
        """
        if self._begun and not self._over and not _at_the_end():
            threading.Thread(target=self.close, name="pool-stream-end", daemon=True).start()


def _finished() -> Future[Any]:
    over: Future[Any] = Future()
    over.set_result(())
    return over


def _log_failure(closed: Future[Any]) -> None:
    error = None if closed.cancelled() else closed.exception()
    # With its worker, or with the pool, a generator has ended, too.
    ended = (CallStuckError, PoolClosedError, WorkerLostError)
    if error is not None and not isinstance(error, ended):
        _log.warning("a stream's generator could not be closed: %s", error)
