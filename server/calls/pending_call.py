"""One call: its arguments, the ranks' answers, and its result.

A call is *done* when its result is known: every rank has answered, or one has failed. It is
*settled* when every rank has answered or failed; only then may the ranks that failed it go on.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shm_broadcast import Deadline

from ..control.protocol import VOID
from ..errors import CallDivergedError, StreamLostError, WorkerError, again, located
from ..spans import carried
from .agreement import first_divergence
from .call_future import CallFuture

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from coordinator.begun_in_call import BegunInGroup

    from ..control.protocol import Failed


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
        self._begun: dict[int, tuple[BegunInGroup, ...]] = {}

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

    def answer(self, rank: int, value: Any, begun: tuple[BegunInGroup, ...]) -> None:
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
