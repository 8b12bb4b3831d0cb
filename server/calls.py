"""One call, from the caller's request to the last rank's answer.

A call is *done* once its result is known: every rank has answered, or the first has failed. It is
*settled* once every rank has answered, in whatever way; only then may ranks that failed it go on.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from server.errors import WorkerError, again

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from server.messages import Failed


class PendingCall:
    """A call that workers have, or will get. Not thread-safe: its dispatcher locks.

    Attributes:
        method: what is called.
        args: positional arguments.
        kwargs: keyword arguments.
        reply_rank: the only rank whose value is wanted; ``None``: all are.
        number: its place in the queue; 0 until it is sent.
        waiting: the ranks that have not answered.
        failed: the ranks whose method raised; they wait to be resumed.
        error: what the caller will get instead of a result.
        failure: the first failure of a rank; one that only says that another rank failed is used
            if no better one comes.
        done: whether the result is known.
    """

    __slots__ = (
        "_future", "_operations", "_orderly", "_values", "args", "done", "error", "failed",
        "failure", "kwargs", "method", "number", "reply_rank", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        n_ranks: int,
        reply_rank: int | None,
    ) -> None:
        self.method = method
        self.args = tuple(args)
        self.kwargs = dict(kwargs)
        self.reply_rank = reply_rank
        self.number = 0
        self.waiting = set(range(n_ranks))
        self.failed: list[int] = []
        self.error: BaseException | None = None
        self.failure: WorkerError | None = None
        self.done = False
        self._values: list[Any] = [None] * n_ranks
        self._operations: set[int] = set()
        self._orderly = True
        self._future: Future[Any] | None = None

    @property
    def settled(self) -> bool:
        """Whether every rank has answered."""
        return not self.waiting

    @property
    def matched(self) -> bool:
        """Whether no group operation is half done: all ranks began the same number of them, or
        every rank that failed has refused the call in order.
        """
        return self._orderly or len(self._operations) <= 1

    def answer(self, rank: int, value: Any, operations: int) -> None:
        """Note the result of ``rank``."""
        self.waiting.discard(rank)
        self._operations.add(operations)
        self._values[rank] = value

    def spoil(self, rank: int, error: BaseException) -> None:
        """Note that ``rank`` has answered, but that its answer cannot be had: ``error``."""
        self.waiting.discard(rank)
        self.error = self.error or error

    def fail(self, rank: int, error: WorkerError, told: Failed) -> None:
        """Note that ``rank`` has failed: what it told, and the error made of it."""
        self.waiting.discard(rank)
        self._operations.add(told.operations)
        self._orderly &= told.orderly
        self.failed.append(rank)
        if not told.consequence:
            self.error = self.error or error
            self.failure = self.error if isinstance(self.error, WorkerError) else error
        self.failure = self.failure or error

    def finish(self) -> Callable[[], None]:
        """Make the result known; returns what hands it to the future, to be run without locks.

        A future runs its callbacks, and these may call the pool.
        """
        if self.done:
            return _nothing
        self.error = self.error or self.failure
        self.done = True
        future = self._future
        return _nothing if future is None else lambda: self._hand_out(future)

    def result(self) -> Any:
        """The result of a call that is done: one value, or all by rank.

        Raises:
            The call's error, as a copy.
        """
        if self.error is not None:
            raise again(self.error)
        return self._values if self.reply_rank is None else self._values[self.reply_rank]

    def future(self) -> Future[Any]:
        """The future of the result, the same one each time."""
        if self._future is None:
            self._future = Future()
            if self.done:
                self._hand_out(self._future)
        return self._future

    def begin(self) -> bool:
        """Whether to send the call; false if its future was cancelled meanwhile."""
        return self._future is None or self._future.set_running_or_notify_cancel()

    def _hand_out(self, future: Future[Any]) -> None:
        if self.error is not None:
            future.set_exception(again(self.error))
        else:
            future.set_result(self.result())


def _nothing() -> None:
    """Hand nothing out."""
