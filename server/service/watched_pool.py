"""A worker pool whose calls are counted, and which is watched for stalls and for its end."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from ..errors import CallStuckError, CallTimeoutError, PoolClosedError, with_notes
from .overview import clipped
from .stall import StallWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence

    from shm_broadcast import CoordinatorError, MemberStatus
    from shm_broadcast.board.totals import VerbTotal

    from ..pool import WorkerPool
    from ..replicas import Replicas
    from .metrics import Metrics
    from .service_limits import ServiceLimits

_WATCH_SECONDS = 0.2
_SENTENCES = 12
_log = logging.getLogger(__name__)


class WatchedPool:
    """A running pool; belongs to one event loop, but for `call`.

    Args:
        pool: the pool, which has started.
        metrics: where its calls are counted.
        limits: how long a call may take, and when the pool counts as stalled.

    Attributes:
        pool: as given.
        call_timeout: seconds that a call may take.
    """

    def __init__(
        self,
        pool: WorkerPool | Replicas,
        metrics: Metrics,
        limits: ServiceLimits,
    ) -> None:
        self.pool = pool
        self._metrics = metrics
        self.call_timeout = limits.request_timeout / 2
        self._watch = StallWatch(limits.stall_timeout)
        self._closed = False
        self._held_up: list[str] = []
        self._failed_call: tuple[float, BaseException] | None = None

    @property
    def last_failure(self) -> tuple[float, BaseException] | None:
        """When the pool broke or a call failed last, in seconds since the epoch, and why."""
        known = [each for each in (self.pool.last_failure, self._failed_call) if each is not None]
        return max(known, key=lambda failure: failure[0], default=None)

    @property
    def failure(self) -> CoordinatorError | None:
        """What broke the pool: it cannot recover."""
        failure = self.pool.failure
        return None if isinstance(failure, PoolClosedError) else failure

    @property
    def stalled(self) -> str:
        """Which calls were not answered in time; ``""`` unless the pool is stalled."""
        now = time.monotonic()
        if not self._watch.stalled(now):
            return ""
        seconds, reason = self._watch.oldest(now), self.pool.restarting
        if reason is None:
            told = " ".join(line for line in self._held_up if not line.startswith(" "))
            why = told or "; ".join(map(str, self.workers()))
        else:
            why = f"the pool is being restarted after this: {reason}"
        return f"a call was not answered for {seconds:.0f} s: {why}"

    @property
    def running(self) -> tuple[int, float]:
        """Calls that the workers have, and for how many seconds they have had the oldest."""
        return self._watch.running, self._watch.oldest(time.monotonic())

    def workers(self) -> Sequence[MemberStatus]:
        """What every worker was last seen doing; empty once they were told to end."""
        return () if self._closed else self.pool.status()

    def totals(self) -> Mapping[int, Sequence[VerbTotal]]:
        """What the operations of each worker came to, by rank; empty once they were told to end."""
        return {} if self._closed else self.pool.totals()

    def call(self, method: str, *args: Any) -> Any:
        """As `WorkerPool.call`; for any thread.

        Args:
            method: the method.
            args: the rows of a step; a call without any computes no batch, and is not counted.

        Raises:
            CallTimeoutError: the workers did not answer in time; says which.
            CoordinatorError: the workers failed.
        """
        sizes = [len(row.tokens) for rows in args for row in rows]
        with self.counted(sizes) if args else nullcontext():
            return self.pool.call(method, *args, timeout=self.call_timeout)

    async def who_holds_up(self) -> list[str]:
        """The first sentences of `WorkerPool.who_holds_up`."""
        try:
            told = await asyncio.to_thread(self.pool.who_holds_up)
        except RuntimeError:  # no thread can be started: the rest goes on all the same
            return []
        return [clipped(line) for line in told[:_SENTENCES]]

    async def watch(self, probe: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Log when the pool stalls, and when it answers again; return when the pool has broken for
        good.

        Args:
            probe: computes something, to find out whether a stalled pool answers again.
        """
        stalled = ""
        probing: asyncio.Task[Any] | None = None
        while self.failure is None:
            await asyncio.sleep(_WATCH_SECONDS)
            stalls = self._watch.stalled(time.monotonic())
            self._held_up = await self.who_holds_up() if stalls else []
            before, stalled = stalled, self.stalled
            if stalled and not before:
                _log.error("%s", stalled)
            elif before and not stalled:
                _log.warning("calls are answered again")
            if stalled and not self._watch.awaited and self.failure is None:
                probing = asyncio.create_task(probe())
                probing.add_done_callback(lambda done: done.cancelled() or done.exception())
        _log.critical("the pool has broken: %s", with_notes(self.failure))

    async def shutdown(self, seconds: float) -> None:
        """End the workers; see `WorkerPool.shutdown`."""
        self._closed = True
        await asyncio.to_thread(self.pool.shutdown, seconds)

    @contextmanager
    def counted(self, sizes: Sequence[int]) -> Iterator[None]:
        """Count a call, of items of ``sizes`` tokens, and how it ends."""
        outcome, end = "error", self._watch.withdrawn
        began = time.monotonic()
        number = self._watch.begin(began)
        try:
            yield
            outcome, end = "ok", self._watch.answered
        except Exception as error:
            end = self._watch.answered
            self._failed_call = time.time(), error
            self._metrics.call_errors.labels(type(error).__name__).inc()
            if isinstance(error, CallTimeoutError):
                lacks_workers = error.waiting_for or self.pool.restarting is not None
                end = self._watch.timed_out if lacks_workers else self._watch.withdrawn
                if not isinstance(error, CallStuckError):  # breaks the pool, whose log shows it
                    _log.error("%s", with_notes(error))
            raise
        finally:
            end(number)
            self._metrics.calls.labels(outcome).inc()
            self._metrics.call_seconds.labels(outcome).observe(time.monotonic() - began)
            self._metrics.batch_items.observe(len(sizes))
            self._metrics.batch_tokens.observe(sum(sizes))
