"""The future of a call; its time-out errors name the workers that are late."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..errors import CallTimeoutError

    Late: TypeAlias = Callable[[float | None], CallTimeoutError]


class CallFuture(Future[Any]):
    """A `concurrent.futures.Future` whose time-out errors name late workers, with their stacks."""

    def __init__(self) -> None:
        super().__init__()
        self._late: Late | None = None
        self._cancelled: Callable[[], None] | None = None

    def answer_for(self, late: Late, cancelled: Callable[[], None]) -> None:
        """Say whose call it is.

        Args:
            late: makes the error for a ``timeout`` in seconds that has passed; the call goes on.
            cancelled: called when a call is cancelled that the workers have already.
        """
        self._late = late
        self._cancelled = cancelled

    def cancel(self) -> bool:
        """Cancel the call if it is queued; False if the workers have it, or it is over.

        A call that the workers have goes on, but they hear that nobody waits for it: see
        `worker.WorkerContext.cancelled`.
        """
        if super().cancel():
            return True
        if self._cancelled is not None:
            self._cancelled()
        return False

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the call's result.

        Raises:
            CallTimeoutError: there is none within ``timeout`` seconds; the call goes on.
            CancelledError: the call was cancelled.
            What the call raises.
        """
        try:
            return super().result(timeout)
        except TimeoutError:
            # Done all the same: the call's own error is a TimeoutError, or it ended just now.
            if self.done():
                return super().result()
            raise self._why(timeout) from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the call to end; its error, or ``None``. Raises as `result` on a time-out."""
        try:
            return super().exception(timeout)
        except TimeoutError:
            if self.done():
                return super().exception()
            raise self._why(timeout) from None

    def _why(self, timeout: float | None) -> TimeoutError:
        return TimeoutError() if self._late is None else self._late(timeout)
