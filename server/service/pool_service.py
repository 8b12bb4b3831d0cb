"""Run a pool as a service: start it beside the server, count its calls, watch it for stalls, end
it.

It counts as stalled while the workers have had a call for longer than the limit, and while they
have one that has timed out. The answer to the latter is not reported, so they count as having it
until a later call is answered.

States: *starting* while the workers load; *ready* once a probe call was answered; *restarting*
while lost workers are replaced; *stalled* while calls are not answered in time; *failed* for good
when the workers did not start, or the pool broke; *stopping* from `PoolService.stop` on. While it
is restarting, requests are refused; those that were accepted before are computed again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import Metric

from coordinator.daemon_threads import submit_in_thread
from shm_broadcast import CoordinatorError, MemberStatus
from shm_broadcast.state.flight_recorder import VerbTotal

from ..errors import CallStuckError, CallTimeoutError, PoolClosedError, with_notes
from .api import clipped, past_failure, workers
from .metrics import Activity, Metrics, of_operations, of_service, of_workers

if TYPE_CHECKING:
    from ..config import ServiceLimits
    from ..pool import WorkerPool
    from ..replicas import Replicas


@dataclass
class StallDetector:
    """The calls of one pool that the workers have. Any thread may use it.

    Attributes:
        limit: seconds that a call may run before the pool counts as stalled.
    """

    limit: float
    _began: dict[int, float] = field(default_factory=dict)
    _timed_out: set[int] = field(default_factory=set)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def begin(self, now: float) -> int:
        """A call was sent; returns its number."""
        number = next(self._numbers)
        self._began[number] = now
        return number

    def answered(self, number: int) -> None:
        """A call was answered, with a result or an error; so were late ones before it."""
        for each in (*(late for late in self._timed_out.copy() if late < number), number):
            self._timed_out.discard(each)
            self._began.pop(each, None)

    def timed_out(self, number: int) -> None:
        """A call has timed out that the workers have, or for which there are none just now."""
        self._timed_out.add(number)

    def withdrawn(self, number: int) -> None:
        """A call has not come to the workers, or nobody waits for it any more."""
        del self._began[number]

    @property
    def running(self) -> int:
        """How many calls the workers have."""
        return len(self._began)

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for one of them."""
        return len(self._began) > len(self._timed_out)

    def oldest(self, now: float) -> float:
        """Seconds that they have had the oldest call; 0 if they have none."""
        return now - min([*self._began.values()], default=now)

    def stalled(self, now: float) -> bool:
        """Whether the pool counts as stalled."""
        return bool(self._timed_out) or self.oldest(now) >= self.limit


_WATCH_SECONDS = 0.2
_SENTENCES = 12
_log = logging.getLogger(__name__)


class InstrumentedPool:
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
        self._watch = StallDetector(limits.stall_timeout)
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

    async def hang_report(self) -> list[str]:
        """The first sentences of `WorkerPool.hang_report`."""
        try:
            told = await asyncio.to_thread(self.pool.hang_report)
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
            self._held_up = await self.hang_report() if stalls else []
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
        self._pool: InstrumentedPool | None = None
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
    async def _probe(self, pool: InstrumentedPool) -> None:
        """Have the workers compute something small: before the first request, and when the pool
        stands still.
        """

    @abstractmethod
    async def _finish(self) -> None:
        """Take no more requests, and answer what was accepted."""

    @property
    def state(self) -> str:
        """One of `metrics.STATES`."""
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
        if self._failure is None and self._pool is not None:
            self._failure = self._pool.failure
        return self._failure

    @property
    def restarting(self) -> CoordinatorError | None:
        """What broke the pool, while it is restarted for that."""
        return None if self._pool is None else self._pool.pool.restarting

    @property
    def stalled(self) -> str:
        """Which calls were not answered in time; ``""`` unless the service is stalled."""
        return self._pool.stalled if self._probed and self._pool is not None else ""

    def workers(self) -> Sequence[MemberStatus]:
        """What every worker was last seen doing; empty before they run and after they stop."""
        return () if self._pool is None else self._pool.workers()

    def _now(self) -> Iterator[Metric]:
        yield from of_service(self.activity())
        yield from of_workers(self.workers())
        yield from of_operations({} if self._pool is None else self._pool.totals())

    def activity(self) -> Activity:
        """What the service does at this moment."""
        running, seconds = (0, 0.0) if self._pool is None else self._pool.running
        restarts = 0 if self._pool is None else self._pool.pool.restarts
        return Activity(self.state, self.waiting, running, seconds, restarts)

    def status(self) -> dict[str, Any]:
        """State, failures, load, totals and workers as plain data, for JSON."""
        watched = self._pool
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
        if slow and self._pool is not None:
            verdict = await self._pool.hang_report()
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
        if self._pool is not None:
            await self._pool.shutdown(_LEAVE_SECONDS)
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
        if self._pool is not None:
            await self._pool.shutdown(0.0)
        await asyncio.sleep(_UNANSWERED_SECONDS)
        then()

    async def _run(self, on_failure: Callable[[], None]) -> None:
        try:
            pool = await asyncio.wrap_future(submit_in_thread(self._make_pool, "start-pool"))
            self._pool = watched = InstrumentedPool(pool, self.metrics, self._limits)
            await self._probe(watched)
        except Exception as error:  # noqa: BLE001 - it is kept, and raised by whoever serves
            self._failure = error
        else:
            self._probed = True
            await watched.watch(lambda: self._probe(watched))
            await asyncio.sleep(_FAILED_SECONDS)
        on_failure()
