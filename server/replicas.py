"""Several pools with the same model, which fail independently, behind one interface.

    with Replicas(Embedder, dp=2, tp=2, restart="worker") as replicas:
        replicas.call("embed", tokens, retry=True)

One replica runs each call: the one with the fewest calls at that moment, among those whose workers
are running. When a replica breaks, its calls fail, or run on another replica with ``retry=True``.
After its restart it receives calls again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, Self, TypeVar

from coordinator.daemon_threads import submit_in_thread
from coordinator.rank_grid import RankGrid
from shm_broadcast import CoordinatorError, Deadline, MemberStatus
from shm_broadcast.arguments import function, integer, optional
from shm_broadcast.state.flight_recorder import VerbTotal

from .calls.pending_call import CallStream, PendingCall, awaited
from .config import PoolConfig, settings_of
from .driver.binding import assign, bound_here, checked_device, count_gpus, worker_threads, written
from .driver.limits import translated_limit_errors
from .errors import PoolClosedError, with_notes
from .pool import WorkerPool

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Replicas:
    """``dp`` pools of ``tp`` x ``pp`` workers, among which calls are distributed.

    All methods may be called in any thread.

    Attributes:
        pools: the replicas.
    """

    def __init__(
        self,
        worker: type | str,
        *,
        dp: int,
        tp: int = 1,
        pp: int = 1,
        pcp: int = 1,
        dcp: int = 1,
        axes: Mapping[str, int] | None = None,
        worker_kwargs: Mapping[str, Any] | None = None,
        device: str | Sequence[str] = "cpu",
        share_gpu: bool = False,
        start_timeout: float | None = 120.0,
        on_progress: Callable[[int, int, int, str], None] | None = None,
        restart: str = "worker",
        max_restarts: int | None = None,
        window: float | None = None,
        stuck_after: float | None = None,
        config: PoolConfig | None = None,
    ) -> None:
        """Start all replicas concurrently, and return when all are ready.

        Arguments are those of `pool.WorkerPool`, for each replica, except as follows.

        Args:
            dp: the number of replicas.
            device: as for `pool.WorkerPool`; a GPU for each rank of all replicas.
            on_progress: called with ``(rank, done, total, what)``; ranks are numbered through all
                replicas.
            restart: the reaction when a replica breaks. ``"never"``: the others run without it.
            config: ``bind`` lists all ranks of all replicas; ``name`` is set: ``replica`` and the
                replica's number.

        Raises:
            ValueError, TypeError: an argument is out of range, or cannot be sent to the workers.
            WorkerStartError: a worker of any replica did not start. All processes have ended.
            SharedMemoryError: too little memory is free.
            DescriptorLimitError: the limit of open files is too low (``ulimit -n``).
            ProcessLimitError: no further process or thread can be started.
        """
        dp = integer("dp", dp)
        n = RankGrid.of_job(tp=tp, pp=pp, dp=1, pcp=pcp, axes=axes).size
        on_progress = optional(function)("on_progress", on_progress)
        settings, device = settings_of(config), checked_device(device)
        devices = assign(device, dp * n, count_gpus(device), share_gpu)
        bound = bound_here(settings.bind, dp * n)
        threads = settings.threads or worker_threads(dp * n, bound)

        def start(number: int) -> WorkerPool:
            first = number * n
            return WorkerPool(
                worker,
                tp=tp,
                pp=pp,
                pcp=pcp,
                dcp=dcp,
                axes=axes,
                worker_kwargs=worker_kwargs,
                device=devices[first : first + n],
                share_gpu=share_gpu,
                start_timeout=start_timeout,
                on_progress=on_progress
                and (lambda rank, *progress: on_progress(first + rank, *progress)),
                restart=restart,
                max_restarts=max_restarts,
                window=window,
                stuck_after=stuck_after,
                config=replace(
                    settings,
                    name=f"replica {number}",
                    threads=threads,
                    bind=written(bound[first : first + n]),
                ),
            )

        with ExitStack() as undo:
            starting = []
            for number in range(dp):
                with translated_limit_errors(0, None):
                    future = submit_in_thread(partial(start, number), f"start-replica-{number}")
                undo.callback(_shut_down_when_started, future)
                starting.append(future)
            wait(starting)
            self.pools = [future.result() for future in starting]
            undo.pop_all()
        self._turn = 0
        for pool in self.pools:
            pool._driver.changed = partial(self._changed, pool)

    @property
    def n_workers(self) -> int:
        """Return the number of ranks of all replicas."""
        return sum(pool.n_workers for pool in self.pools)

    @property
    def grid(self) -> RankGrid:
        """Return the ranks of all replicas by their axes."""
        within = {name: size for name, size in self.pools[0].grid.axes if name != "dp"}
        return RankGrid.of({"dp": len(self.pools), **within})

    def call(self, method: str, /, *args: Any, **options: Any) -> Any:
        """Call ``method`` on one replica; return the result of its last stage's first rank.

        Arguments and errors are those of `pool.WorkerPool.call`. If the replica breaks,
        its failure is raised, unless the call has ``retry=True`` and another replica can run it.
        """
        return self.submit(method, *args, **options).result()

    def submit(self, method: str, /, *args: Any, **options: Any) -> Future[Any]:
        """Queue a `call` and return its future; see `pool.WorkerPool.submit`.

        Raises:
            CoordinatorError: the failure that broke the last replica, or `PoolClosedError`.
        """

        def begin(pool: WorkerPool) -> Future[Any]:
            call = pool._call_of_one(method, *args, **options)
            call.move = self._move if call.retry else None
            return pool._driver.submit(call)

        return self._on_one(begin)

    async def acall(self, method: str, /, *args: Any, **options: Any) -> Any:
        """Await a `submit`; see `pool.WorkerPool.acall`."""
        return await awaited(lambda: self.submit(method, *args, **options))

    def stream(self, method: str, /, *args: Any, **options: Any) -> CallStream:
        """Iterate over a generator's items on one replica; see `pool.WorkerPool.stream`.

        A stream stays with its replica, and ends when that replica breaks.
        """
        return self._on_one(lambda pool: pool.stream(method, *args, **options))

    def astream(self, method: str, /, *args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        """Iterate over a `stream` by ``async for``; see `pool.WorkerPool.astream`."""
        return self._on_one(lambda pool: pool.astream(method, *args, **options))

    @property
    def failure(self) -> CoordinatorError | None:
        """Return the last failure or `PoolClosedError`; ``None`` while a replica takes calls."""
        failures = [pool.failure for pool in self.pools]
        if None in failures:
            return None
        return next((each for each in failures if isinstance(each, PoolClosedError)), failures[-1])

    @property
    def restarting(self) -> CoordinatorError | None:
        """Return the failure of a replica in a restart; ``None`` while another one runs."""
        if self._working():
            return None
        return next((pool.restarting for pool in self.pools if pool.restarting), None)

    @property
    def restarts(self) -> int:
        """Return the number of restarts of all replicas."""
        return sum(pool.restarts for pool in self.pools)

    @property
    def last_failure(self) -> tuple[float, CoordinatorError] | None:
        """Return the last failure of any replica and its time, in seconds since the epoch."""
        failures = [pool.last_failure for pool in self.pools]
        known = [failure for failure in failures if failure is not None]
        return max(known, key=lambda failure: failure[0], default=None)

    def status(self) -> list[MemberStatus]:
        """Return every worker's state; ranks are numbered through all replicas.

        Errors, logs and workers' output name the replica, and use ranks within it.

        Raises:
            PoolClosedError: the replicas were shut down.
        """
        each = [status for pool in self.pools for status in pool.status()]
        return [replace(status, rank=rank) for rank, status in enumerate(each)]

    def totals(self) -> dict[int, tuple[VerbTotal, ...]]:
        """Return each worker's sums over operations; see `pool.WorkerPool.totals`.

        Raises:
            PoolClosedError: the replicas were shut down.
        """
        each = [totals for pool in self.pools for totals in pool.totals().values()]
        return dict(enumerate(each))

    def hang_report(self) -> list[str]:
        """Return sentences on all blocked workers; see `pool.WorkerPool.hang_report`."""
        # One report covers this whole process, and so all replicas.
        return next(filter(None, (pool.hang_report() for pool in self.pools)), [])

    def shutdown(self, timeout: float | None = 10.0) -> None:
        """End all replicas; see `pool.WorkerPool.shutdown`. Idempotent.

        Args:
            timeout: seconds for all of them together; ``None``: no limit.

        Raises:
            ValueError, TypeError: ``timeout`` is not a duration. Nothing has happened.
            RuntimeError: a thread of a replica calls, as in a future's callback. Nothing has
                happened.
        """
        deadline = Deadline.after(timeout)
        if any(pool._driver.is_own(threading.current_thread()) for pool in self.pools):
            raise RuntimeError("replicas cannot be shut down by a callback of their own")
        for pool in self.pools:  # in this thread, which a signal handler may have interrupted
            pool.shutdown(deadline.remaining())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Shut the replicas down; at once if the block raised."""
        self.shutdown(10.0 if kind is None else 0.0)

    def __repr__(self) -> str:
        return f"Replicas({', '.join(map(repr, self.pools))})"

    def _working(self) -> list[WorkerPool]:
        return [pool for pool in self.pools if pool.failure is None and pool.restarting is None]

    def _on_one(self, begin: Callable[[WorkerPool], T]) -> T:
        """Call ``begin`` with the least loaded replica; with another one if that has ended.

        Equally loaded replicas take turns.
        """
        while True:
            pools = self._working() or [pool for pool in self.pools if pool.failure is None]
            if not pools:
                return begin(self.pools[-1])  # raises its failure
            self._turn += 1
            turned = [pools[(self._turn + index) % len(pools)] for index in range(len(pools))]
            pool = min(turned, key=lambda each: each.load)
            try:
                begun = begin(pool)
            except CoordinatorError:
                if pool.failure is None:
                    raise
            else:
                if pool.restarting is not None and self._working():  # since it was chosen
                    self._gather()
                return begun

    def _move(self, call: PendingCall) -> None:
        """Submit a call, whose replica has broken, to one that runs; without any, it waits."""
        try:
            self._on_one(lambda pool: pool._driver.submit(call))
        except CoordinatorError as error:
            call.finish(error, "")
            call.hand_out()

    def _gather(self) -> None:
        """Move the calls that wait for the restart of a replica to those that run."""
        for pool in self.pools:
            for call in pool._driver.take_waiting():
                self._move(call)

    def _changed(self, pool: WorkerPool) -> None:
        failure = pool.failure
        if failure is None:
            self._gather()
        elif not isinstance(failure, PoolClosedError):  # no call may raise it: the others go on
            _log.error(
                "replica %d takes no more calls, %d of %d go on: %s",
                self.pools.index(pool),
                [pool.failure for pool in self.pools].count(None),
                len(self.pools),
                with_notes(failure),
            )


def _shut_down_when_started(starting: Future[WorkerPool]) -> None:
    def end(started: Future[WorkerPool]) -> None:
        if started.exception() is None:
            started.result().shutdown(0.0)

    starting.add_done_callback(end)
