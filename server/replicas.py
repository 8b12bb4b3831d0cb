"""Replicas: several pools with the same model, which fail independently, behind one interface.

    with Replicas(Embedder, dp=2, tp=2, restart="worker") as replicas:
        replicas.call("embed", tokens, retry=True)

Each call is computed by one replica: the one with the fewest calls at that moment, among those
whose workers are running. All replicas belong to this process, so the counts are never out of date.
When a replica breaks, its calls fail, or go to the others if they may be made again
(``retry=True``). It gets calls again once it was restarted.
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
    """Starts ``dp`` pools of ``tp`` x ``pp`` workers, and distributes calls. Any thread may call.

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
        """Start all replicas, at the same time, and return when all are ready.

        Args:
            worker: as for `pool.WorkerPool`; so are the others, for each replica, but for these.
            dp: how many replicas.
            tp, pp, pcp, dcp, axes: the grid of a replica.
            worker_kwargs: keyword arguments for the class.
            device: as for `pool.WorkerPool`; a GPU for each rank of all replicas.
            share_gpu: whether several ranks may share one GPU.
            start_timeout: seconds for all workers to be ready; ``None``: for ever.
            on_progress: called with ``(rank, done, total, what)``; ranks are counted through,
                replica by replica.
            restart: what happens when a replica breaks. ``"never"``: the others go on without it.
            max_restarts: restarts of a replica within ``window`` before it is given up; ``None``:
                5. Only for replicas that are restarted.
            window: seconds; ``None``: 60. Likewise.
            stuck_after: seconds after which a replica breaks if its oldest call is not answered;
                ``None``: as for `pool.WorkerPool`.
            config: further settings, for each replica; ``bind`` is of all ranks of all replicas,
                and ``name`` is ``replica`` with its number.

        Raises:
            ValueError, TypeError: an argument is out of range, or cannot be sent to the workers.
            WorkerStartError: a worker of any replica did not start. All processes have ended.
            SharedMemoryError: too little memory is free.
            DescriptorLimitError: too few files may be open (``ulimit -n``).
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
                undo.callback(_give_up, future)
                starting.append(future)
            wait(starting)
            self.pools = [future.result() for future in starting]
            undo.pop_all()
        self._turn = 0
        for pool in self.pools:
            pool.hand_over(partial(self._move, pool), partial(self._gather, pool))

    @property
    def n_workers(self) -> int:
        """The number of ranks of all replicas."""
        return sum(pool.n_workers for pool in self.pools)

    @property
    def grid(self) -> RankGrid:
        """The ranks of all replicas by their axes."""
        within = {name: size for name, size in self.pools[0].grid.axes if name != "dp"}
        return RankGrid.of({"dp": len(self.pools), **within})

    def call(self, method: str, /, *args: Any, **options: Any) -> Any:
        """Call ``method`` on one replica; return the result of the first rank of its last stage.

        Arguments and errors are those of `pool.WorkerPool.call`; what breaks the replica is raised
        unless the call may be made again (``retry=True``), and a replica is left to make it.
        """
        return self.submit(method, *args, **options).result()

    def submit(self, method: str, /, *args: Any, **options: Any) -> Future[Any]:
        """As `call`, without waiting; see `pool.WorkerPool.submit`.

        Raises:
            CoordinatorError: what broke the last replica, or `PoolClosedError`.
        """
        return self._on_one(lambda pool: pool.submit(method, *args, **options))

    async def acall(self, method: str, /, *args: Any, **options: Any) -> Any:
        """As `submit`, awaited; see `pool.WorkerPool.acall`."""
        return await awaited(lambda: self.submit(method, *args, **options))

    def stream(self, method: str, /, *args: Any, **options: Any) -> CallStream:
        """Iterate over what a generator of one replica yields; see `pool.WorkerPool.stream`.

        A stream stays with its replica, and ends when that one breaks.
        """
        return self._on_one(lambda pool: pool.stream(method, *args, **options))

    def astream(self, method: str, /, *args: Any, **options: Any) -> AsyncGenerator[Any, None]:
        """As `stream`, for ``async for``; see `pool.WorkerPool.astream`."""
        return self._on_one(lambda pool: pool.astream(method, *args, **options))

    @property
    def failure(self) -> CoordinatorError | None:
        """What broke the last replica, or `PoolClosedError`; ``None`` while one takes calls."""
        failures = [pool.failure for pool in self.pools]
        if None in failures:
            return None
        return next((each for each in failures if isinstance(each, PoolClosedError)), failures[-1])

    @property
    def restarting(self) -> CoordinatorError | None:
        """What broke a replica that is restarted; ``None`` while the workers of any work."""
        if self._working():
            return None
        return next((pool.restarting for pool in self.pools if pool.restarting), None)

    @property
    def restarts(self) -> int:
        """How often replicas were restarted."""
        return sum(pool.restarts for pool in self.pools)

    @property
    def last_failure(self) -> tuple[float, CoordinatorError] | None:
        """When a replica broke last, in seconds since the epoch, and why; ``None`` if none did."""
        failures = [pool.last_failure for pool in self.pools]
        known = [failure for failure in failures if failure is not None]
        return max(known, key=lambda failure: failure[0], default=None)

    def status(self) -> list[MemberStatus]:
        """What every worker was last seen doing; ranks are counted through all replicas.

        Errors, logs and workers' output name the replica, and count ranks within it.

        Raises:
            PoolClosedError: the replicas were shut down.
        """
        each = [status for pool in self.pools for status in pool.status()]
        return [replace(status, rank=rank) for rank, status in enumerate(each)]

    def totals(self) -> dict[int, tuple[VerbTotal, ...]]:
        """What the operations of each worker came to; see `pool.WorkerPool.totals`.

        Raises:
            PoolClosedError: the replicas were shut down.
        """
        each = [totals for pool in self.pools for totals in pool.totals().values()]
        return dict(enumerate(each))

    def hang_report(self) -> list[str]:
        """Say who holds up whom in all replicas; see `pool.WorkerPool.hang_report`."""
        # What one says is of this whole process, so of all that run.
        return next(filter(None, (pool.hang_report() for pool in self.pools)), [])

    def shutdown(self, timeout: float | None = 10.0) -> None:
        """End all replicas; see `pool.WorkerPool.shutdown`. Idempotent.

        Args:
            timeout: seconds for all of them together; ``None``: for ever.

        Raises:
            ValueError, TypeError: ``timeout`` is not a duration. Nothing has happened.
            RuntimeError: a thread of theirs calls, as in a future's callback. Nothing has happened.
        """
        deadline = Deadline.after(timeout)
        if any(pool.is_own(threading.current_thread()) for pool in self.pools):
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
        """Begin something on the replica with the fewest calls; on another if that one has ended.

        Of several that have equally few, the next in turn.
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
                    pool.move_on()
                return begun

    def _move(self, broken: WorkerPool, calls: list[PendingCall]) -> list[PendingCall]:
        """Give calls of a replica that broke to others; returns those that stay there.

        Those that may be made again stay if no other works, and this one is restarted.
        """
        failure = broken.failure
        if failure is not None:  # nobody may hear of it, as the others answer the calls
            left, of = [pool.failure for pool in self.pools].count(None), len(self.pools)
            told = "replica %d takes no more calls, %d of %d go on: %s"
            _log.error(told, self.pools.index(broken), left, of, with_notes(failure))
        staying = []
        for call in calls:
            may_move = call.retry and not call.stream
            if not may_move or (not self._working() and broken.failure is None):
                staying.append(call)
                continue
            try:
                self._on_one(partial(WorkerPool.adopt, call=call))
            except CoordinatorError:
                staying.append(call)
        return staying

    def _gather(self, opened: WorkerPool) -> None:
        """Have a replica that was restarted answer what waits for others that are not yet."""
        for pool in self.pools:
            if pool is not opened:
                pool.move_on()


def _give_up(starting: Future[WorkerPool]) -> None:
    """Have a replica ended that has started, or once it has."""

    def end(started: Future[WorkerPool]) -> None:
        if started.exception() is None:
            started.result().shutdown(0.0)

    starting.add_done_callback(end)
