"""A pool as a service: it is started beside the server, watched, and ended in order.

States: *starting* while the workers load; *ready* once a probe call was answered; *restarting*
while lost workers are replaced; *stalled* while calls are not answered in time; *failed* for good
when the workers did not start, or the pool broke; *stopping* from `PoolService.stop` on. While it
is restarting, requests are refused; those that were accepted before are computed again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from coordinator.apart import begin_apart
from shm_broadcast import CoordinatorError

from .gauges import Activity, of_operations, of_service, of_workers
from .metrics import Metrics
from .overview import clipped, past_failure, workers
from .watched_pool import WatchedPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prometheus_client import Metric

    from shm_broadcast import MemberStatus

    from ..pool import WorkerPool
    from ..replicas import Replicas
    from .service_limits import ServiceLimits

_log = logging.getLogger(__name__)
_UNANSWERED_SECONDS = 1.0
"""Seconds that clients have to read that their requests were given up, before the server ends."""
_LEAVE_SECONDS = 3.0
"""Seconds that workers have to end once all requests are answered."""
_SLOW_SECONDS = 1.0
"""A call that takes longer has `PoolService.seen` look who waits for whom."""
_FAILED_SECONDS = 2.0
"""Seconds for which a service that has failed still tells clients and probes why."""


class NotReadyError(CoordinatorError):
    """The service cannot answer now: it is starting, stalled, failed or stopping."""


class PoolService(ABC):
    """The life of a pool that answers requests; belongs to one event loop.

    Args:
        make_pool: starts the workers; runs in a thread.
        limits: see `ServiceLimits`.
        kind: what requests are answered with, for the metrics.
    """

    def __init__(
        self,
        make_pool: Callable[[], WorkerPool | Replicas],
        limits: ServiceLimits,
        kind: str,
    ) -> None:
        self._make_pool = make_pool
        self._limits = limits
        self._watched: WatchedPool | None = None
        self._probed = False
        self._stopping = self._stopped = False
        self._failure: Exception | None = None
        self._running: asyncio.Task[None] | None = None
        self._giving_up: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.metrics = Metrics(self._now, kind)

    @property
    @abstractmethod
    def waiting(self) -> int:
        """How many inputs wait to be sent to the workers."""

    @abstractmethod
    async def _probe(self, pool: WatchedPool) -> None:
        """Have the workers compute something small: before the first request, and when the pool
        stands still.
        """

    @abstractmethod
    async def _finish(self) -> None:
        """Take no more requests, and answer what was accepted."""

    @property
    def state(self) -> str:
        """One of `gauges.STATES`."""
        if self.failure is not None:
            return "failed"
        if self._stopping:
            return "stopping"
        if not self._probed:
            return "starting"
        if self.restarting is not None:
            return "restarting"
        return "stalled" if self.stalled else "ready"

    @property
    def failure(self) -> Exception | None:
        """Why the workers did not start, or what broke the pool: it cannot recover."""
        if self._failure is None and self._watched is not None:
            self._failure = self._watched.failure
        return self._failure

    @property
    def restarting(self) -> CoordinatorError | None:
        """What broke the pool, while it is restarted for that."""
        return None if self._watched is None else self._watched.pool.restarting

    @property
    def stalled(self) -> str:
        """Which calls were not answered in time; ``""`` unless the service is stalled."""
        return self._watched.stalled if self._probed and self._watched is not None else ""

    def workers(self) -> Sequence[MemberStatus]:
        """What every worker was last seen doing; empty before they run and after they stop."""
        return () if self._watched is None else self._watched.workers()

    def _now(self) -> Iterator[Metric]:
        yield from of_service(self.activity())
        yield from of_workers(self.workers())
        yield from of_operations({} if self._watched is None else self._watched.totals())

    def activity(self) -> Activity:
        """What the service does at this moment."""
        running, seconds = (0, 0.0) if self._watched is None else self._watched.running
        restarts = 0 if self._watched is None else self._watched.pool.restarts
        return Activity(self.state, self.waiting, running, seconds, restarts)

    def status(self) -> dict[str, Any]:
        """State, failures, load, totals and workers as plain data, for JSON."""
        watched = self._watched
        return {
            "now": time.time(),
            **asdict(self.activity()),
            "failure": None if self.failure is None else clipped(self.failure),
            "reason": clipped(self._reason),
            "last_failure": None if watched is None else past_failure(watched.last_failure),
            "totals": self.metrics.totals(),
            "grid": {} if watched is None else watched.pool.grid.sizes,
            "workers": [] if watched is None else workers(watched.pool.grid, self.workers()),
        }

    async def seen(self) -> dict[str, Any]:
        """The status, and who holds up whom where a call takes long."""
        status = self.status()
        slow, verdict = status["oldest_call_seconds"] >= _SLOW_SECONDS, []
        if slow and self._watched is not None:
            verdict = await self._watched.who_holds_up()
        return {**status, "verdict": verdict}

    @property
    def _reason(self) -> object:
        """Why the state is what it is, where it is not that all is well."""
        return self.failure or self.restarting or self.stalled

    def check_ready(self) -> None:
        """Raise unless requests can be answered.

        Raises:
            NotReadyError: they cannot; says why.
        """
        if self.state != "ready":
            told = f": {self._reason}" if self._reason else ""
            raise NotReadyError(f"the service is {self.state}{told}") from self.failure

    def start(self, on_failure: Callable[[], None]) -> None:
        """Begin to start the workers.

        Args:
            on_failure: called in the event loop if they do not start, and when the pool has broken,
                once clients have had time to hear of it.
        """
        self._loop = asyncio.get_running_loop()
        self._running = asyncio.create_task(self._run(on_failure))

    async def stop(self) -> None:
        """Finish what was accepted, then end the workers. Workers that still load end when this
        process does.
        """
        self._stopping = True
        if self._running is not None:
            self._running.cancel()
        await self._finish()
        if self._watched is not None:
            await self._watched.shutdown(_LEAVE_SECONDS)
        self._stopped = True

    def give_up(self, then: Callable[[], None]) -> None:
        """End the workers now: requests that wait get an error. From any thread or signal handler.
        Does nothing after `stop`.

        Args:
            then: called in the event loop after clients have had time to read that error.
        """
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin_giving_up, then)

    def _begin_giving_up(self, then: Callable[[], None]) -> None:
        if not self._stopped:  # afterwards the loop ends, perhaps without another look at its tasks
            _log.warning("accepted requests are given up: their time is over, or a 2nd signal came")
            self._giving_up = asyncio.create_task(self._give_up(then))

    async def _give_up(self, then: Callable[[], None]) -> None:
        self._stopping = True
        if self._watched is not None:
            await self._watched.shutdown(0.0)
        await asyncio.sleep(_UNANSWERED_SECONDS)
        then()

    async def _run(self, on_failure: Callable[[], None]) -> None:
        try:
            pool = await asyncio.wrap_future(begin_apart(self._make_pool, "start-pool"))
            self._watched = watched = WatchedPool(pool, self.metrics, self._limits)
            await self._probe(watched)
        except Exception as error:  # noqa: BLE001 - it is kept, and raised by whoever serves
            self._failure = error
        else:
            self._probed = True
            await watched.watch(lambda: self._probe(watched))
            await asyncio.sleep(_FAILED_SECONDS)
        on_failure()
