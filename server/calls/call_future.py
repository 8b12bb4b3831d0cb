"""The future of a call; its time-out errors name the workers that are late."""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from coordinator.apart import is_the_future_s
from shm_broadcast import Deadline

from ..errors import PoolClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..errors import CallTimeoutError

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
            if not is_the_future_s(error):
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
