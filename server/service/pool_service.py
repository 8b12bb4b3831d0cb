"""Run a pool as a service: start it, count its calls, detect stalls, shut it down.

States: *starting* while the workers load; *ready* once a probe call was answered; *restarting*
while lost workers are replaced; *stalled* while calls are not answered in time; *failed* for good
when the workers did not start, or the pool broke; *stopping* from `PoolService.stop` on. While the
pool restarts, new requests are rejected, and accepted requests are computed again.

The pool is stalled while a call runs longer than the limit, and after a call has timed out. The
reply to a timed-out call is not visible, so the call counts as running until a later call is
answered.
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

from ..calls.call_table import ignore
from ..errors import CallStuckError, CallTimeoutError, PoolClosedError, with_notes
from .api import clipped, past_failure, workers
from .metrics import Activity, Metrics, of_operations, of_service, of_workers

if TYPE_CHECKING:
    from ..config import ServiceLimits
    from ..pool import WorkerPool
    from ..replicas import Replicas


@dataclass
class StallDetector:
    """Running calls of one pool; older than ``limit`` seconds is a stall. Thread-safe."""

    limit: float
    _began: dict[int, float] = field(default_factory=dict)
    _timed_out: set[int] = field(default_factory=set)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def begin(self, now: float) -> int:
        """Add a call; return its number."""
        number = next(self._numbers)
        self._began[number] = now
        return number

    def answered(self, number: int) -> None:
        """Remove a call with a result or an error, and all timed-out calls before it."""
        for each in (*(late for late in self._timed_out.copy() if late < number), number):
            self._timed_out.discard(each)
            self._began.pop(each, None)

    def timed_out(self, number: int) -> None:
        """Mark a call that timed out while the workers ran it or restarted."""
        self._timed_out.add(number)

    def withdrawn(self, number: int) -> None:
        """Remove a call that was not sent, or has no waiting caller."""
        del self._began[number]

    @property
    def running(self) -> int:
        """Return the number of running calls."""
        return len(self._began)

    @property
    def awaited(self) -> bool:
        """Return whether a caller waits for a running call."""
        return len(self._began) > len(self._timed_out)

    def oldest(self, now: float) -> float:
        """Return the age of the oldest running call in seconds; 0 without one."""
        return now - min([*self._began.values()], default=now)

    def stalled(self, now: float) -> bool:
        """Return whether the pool is stalled."""
        return bool(self._timed_out) or self.oldest(now) >= self.limit


_WATCH_SECONDS = 0.2
_SENTENCES = 12
_log = logging.getLogger(__name__)


class InstrumentedPool:
    """Counts and times the calls of a started pool.

    Belongs to one event loop; `call` may run in any thread. ``call_timeout``: seconds for a call.
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
        """Return when (seconds since the epoch) and why the pool or a call last failed."""
        known = [each for each in (self.pool.last_failure, self._failed_call) if each is not None]
        return max(known, key=lambda failure: failure[0], default=None)

    @property
    def failure(self) -> CoordinatorError | None:
        """Return the error that broke the pool for good."""
        failure = self.pool.failure
        return None if isinstance(failure, PoolClosedError) else failure

    @property
    def stalled(self) -> str:
        """Return why the pool is stalled; ``""`` if it is not."""
        now = time.monotonic()
        if not self._watch.stalled(now):
            return ""
        seconds, reason = self._watch.oldest(now), self.pool.restarting
        if reason is None:
            waits = " ".join(line for line in self._held_up if not line.startswith(" "))
            why = waits or "; ".join(map(str, self.workers()))
        else:
            why = f"the pool is being restarted after this: {reason}"
        return f"a call was not answered for {seconds:.0f} s: {why}"

    @property
    def running(self) -> tuple[int, float]:
        """Return the number of running calls, and the age of the oldest in seconds."""
        return self._watch.running, self._watch.oldest(time.monotonic())

    def workers(self) -> Sequence[MemberStatus]:
        """Return every worker's status; empty after `shutdown`."""
        return () if self._closed else self.pool.status()

    def totals(self) -> Mapping[int, Sequence[VerbTotal]]:
        """Return each worker's operation totals by rank; empty after `shutdown`."""
        return {} if self._closed else self.pool.totals()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method as `WorkerPool.call`, from any thread.

        ``args`` are rows of a step; a call without rows computes no batch, and is not counted.

        Raises:
            CallTimeoutError: workers timed out; names them.
            CoordinatorError: the workers failed.
        """
        sizes = [len(row.tokens) for rows in args for row in rows]
        with self.counted(sizes) if args else nullcontext():
            return self.pool.call(method, *args, timeout=self.call_timeout)

    async def hang_report(self) -> list[str]:
        """Return the first sentences of `WorkerPool.hang_report`."""
        try:
            report = await asyncio.to_thread(self.pool.hang_report)
        except RuntimeError:  # no thread can be started: continue without a report
            return []
        return [clipped(line) for line in report[:_SENTENCES]]

    async def watch(self, probe: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Log stalls and recoveries until the pool has broken; ``probe`` computes a small batch."""
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
        """Shut down the pool; see `WorkerPool.shutdown`."""
        self._closed = True
        await asyncio.to_thread(self.pool.shutdown, seconds)

    @contextmanager
    def counted(self, sizes: Sequence[int]) -> Iterator[None]:
        """Count a call of items with ``sizes`` tokens, and its outcome."""
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
                if not isinstance(error, CallStuckError):  # breaks the pool, which logs it
                    _log.error("%s", with_notes(error))
            raise
        finally:
            end(number)
            self._metrics.calls.labels(outcome).inc()
            self._metrics.call_seconds.labels(outcome).observe(time.monotonic() - began)
            self._metrics.batch_items.observe(len(sizes))
            self._metrics.batch_tokens.observe(sum(sizes))


_UNANSWERED_SECONDS = 1.0
"""Seconds for clients to read the error of abandoned requests."""
_SHUTDOWN_SECONDS = 3.0
"""Seconds for workers to exit after all requests are answered."""
_SLOW_SECONDS = 1.0
"""Age of a call from which `PoolService.seen` includes a hang report."""
_FAILED_SECONDS = 2.0
"""Seconds for which a failed service still sends the reason to clients and probes."""


class NotReadyError(CoordinatorError):
    """The service is starting, restarting, stalled, failed or stopping."""


class PoolService(ABC):
    """Runs a pool that answers requests; belongs to one event loop.

    ``make_pool`` starts the pool, in a thread; ``make_metrics`` gets a function that yields the
    metrics of the present state.

    Attributes:
        on_ready: called in the event loop before the first request is accepted.
    """

    def __init__(
        self,
        make_pool: Callable[[], WorkerPool | Replicas],
        limits: ServiceLimits,
        make_metrics: Callable[[Callable[[], Iterator[Metric]]], Metrics],
    ) -> None:
        self._make_pool = make_pool
        self._limits = limits
        self._pool: InstrumentedPool | None = None
        self._probed = False
        self._stopping = self._stopped = False
        self.on_ready: Callable[[], object] = ignore
        self._failure: Exception | None = None
        self._running: asyncio.Task[None] | None = None
        self._giving_up: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.metrics = make_metrics(self._now)

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Return the number of inputs that wait for the workers."""

    @abstractmethod
    async def _probe(self, pool: InstrumentedPool) -> None:
        """Compute a small batch: before the first request, and while the pool is stalled."""

    @abstractmethod
    async def _finish(self) -> None:
        """Refuse new requests, and wait until accepted ones are answered."""

    @property
    def state(self) -> str:
        """Return one of `metrics.STATES`."""
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
        """Return the error of the start, or the error that broke the pool for good."""
        if self._failure is None and self._pool is not None:
            self._failure = self._pool.failure
        return self._failure

    @property
    def restarting(self) -> CoordinatorError | None:
        """Return the error for which the pool is being restarted, or ``None``."""
        return None if self._pool is None else self._pool.pool.restarting

    @property
    def stalled(self) -> str:
        """Return why the service is stalled; ``""`` if it is not."""
        return self._pool.stalled if self._probed and self._pool is not None else ""

    def workers(self) -> Sequence[MemberStatus]:
        """Return every worker's status; empty before the start and after the end."""
        return () if self._pool is None else self._pool.workers()

    def _now(self) -> Iterator[Metric]:
        yield from of_service(self.activity())
        yield from of_workers(self.workers())
        yield from of_operations({} if self._pool is None else self._pool.totals())

    def activity(self) -> Activity:
        """Return the current state and load."""
        running, seconds = (0, 0.0) if self._pool is None else self._pool.running
        restarts = 0 if self._pool is None else self._pool.pool.restarts
        return Activity(self.state, self.waiting, running, seconds, restarts)

    def status(self) -> dict[str, Any]:
        """Return state, failures, load, totals and workers as plain data, for JSON."""
        pool = self._pool
        return {
            "now": time.time(),
            **asdict(self.activity()),
            "failure": None if self.failure is None else clipped(self.failure),
            "reason": clipped(self._reason),
            "last_failure": None if pool is None else past_failure(pool.last_failure),
            "totals": self.metrics.totals(),
            "grid": {} if pool is None else pool.pool.grid.sizes,
            "workers": [] if pool is None else workers(pool.pool.grid, self.workers()),
        }

    async def seen(self) -> dict[str, Any]:
        """Return the status, with a hang report if a call takes long."""
        status = self.status()
        slow, report = status["oldest_call_seconds"] >= _SLOW_SECONDS, []
        if slow and self._pool is not None:
            report = await self._pool.hang_report()
        return {**status, "verdict": report}

    @property
    def _reason(self) -> object:
        return self.failure or self.restarting or self.stalled

    def check_ready(self) -> None:
        """Raise `NotReadyError` with the reason unless requests can be answered."""
        if self.state != "ready":
            reason = f": {self._reason}" if self._reason else ""
            raise NotReadyError(f"the service is {self.state}{reason}") from self.failure

    def start(self, on_failure: Callable[[], object]) -> None:
        """Start the workers, without waiting for them.

        Args:
            on_failure: called in the event loop if the start fails, or when the pool has broken for
                good and clients had time to read the reason.
        """
        self._loop = asyncio.get_running_loop()
        self._running = asyncio.create_task(self._run(on_failure))

    async def stop(self) -> None:
        """Answer accepted requests, then end the workers.

        Workers that are still loading end with this process.
        """
        self._stopping = True
        if self._running is not None:
            self._running.cancel()
        await self._finish()
        if self._pool is not None:
            await self._pool.shutdown(_SHUTDOWN_SECONDS)
        self._stopped = True

    def give_up(self, then: Callable[[], None]) -> None:
        """End the workers now; waiting requests get an error.

        May be called in any thread or signal handler. Does nothing after `stop`.

        Args:
            then: called in the event loop after clients had time to read the error.
        """
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin_giving_up, then)

    def _begin_giving_up(self, then: Callable[[], None]) -> None:
        if not self._stopped:  # afterwards the loop may end before a new task runs
            _log.warning("accepted requests are abandoned: drain timeout, or second signal")
            self._giving_up = asyncio.create_task(self._give_up(then))

    async def _give_up(self, then: Callable[[], None]) -> None:
        self._stopping = True
        if self._pool is not None:
            await self._pool.shutdown(0.0)
        await asyncio.sleep(_UNANSWERED_SECONDS)
        then()

    async def _run(self, on_failure: Callable[[], object]) -> None:
        try:
            pool = await asyncio.wrap_future(submit_in_thread(self._make_pool, "start-pool"))
            self._pool = instrumented = InstrumentedPool(pool, self.metrics, self._limits)
            await self._probe(instrumented)
        except Exception as error:  # noqa: BLE001 - kept as `failure`
            self._failure = error
        else:
            self._probed = True
            self.on_ready()
            await instrumented.watch(lambda: self._probe(instrumented))
            await asyncio.sleep(_FAILED_SECONDS)
        on_failure()
