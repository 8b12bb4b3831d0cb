"""The driver's end of a stream: what a worker's generator yields, one call for each item.

Every rank runs the generator. Each item is a separate call, so all ranks continue, or stop, at the
same item, and other calls and streams can run in between. A worker is at most one item ahead of the
consumer: it computes the next item while the consumer has the last one.
"""

from __future__ import annotations

import logging
import sys
import threading
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from shm_broadcast import CoordinatorError
from shm_broadcast.timed_lock import new_turn

from ..errors import CallStuckError, PoolClosedError, WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Callable

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
        self._taking = new_turn()
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
                return _nothing()
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


def _nothing() -> Future[Any]:
    over: Future[Any] = Future()
    over.set_result(())
    return over


def _log_failure(closed: Future[Any]) -> None:
    error = None if closed.cancelled() else closed.exception()
    # With its worker, or with the pool, a generator has ended, too.
    ended = (CallStuckError, PoolClosedError, WorkerLostError)
    if error is not None and not isinstance(error, ended):
        _log.warning("a stream's generator could not be closed: %s", error)
