"""The worker pool: runs a class of yours on every rank of a grid: tensor, pipeline, data parallel.

    class Adder:
        def __init__(self, context: WorkerContext, start: int) -> None:
            self.groups, self.start = context.groups, start

        def total(self, number: int) -> float:
            return self.groups.tp.all_reduce(torch.tensor(self.start + number)).item()

    with WorkerPool(Adder, tp=2, worker_kwargs={"start": 40}) as pool:
        print(pool.call("total", 2))  # 84

Each worker is a process; calls and replies go through shared memory.

Guarantees
- Every rank gets the same calls in the same order.
- No call uses another call's data. If ranks begin different group operations in a call, the call
  fails with an error that names two of them, and the pool breaks before the next answer.
- A worker's exception reaches the caller with its traceback at once, even while other ranks wait
  for that rank. The pool goes on if all ranks then answer and no group operation is left half done;
  otherwise it breaks with that failure.
- When a worker's process ends, the pool breaks within a second, with an error that names it.
- A broken pool fails all its calls with the first failure, and ends its processes by itself.
- With ``restart=``, a pool replaces what broke instead. A call belongs to the generation of workers
  for which it was accepted: when that ends, calls that are queued or with the workers fail, or are
  made again if they may be (``retry=True``). Calls that are made meanwhile wait for the next one.
- When the driver ends, for whatever reason, the workers and all that they have started end too.
- A signal handler may raise at any moment of a call, ask for the status, or shut the pool down. If
  it raises, the call goes on without its caller, and no later call gets its answer; a reply for
  another thread that was just being received may be lost, and that call then fails. A handler must
  not make calls itself.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Self

from coordinator.rank_grid import RankGrid
from shm_broadcast import CoordinatorError, Deadline, MemberStatus
from shm_broadcast.arguments import integer
from shm_broadcast.state.flight_recorder import VerbTotal

from .calls.pending_call import CallStream, PendingCall, awaited
from .config import PoolConfig, settings_of
from .control.output import hold_standard_numbers
from .control.reference import check_may_make_pool
from .driver.limits import check_has_system_threads
from .driver.pool_plan import PoolPlan
from .errors import PoolClosedError
from .hosts.place import Hosts
from .launchers.fork_servers import FORK_SERVERS, worker_environment

if TYPE_CHECKING:
    from .driver.crew import PoolDriver
    from .launchers.ray_actors import RayCluster

_EXIT_SECONDS = 2.0
"""How long workers have to leave when the interpreter exits, or a ``with`` block raises."""


class WorkerPool:
    """Starts a worker on every rank of a grid, and calls their methods. Any thread may call.

    Rank layout: your own axes, then dp, pp, pcp and tp, which varies fastest; without others
    ``rank = (dp_rank * pp + pp_rank) * tp + tp_rank``.
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
            worker: a class at the top level of a module, or ``"package.module:Class"``. It is built
                on every rank as ``worker(context, **worker_kwargs)``; see
                `worker.WorkerContext`.
            tp: ranks that share each layer (tensor parallel).
            pp: stages of the pipeline (pipeline parallel).
            dp: replicas of the model (data parallel). Every call runs on all replicas, so `call`
                and `submit`, which return one result, need ``dp=1``; `collective_rpc` returns all.
            pcp: ranks that share a prompt (prefill context parallel).
            dcp: ranks that share contexts (decode context parallel); divides tp x pcp.
            axes: your own axes with their sizes, outermost first, as for `coordinator.init`: their
                groups are ``context.groups.axes``.
            worker_kwargs: keyword arguments for the class; picklable.
            device: ``"cpu"``, ``"cuda"`` (the GPUs in turn), one GPU for all, ``"cuda:0"``, or a
                device for each rank.
            share_gpu: whether several ranks may share one GPU. Without NVIDIA's MPS they take
                turns of some milliseconds there.
            launcher: what has started the pool. ``"local"``: this process alone; all workers are
                processes of this host. ``"hosts"``: one process on each of several hosts; this one
                is the head, and the others call `hosts.host_supervisor.serve_host`. Each host runs
                as many workers, in the order of the ranks. ``"torchrun"``: likewise, and torchrun
                says who is who. ``"ray"``: Ray starts them, and this process runs no workers.
            hosts: which hosts there are, or the Ray cluster. ``None``: what the launcher's
                environment says; see `hosts.place.Hosts`, `launchers.ray_actors.RayCluster`.
            start_timeout: seconds for all workers to be ready; ``None``: for ever.
            on_progress: called with ``(rank, done, total, what)`` when a worker reports progress:
                in this thread until the workers are ready, afterwards in the one that watches
                them, which notices no worker's end until it returns.
            restart: what happens when the pool breaks, because a worker's process ends, a call is
                stuck, or a failure has left a group operation half done. ``"never"``: it takes no
                more calls. ``"worker"``: workers that have ended, or do not leave what they do
                within `PoolConfig.leave_seconds`, are replaced. The others stay: their
                ``restore(context)`` is called with new groups, or, if they have no such method,
                the class is made anew in the same process. ``"pool"``: all workers are replaced.
            max_restarts: restarts within ``window``, or consecutive failed ones, before the
                pool ends with `RestartLimitError`. ``None``: 5. Only for a pool that is restarted.
            window: seconds; ``None``: 60. Likewise.
            stuck_after: seconds after which the pool breaks if its oldest call is not answered; at
                most a quarter more. So does a start in which a worker is stopped, or waits in a
                group for one that has started. Longer than any call should take. ``None``:
                `PoolConfig.call_seconds` if the pool is restarted, else never. ``math.inf``: never.
            config: further settings.

        Raises:
            ValueError, TypeError: an argument is out of range, or cannot be sent to the workers.
            RuntimeError: this process can drive no pool: it is a worker that imports its modules,
                gevent or eventlet have patched it, or it is frozen and so has no Python to start.
            WorkerStartError: a worker's ``__init__`` raised, its process ended, or it was not ready
                in time. All processes of the pool have ended.
            SharedMemoryError: too little memory is free.
            DescriptorLimitError: too few files may be open (``ulimit -n``).
            ProcessLimitError: no further process or thread can be started.
            HostError: a host did not come in ``start_timeout``, or has other versions; or the
                head's name leads to no address.
            SecretError: several hosts, and no secret that only they have.
            OSError: the head's address is none of this host's, or its port is in use.
        """
        check_may_make_pool()
        check_has_system_threads()
        hold_standard_numbers()
        self._plan = PoolPlan(
            worker,
            worker_kwargs,
            grid=RankGrid.of_job(tp=tp, pp=pp, dp=dp, pcp=pcp, axes=axes),
            dcp=dcp,
            device=device,
            share_gpu=share_gpu,
            launcher=launcher,
            hosts=hosts,
            start_timeout=start_timeout,
            on_progress=on_progress,
            restart=restart,
            max_restarts=max_restarts,
            window=window,
            stuck_after=stuck_after,
            config=settings_of(config),
        )
        if self._plan.config.fork and self._plan.ranks_of(0):
            FORK_SERVERS.prepare(worker_environment(self._plan.threads), self._plan.config.preload)
        # Imported while the fork server loads torch; and workers, whose main module may import
        # this one, do without.
        from .driver.crew import PoolDriver  # noqa: PLC0415

        self._driver = PoolDriver(self._plan)
        self._stream_numbers = itertools.count(1)
        self._owner = os.getpid()
        self._at_exit = weakref.finalize(self, _stop_at_exit, self._driver, self._owner)

    @property
    def n_workers(self) -> int:
        """The number of ranks."""
        return self._plan.n_workers

    @property
    def grid(self) -> RankGrid:
        """The ranks by their axes."""
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
        """Call ``method`` on every rank and wait until all have answered.

        Args:
            method: the name of a method of the worker.
            timeout: seconds from now. ``None``: `PoolConfig.call_seconds`, counted from now or from
                the last call that was answered, whichever is later. ``math.inf``: for ever.
            args: positional arguments; picklable.
            kwargs: keyword arguments; picklable.
            unique_reply_rank: the only rank whose result is wanted; the others' are not sent.
            retry: whether the call is made again if the pool is restarted before it is answered,
                queued or not; the workers get it three times at most. The next generation holds
                nothing that earlier calls have left, except what ``restore`` keeps or rebuilds. So
                this is safe where workers are right for the call when they are fresh or were
                rebuilt by ``restore``, and where a call may run twice.

        Returns:
            A list of the results by rank, or the result of ``unique_reply_rank``.

        Raises:
            WorkerError: the method raised on a rank.
            CallDivergedError: ranks began different group operations in the call.
            WorkerLostError: a worker's process ended.
            CallStuckError: no call was answered for ``stuck_after`` seconds.
            RestartLimitError: the pool broke once more than it may be restarted.
            CallTimeoutError: not all ranks have answered in time; has the late ranks and their
                stacks. The workers go on with the call, and the pool stays usable.
            PoolClosedError: the pool was shut down.
            ValueError: there is no rank ``unique_reply_rank``, or ``method`` begins with "_".
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
        """Call ``method`` on every rank; return the result of the first rank of the last stage.

        Otherwise as `collective_rpc`. ``timeout`` and ``retry`` are the call's: keyword arguments
        of these names can be passed to the method by `collective_rpc` only.

        Raises:
            ValueError: the pool has ``dp`` greater than 1.
            Exception: what `collective_rpc` raises.
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
        """As `call`, without waiting: the call is queued, and sent to the workers in order.

        Returns:
            The future of the result. It fails with `CallTimeoutError` after ``timeout`` seconds,
            counted as for `collective_rpc`. Its own ``result(timeout)`` raises `CallTimeoutError`
            as well, but the call goes on then. It can be cancelled until the call is sent: at most
            `PoolConfig.in_flight` calls are with the workers at once. Its callbacks run in a thread
            of the pool and must not wait for the pool.

        Raises:
            CoordinatorError: what broke the pool, or `PoolClosedError`.
        """
        rank = self._output_rank
        return self._driver.submit(self._pending(method, args, kwargs, rank, timeout, retry=retry))

    async def acall(
        self,
        method: str,
        /,
        *args: Any,
        timeout: float | None = None,
        retry: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As `submit`, awaited. A task that is cancelled meanwhile cancels the call: one that is
        queued is not made, and the workers hear of one that they have (`WorkerContext.cancelled`).

        Raises:
            RuntimeError: no loop of asyncio runs here, as under trio, where `call` can be made in a
                thread. Nothing was sent.
            Exception: what `call` raises.
        """
        return await awaited(
            lambda: self.submit(method, *args, timeout=timeout, retry=retry, **kwargs)
        )

    def stream(
        self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> CallStream:
        """Iterate over what a generator yields: ``method`` is a generator function of the worker.

        Every rank runs the generator, and the items are those of the first rank of the last stage.
        The generator must yield the same number of times on all ranks. It begins with the first
        item asked for; the workers compute one item ahead, and no more. Other calls and streams go
        on in between. Leave the stream by ``with``, its `close`, or by dropping it: the generator
        is closed on all ranks. Only one thread at a time may ask for an item.

        Args:
            method: the name of a method of the worker.
            args: positional arguments; picklable.
            timeout: seconds for each item, counted as for `collective_rpc`.
            kwargs: keyword arguments; picklable.

        Raises:
            ValueError: the pool has ``dp`` greater than 1, or ``method`` begins with "_".
            Each item: what `call` raises, also that the pool was shut down; CallDivergedError if
                the generator ends on some ranks only; StreamLostError if the pool was restarted.
        """
        rank = self._output_rank

        def step(stream: int, first: bool) -> Future[Any]:
            given = (args, kwargs) if first else ((), {})
            # New workers have no generator that could not be closed again.
            closes = stream < 0
            pending = self._pending(
                method, *given, rank, timeout, stream, begins=first, retry=closes
            )
            return self._driver.submit(pending)

        self._check_callable(method)
        return CallStream(next(self._stream_numbers), step)

    async def astream(
        self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """As `stream`, for ``async for``. Leave it by ``aclose``, or by dropping it."""
        with self.stream(method, *args, timeout=timeout, **kwargs) as stream:
            while stream.take(found := await awaited(stream.ask)):
                yield found[0]

    @property
    def failure(self) -> CoordinatorError | None:
        """What broke the pool for good, or `PoolClosedError`, as in a process that was forked from
        the pool's; ``None`` while it takes calls.
        """
        return self._not_here("failure") or self._driver.tracker.state.ended

    @property
    def restarting(self) -> CoordinatorError | None:
        """What broke the pool, while it is restarted for that; ``None`` while its workers work.

        It takes calls meanwhile, which wait.
        """
        return self._driver.tracker.state.restarting

    @property
    def last_failure(self) -> tuple[float, CoordinatorError] | None:
        """When the pool broke last, in seconds since the epoch, and why; ``None`` if it never did.

        A pool that was restarted since keeps it.
        """
        return self._driver.tracker.state.last_failure

    @property
    def load(self) -> int:
        """How many calls wait or are with the workers, at this moment."""
        return self._driver.tracker.queued.size

    @property
    def restarts(self) -> int:
        """How often the pool was restarted."""
        return self._driver.tracker.state.restarts

    @property
    def generation(self) -> int:
        """The number of the workers' generation: 1, and higher after each restart."""
        return self._driver.tracker.state.generation

    def status(self) -> list[MemberStatus]:
        """What every worker was last seen doing, in calls and the pool's groups, by rank. Does not
        wait for the workers.

        Raises:
            PoolClosedError: the pool was shut down.
        """
        self._check_owner("status")
        return self._driver.status()

    def totals(self) -> dict[int, tuple[VerbTotal, ...]]:
        """What all operations and messages of each worker in the pool's groups came to, by rank,
        also those of workers that were replaced. Of workers on other hosts nothing is known.

        Raises:
            PoolClosedError: the pool was shut down.
        """
        self._check_owner("totals")
        return self._driver.totals()

    def hang_report(self) -> list[str]:
        """Say who holds up whom on all hosts, as ``group-coordinator explain`` does of one host.

        Takes some milliseconds; where another host does not answer, `PoolConfig.stack_seconds`.

        Returns:
            Sentences; none if nobody is held up, or the pool was shut down.
        """
        self._check_owner("hang_report")
        return self._driver.hang_report()

    def shutdown(self, timeout: float | None = 10.0) -> None:
        """End the workers and wait until no process of the pool is left. Idempotent.

        Calls that were accepted have half of ``timeout`` to finish; then they fail with
        `PoolClosedError`. Does nothing in a process that was forked from the pool's.

        Args:
            timeout: seconds; workers that have not left by then are terminated, and killed after
                `PoolConfig.kill_seconds` more. ``None``: for ever.

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

    def hand_over(
        self,
        move: Callable[[list[PendingCall]], list[PendingCall]],
        opened: Callable[[], None],
    ) -> None:
        """For `replicas.Replicas`: when the pool breaks, let other pools of its shape have calls.

        Args:
            move: called with the calls that wait. Moves those that may be made again by `adopt` of
                other pools, and returns those that stay.
            opened: called when the pool has been restarted.
        """
        ledger = self._driver.tracker
        ledger.move, ledger.opened = move, opened

    def move_on(self) -> None:
        """For `replicas.Replicas`: have ``move`` called with the calls that wait for a restart."""
        self._driver.tracker.move_on()

    def adopt(self, call: PendingCall) -> None:
        """Take over a call of another pool; see `hand_over`.

        Raises:
            CoordinatorError: what broke the pool for good.
        """
        self._driver.submit(call)

    def is_own(self, thread: threading.Thread) -> bool:
        """For `replicas.Replicas`: whether ``thread`` is the pool's, and so cannot shut it down."""
        return self._driver.is_own(thread)

    def _stop(self, timeout: float | None, finish: bool) -> None:
        seconds = Deadline.after(timeout).remaining()
        if os.getpid() == self._owner:
            self._driver.stop(seconds, finish)
            self._at_exit.detach()

    @property
    def _output_rank(self) -> int:
        """The rank whose result `call` and `submit` return."""
        if (dp := self.grid.sizes["dp"]) > 1:
            raise ValueError(
                f"call and submit give one result, but each of dp={dp} replicas "
                "computes one: use collective_rpc, or Replicas"
            )
        return self._plan.output_rank

    def _not_here(self, what: str) -> PoolClosedError | None:
        """The error of a process that was forked from the pool's; ``None`` in the pool's own."""
        if os.getpid() == self._owner:
            return None
        return PoolClosedError(
            f"{what}: the pool belongs to process {self._owner}, from which this one was forked"
        )

    def _check_owner(self, what: str) -> None:
        error = self._not_here(what)
        if error is not None:
            raise error

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
            *(method, args, kwargs, self.n_workers, reply_rank, timeout, stream),
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


def _stop_at_exit(crew: PoolDriver, owner: int) -> None:
    if os.getpid() != owner:
        return
    if crew.is_own(threading.current_thread()):
        # The garbage collector found the pool in the middle of whatever that thread does.
        threading.Thread(target=crew.stop, args=(_EXIT_SECONDS, False), name="pool-end").start()
    else:
        crew.stop(_EXIT_SECONDS, finish=False)
