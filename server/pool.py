"""Run a worker class on every rank of a grid: tensor, pipeline and data parallel.

    class Adder:
        def __init__(self, context: WorkerContext, start: int) -> None:
            self.groups, self.start = context.groups, start

        def total(self, number: int) -> float:
            return self.groups.tp.all_reduce(torch.tensor(self.start + number)).item()

    with WorkerPool(Adder, tp=2, worker_kwargs={"start": 40}) as pool:
        print(pool.call("total", 2))  # 84

Each worker is a process; calls and replies go through shared memory.

Guarantees
- Every rank receives the same calls in the same order.
- No call uses another call's data. If ranks begin different group operations in a call, the call
  fails with an error that names two of them, and the pool breaks before the next answer.
- A worker's exception reaches the caller with its traceback at once, even while other ranks wait
  for that rank. The pool stays usable if all ranks then answer and no group operation is
  incomplete; otherwise it breaks with that failure.
- When a worker's process ends, the pool breaks within a second, with an error that names it.
- A broken pool fails all its calls with the first failure, and ends its processes.
- With ``restart=``, a pool replaces its workers instead. A call belongs to one generation. When
  that generation ends, its calls fail, or run again with ``retry=True``. New calls wait for the
  next generation.
- When the driver ends, for any reason, the workers and all their descendants end too.
- A signal handler may raise in a call, ask for the status, or shut the pool down; it must not
  make calls. A call that is interrupted while it waits is abandoned: it continues without its
  caller. A call that is interrupted amid sending or receiving breaks the pool.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from coordinator.rank_grid import RankGrid
from shm_broadcast import CoordinatorError, Deadline, MemberStatus
from shm_broadcast.arguments import integer
from shm_broadcast.state.flight_recorder import VerbTotal

from .calls.pending_call import CallStream, PendingCall, awaited
from .config import PoolConfig
from .control.output import hold_standard_numbers
from .control.reference import check_may_make_pool
from .driver.limits import check_has_system_threads
from .driver.pool_plan import PoolPlan
from .errors import PoolClosedError
from .hosts.place import Hosts
from .launchers.fork_servers import FORK_SERVERS, worker_environment

if TYPE_CHECKING:
    from .driver.pool_driver import PoolDriver
    from .launchers.ray_cluster import RayCluster

_EXIT_SECONDS = 2.0
"""Time for workers to exit when the interpreter exits, or a ``with`` block raises."""


class WorkerPool:
    """A worker on every rank of a grid. All methods may be called in any thread.

    Rank layout: ``axes``, then dp, pp, pcp and tp, which varies fastest; without ``axes`` and
    pcp, ``rank = (dp_rank * pp + pp_rank) * tp + tp_rank``.
    """

    def __init__(
        self,
        worker: type | str,
        *,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        pcp: int = 1,
        dcp: int = 1,
        axes: Mapping[str, int] | None = None,
        worker_kwargs: Mapping[str, Any] | None = None,
        device: str | Sequence[str] = "cpu",
        share_gpu: bool = False,
        launcher: str = "local",
        hosts: Hosts | RayCluster | None = None,
        start_timeout: float | None = 120.0,
        on_progress: Callable[[int, int, int, str], None] | None = None,
        restart: str = "never",
        max_restarts: int | None = None,
        window: float | None = None,
        stuck_after: float | None = None,
        config: PoolConfig | None = None,
    ) -> None:
        """Start the workers, and return when all are ready.

        Args:
            worker: a class at the top level of a module, or ``"package.module:Class"``. Every rank
                builds it as ``worker(context, **worker_kwargs)``; see `worker.WorkerContext`.
            tp: ranks that share each layer (tensor parallel).
            pp: stages of the pipeline (pipeline parallel).
            dp: replicas of the model (data parallel). Every call runs on all replicas, so `call`
                and `submit`, which return one result, need ``dp=1``; `collective_rpc` returns all.
            pcp: ranks that share a prompt (prefill context parallel).
            dcp: ranks that share contexts (decode context parallel); divides tp x pcp.
            axes: further axes with their sizes, outermost first, as for `coordinator.init`: their
                groups are ``context.groups.axes``.
            worker_kwargs: keyword arguments for the class; picklable.
            device: ``"cpu"``, ``"cuda"`` (the GPUs in turn), one GPU for all, ``"cuda:0"``, or a
                device for each rank.
            share_gpu: whether several ranks may share one GPU. Without NVIDIA's MPS they take
                turns of some milliseconds.
            launcher: how processes start. ``"local"``: this process starts all workers on this
                host. ``"hosts"``: one process runs on each host; this one is the head, and the
                others call `hosts.host_supervisor.serve_host`. Each host runs the same number of
                workers, in rank order. ``"torchrun"``: likewise, with torchrun's environment.
                ``"ray"``: Ray starts all workers; this process runs none.
            hosts: the hosts, or the Ray cluster. ``None``: from the launcher's environment; see
                `hosts.place.Hosts`, `launchers.ray_cluster.RayCluster`.
            start_timeout: seconds for all workers to be ready; ``None``: no limit.
            on_progress: called with ``(rank, done, total, what)`` when a worker reports progress:
                in this thread until the workers are ready, afterwards in the supervisor thread,
                which detects no worker's end until it returns.
            restart: the reaction when the pool breaks: a worker's process ends, a call is stuck, or
                a failure leaves a group operation incomplete. ``"never"``: it takes no more calls.
                ``"worker"``: replace workers that have ended, or do not return from their method
                within `PoolConfig.leave_seconds`. The others stay: ``restore(context)`` is called
                with new groups; without such a method, the class is built again in the same
                process. ``"pool"``: replace all workers.
            max_restarts: restarts within ``window``, or consecutive failed ones, before the
                pool ends with `RestartLimitError`. ``None``: 5. Only with ``restart``.
            window: seconds; ``None``: 60. Only with ``restart``.
            stuck_after: seconds after which the pool breaks if its oldest call is not answered; at
                most a quarter more. The same limit ends a start in which a worker is stopped, or
                waits in a group for a worker that is ready. Longer than any call should take.
                ``None``: `PoolConfig.call_seconds` if the pool is restarted, else never.
                ``math.inf``: never.
            config: further settings.

        Raises:
            ValueError, TypeError: an argument is out of range, or cannot be sent to the workers.
            RuntimeError: this process can drive no pool: it is a worker that imports its modules,
                gevent or eventlet have patched it, or it is frozen and so has no Python to start.
            WorkerStartError: a worker's ``__init__`` raised, its process ended, or it was not ready
                in time. All processes of the pool have ended.
            SharedMemoryError: too little memory is free.
            DescriptorLimitError: the limit of open files is too low (``ulimit -n``).
            ProcessLimitError: no further process or thread can be started.
            HostError: a host did not connect within ``start_timeout``, or has other versions; or
                the head's name has no address.
            SecretError: several hosts, and no secret that only they have.
            OSError: the head's address is not an address of this host, or its port is in use.
        """
        arguments = {name: value for name, value in locals().items() if name != "self"}
        check_may_make_pool()
        check_has_system_threads()
        hold_standard_numbers()
        self._plan = PoolPlan(**arguments)
        if self._plan.config.fork and self._plan.ranks_of(0):
            FORK_SERVERS.prepare(worker_environment(self._plan.threads), self._plan.config.preload)
        # Imported while the fork server loads torch. Not at the top: a worker's main module may
        # import this one.
        from .driver.pool_driver import PoolDriver  # noqa: PLC0415

        self._driver = PoolDriver(self._plan)
        self._stream_numbers = itertools.count(1)
        self._owner = os.getpid()
        self._at_exit = weakref.finalize(self, _stop_at_exit, self._driver, self._owner)

    @property
    def n_workers(self) -> int:
        """Return the number of ranks."""
        return self._plan.n_workers

    @property
    def grid(self) -> RankGrid:
        """Return the ranks by their axes."""
        return self._plan.grid

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        unique_reply_rank: int | None = None,
        retry: bool = False,
    ) -> Any:
        """Call ``method`` on every rank and wait for all answers.

        Args:
            method: the name of a method of the worker.
            timeout: seconds from now. ``None``: `PoolConfig.call_seconds`, counted from now or from
                the last answered call, whichever is later. ``math.inf``: no limit.
            args, kwargs: arguments of the method; picklable.
            unique_reply_rank: the only rank that sends its result.
            retry: whether the call, queued or sent, runs again if the pool is restarted before it
                is answered; workers receive it at most three times. The next generation has no
                state of earlier calls, except what ``restore`` keeps or rebuilds. The call must be
                correct on such workers, and may run twice.

        Returns:
            A list of the results by rank, or the result of ``unique_reply_rank``.

        Raises:
            WorkerError: the method raised on a rank.
            CallDivergedError: ranks began different group operations in the call.
            WorkerLostError: a worker's process ended.
            CallStuckError: no call was answered for ``stuck_after`` seconds.
            RestartLimitError: the pool broke once more than it may be restarted.
            CallTimeoutError: not all ranks have answered in time; has the late ranks and their
                stacks. The workers continue the call, and the pool stays usable.
            PoolClosedError: the pool was shut down.
            ValueError: rank ``unique_reply_rank`` does not exist, or ``method`` begins with "_".
            TypeError: an argument has the wrong type, or one of ``method`` cannot be pickled.
        """
        if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
            raise TypeError(f"args must be a sequence of arguments; got {args!r}")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(f"kwargs must be a mapping of arguments by name; got {kwargs!r}")
        only = unique_reply_rank
        if only is not None:
            only = integer("unique_reply_rank", only, least=0, most=self.n_workers - 1)
        return self._driver.call(
            self._pending(method, args, kwargs or {}, only, timeout, retry=retry)
        )

    def call(
        self,
        method: str,
        /,
        *args: Any,
        timeout: float | None = None,
        retry: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Call ``method`` on every rank; return the result of the last stage's first rank.

        Otherwise like `collective_rpc`. ``timeout`` and ``retry`` are the call's own; a method's
        keyword arguments of these names need `collective_rpc`.

        Raises:
            ValueError: the pool has ``dp`` greater than 1.
            Exception: each error of `collective_rpc`.
        """
        rank = self._output_rank
        return self._driver.call(self._pending(method, args, kwargs, rank, timeout, retry=retry))

    def submit(
        self,
        method: str,
        /,
        *args: Any,
        timeout: float | None = None,
        retry: bool = False,
        **kwargs: Any,
    ) -> Future[Any]:
        """Queue a `call` and return its future; calls are sent in order.

        Returns:
            The future of the result. It fails with `CallTimeoutError` after ``timeout`` seconds,
            counted as for `collective_rpc`. Its ``result(timeout)`` also raises `CallTimeoutError`,
            but does not end the call. It can be cancelled until the call is sent; at most
            `PoolConfig.in_flight` calls are sent and unanswered. Its callbacks run in a thread of
            the pool and must not wait for the pool.

        Raises:
            CoordinatorError: the failure that broke the pool, or `PoolClosedError`.
        """
        call = self._call_of_one(method, *args, timeout=timeout, retry=retry, **kwargs)
        return self._driver.submit(call)

    async def acall(
        self,
        method: str,
        /,
        *args: Any,
        timeout: float | None = None,
        retry: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Await a `submit`. Cancelling the task cancels the call.

        A queued call is not sent; the workers of a sent call see `WorkerContext.cancelled`.

        Raises:
            RuntimeError: no asyncio loop is running, as under trio; use `call` in a thread instead.
                Nothing was sent.
            Exception: each error of `call`.
        """
        return await awaited(
            lambda: self.submit(method, *args, timeout=timeout, retry=retry, **kwargs)
        )

    def stream(
        self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> CallStream:
        """Iterate over the items of ``method``, a generator function of the worker.

        Every rank runs the generator, and must yield the same number of times. The items are those
        of the last stage's first rank. The generator starts with the first request for an item; the
        workers compute at most one item ahead. Other calls and streams may interleave. ``with``,
        `close` or dropping the stream closes the generator on all ranks. Only one thread at a time
        may request an item.

        Args:
            method: the name of a method of the worker.
            args, kwargs: arguments of the method; picklable.
            timeout: seconds for each item, counted as for `collective_rpc`.

        Raises:
            ValueError: the pool has ``dp`` greater than 1, or ``method`` begins with "_".
            Each item: the errors of `call`, also `PoolClosedError`; CallDivergedError if the
                generator ends on some ranks only; StreamLostError if the pool was restarted.
        """
        rank = self._output_rank

        def step(stream: int, first: bool) -> Future[Any]:
            arguments = (args, kwargs) if first else ((), {})
            closes = stream < 0  # safe to repeat: new workers have no open generator
            pending = self._pending(
                method, *arguments, rank, timeout, stream, begins=first, retry=closes
            )
            return self._driver.submit(pending)

        self._check_callable(method)
        return CallStream(next(self._stream_numbers), step)

    async def astream(
        self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """Iterate over a `stream` by ``async for``. ``aclose`` or dropping it closes the stream."""
        with self.stream(method, *args, timeout=timeout, **kwargs) as stream:
            while stream.take(items := await awaited(stream.ask)):
                yield items[0]

    @property
    def failure(self) -> CoordinatorError | None:
        """Return the error that ended the pool; ``None`` while it takes calls.

        `PoolClosedError` after `shutdown`, and in a process forked from the pool's.
        """
        return self._fork_error("failure") or self._driver.table.ended

    @property
    def restarting(self) -> CoordinatorError | None:
        """Return the failure during a restart, in which calls wait; ``None`` otherwise."""
        return self._driver.table.restarting

    @property
    def last_failure(self) -> tuple[float, CoordinatorError] | None:
        """Return the last failure and its time, in seconds since the epoch, restarted or not."""
        return self._driver.table.last_failure

    @property
    def load(self) -> int:
        """Return the number of calls that are queued or sent, at this moment."""
        return self._driver.table.size

    @property
    def restarts(self) -> int:
        """Return the number of restarts."""
        return self._driver.table.restarts

    @property
    def generation(self) -> int:
        """Return the number of the workers' generation: 1, and higher after each restart."""
        return self._driver.table.generation

    def status(self) -> list[MemberStatus]:
        """Return every worker's state in calls and groups, by rank, without waiting for them.

        Raises:
            PoolClosedError: the pool was shut down.
        """
        self._check_owner("status")
        return self._driver.status()

    def totals(self) -> dict[int, tuple[VerbTotal, ...]]:
        """Return each rank's sums over operations and messages in the pool's groups.

        Replaced workers are included, workers on other hosts are not.

        Raises:
            PoolClosedError: the pool was shut down.
        """
        self._check_owner("totals")
        return self._driver.totals()

    def hang_report(self) -> list[str]:
        """Return sentences that name each blocked worker and its blocker, on all hosts.

        Like ``group-coordinator explain``, which covers one host. Takes some milliseconds, or
        `PoolConfig.stack_seconds` if another host does not answer. Empty if no worker is blocked,
        or the pool was shut down.
        """
        self._check_owner("hang_report")
        return self._driver.hang_report()

    def shutdown(self, timeout: float | None = 10.0) -> None:
        """End the workers and wait for all processes of the pool. Idempotent.

        Accepted calls have half of ``timeout`` to finish; then they fail with `PoolClosedError`.
        A process that was forked from the pool's does nothing.

        Args:
            timeout: seconds; workers that still run are then terminated, and killed after
                `PoolConfig.kill_seconds` more. ``None``: no limit.

        Raises:
            ValueError, TypeError: ``timeout`` is not a duration. Nothing has happened.
            RuntimeError: the pool's supervisor, sender or collector calls, as in most futures'
                callbacks: it would wait for itself. Nothing has happened.
        """
        self._stop(timeout, finish=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Shut the pool down; at once if the block raised."""
        if kind is None:
            self.shutdown()
        else:
            self._stop(_EXIT_SECONDS, finish=False)

    def __repr__(self) -> str:
        return f"WorkerPool({self._plan.worker}, {self.grid})"

    def _stop(self, timeout: float | None, finish: bool) -> None:
        seconds = Deadline.after(timeout).remaining()
        if os.getpid() == self._owner:
            self._driver.stop(seconds, finish)
            self._at_exit.detach()

    @cached_property
    def _output_rank(self) -> int:
        if (dp := self.grid.sizes["dp"]) > 1:
            raise ValueError(
                f"call and submit return one result, but each of dp={dp} replicas "
                "computes one: use collective_rpc, or Replicas"
            )
        return self._plan.output_rank

    def _fork_error(self, what: str) -> PoolClosedError | None:
        if os.getpid() == self._owner:
            return None
        return PoolClosedError(
            f"{what}: the pool belongs to process {self._owner}, from which this one was forked"
        )

    def _check_owner(self, what: str) -> None:
        error = self._fork_error(what)
        if error is not None:
            raise error

    def _call_of_one(
        self,
        method: str,
        /,
        *args: Any,
        timeout: float | None = None,
        retry: bool = False,
        **kwargs: Any,
    ) -> PendingCall:
        return self._pending(method, args, kwargs, self._output_rank, timeout, retry=retry)

    def _pending(
        self,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reply_rank: int | None,
        timeout: float | None,
        stream: int = 0,
        *,
        begins: bool = False,
        retry: bool = False,
    ) -> PendingCall:
        self._check_callable(method)
        return PendingCall(
            *(method, args, kwargs, self._plan.n_workers, reply_rank, timeout, stream),
            begins=begins,
            retry=retry,
        )

    def _check_callable(self, method: str) -> None:
        if not isinstance(method, str):
            raise TypeError(f"method must be the name of a worker's method; got {method!r}")
        self._check_owner(method)
        if not method or not method.isprintable():
            raise ValueError(f"{method!r} is no method's name")
        if method.startswith("_"):
            raise ValueError(f"method {method!r} is private to the worker")


def _stop_at_exit(driver: PoolDriver, owner: int) -> None:
    if os.getpid() != owner:
        return
    if driver.is_own(threading.current_thread()):
        # The garbage collector ran in a thread that cannot wait for itself.
        threading.Thread(target=driver.stop, args=(_EXIT_SECONDS, False), name="pool-end").start()
    else:
        driver.stop(_EXIT_SECONDS, finish=False)
