"""The worker pool: a class of yours on every rank of a tensor, pipeline and data parallel grid.

    class Adder:
        def __init__(self, context: WorkerContext, start: int) -> None:
            self.groups, self.start = context.groups, start

        def total(self, number: int) -> float:
            return self.groups.tp.all_reduce(torch.tensor(self.start + number)).item()

    with WorkerPool(Adder, tp=2, worker_kwargs={"start": 40}) as pool:
        print(pool.call("total", 2))  # 84

Workers are processes of their own; calls and replies go through shared memory.

Guarantees
- Every rank gets the same calls in the same order.
- A worker's exception reaches the caller with its traceback, though other ranks still wait for that
  rank. The pool goes on if every rank then answers and none left a group operation half done;
  otherwise it breaks, with that failure.
- A worker's death breaks the pool within a second, with an error that names it.
- A broken pool fails all its calls with the first failure, and ends its processes by itself.
- When the driver ends, however it ends, the workers and what they have started end too.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

from server.calls import PendingCall
from server.config import PoolConfig
from server.crew import Crew
from server.plan import Plan
from server.reference import refuse_while_loading_main
from shm_broadcast import Deadline, GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from shm_broadcast import CoordinatorError, MemberStatus

_EXIT_SECONDS = 2.0
"""For workers to leave when the interpreter exits, or a ``with`` block raises."""


class WorkerPool:
    """Workers on all ranks of a grid, and calls to them. Any thread may call.

    Rank layout: ``rank = (dp_rank * pp + pp_rank) * tp + tp_rank``.
    """

    def __init__(
        self,
        worker: type | str,
        *,
        tp: int = 1,
        pp: int = 1,
        dp: int = 1,
        worker_kwargs: Mapping[str, Any] | None = None,
        device: str = "cpu",
        share_gpu: bool = False,
        launcher: str = "local",
        start_timeout: float | None = 120.0,
        on_progress: Callable[[int, int, int, str], None] | None = None,
        config: PoolConfig | None = None,
    ) -> None:
        """Start the workers, and return when all are ready.

        Args:
            worker: a class at the top level of a module, or ``"package.module:Class"``. It is built
                on every rank as ``worker(context, **worker_kwargs)``; see
                `server.worker.WorkerContext`.
            tp: ranks that share each layer.
            pp: stages of the pipeline.
            dp: replicas.
            worker_kwargs: picklable.
            device: ``"cpu"``, ``"cuda"`` (the GPUs in turn) or one GPU for all, ``"cuda:0"``.
            share_gpu: let several ranks share one GPU.
            launcher: ``"local"``: processes of this host.
            start_timeout: seconds; ``None``: for ever.
            on_progress: called ``(rank, done, total, what)`` when a worker reports progress: by the
                constructor until the workers are ready, by a thread of the pool afterwards.
            config: what can be tuned.

        Raises:
            ValueError, TypeError: an argument is out of range, or cannot reach the workers.
            WorkerStartError: a worker's ``__init__`` raised, or its process ended, or it was not
                ready in time. Nothing of the pool is left.
            SharedMemoryError: too little memory is free.
        """
        refuse_while_loading_main()
        if launcher != "local":
            raise ValueError(f"launcher must be 'local'; got {launcher!r}")
        self._plan = Plan.checked(
            worker,
            worker_kwargs,
            (tp, pp, dp),
            device,
            share_gpu,
            start_timeout,
            on_progress,
            config or PoolConfig(),
        )
        self._crew = Crew(self._plan)
        self._at_exit = weakref.finalize(self, _stop_at_exit, self._crew, os.getpid())

    @property
    def n_workers(self) -> int:
        """How many ranks there are."""
        return self._plan.n_workers

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Call ``method`` on every rank and wait until all have answered.

        Args:
            method: a method of the worker.
            timeout: seconds; ``None``: for ever.
            args: positional arguments; picklable.
            kwargs: keyword arguments; picklable.
            unique_reply_rank: the only rank whose result is wanted; the others' are not sent.

        Returns:
            The results by rank, or the one that is wanted.

        Raises:
            WorkerError: the method raised on a rank.
            WorkerLostError: a worker's process ended.
            CallTimeoutError: not all have answered in time; says who has not, and their stacks.
                The pool goes on, and so do they.
            PoolClosedError: the pool was shut down.
            ValueError: there is no rank ``unique_reply_rank``.
        """
        if unique_reply_rank is not None and not 0 <= unique_reply_rank < self.n_workers:
            raise ValueError(
                f"unique_reply_rank must be in 0..{self.n_workers - 1}; got {unique_reply_rank}"
            )
        return self._call(method, args, kwargs or {}, unique_reply_rank, timeout)

    def call(self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call ``method`` on every rank; the result of the output rank.

        That is tp rank 0 of the last stage of replica 0. Otherwise as `collective_rpc`; a worker's
        own keyword argument ``timeout`` has to go through that.
        """
        return self._call(method, args, kwargs, self._plan.output_rank, timeout)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `call`, without waiting: calls are queued, and go to the workers in order.

        At most `PoolConfig.in_flight` calls are with the workers at once; until then one can be
        cancelled. Callbacks of the future run in a thread of the pool and must not wait for it.

        Raises:
            What broke the pool, or `PoolClosedError`.
        """
        return self._crew.dispatcher.submit(
            self._pending(method, args, kwargs, self._plan.output_rank)
        )

    @property
    def failure(self) -> CoordinatorError | None:
        """What broke the pool, or that it was shut down; ``None`` while it takes calls."""
        return self._crew.failure

    def status(self) -> list[MemberStatus]:
        """What every worker was last seen doing, by rank."""
        return self._crew.status()

    def shutdown(self, timeout: float = 10.0) -> None:
        """End the workers and wait until nothing is left of the pool. Idempotent.

        Calls that were accepted may finish within half of the time; then they fail with
        `PoolClosedError`.

        Args:
            timeout: seconds; workers that have not left by then are terminated, and killed after
                `PoolConfig.kill_seconds` more.
        """
        self._crew.stop(timeout, finish=True)
        self._at_exit.detach()

    def __enter__(self) -> Self:
        """Give the pool itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Shut the pool down; at once if the block raised."""
        if kind is None:
            self.shutdown()
        else:
            self._crew.stop(_EXIT_SECONDS, finish=False)
            self._at_exit.detach()

    def __repr__(self) -> str:
        """Show the worker and the grid."""
        plan = self._plan
        return f"WorkerPool({plan.worker}, tp={plan.tp}, pp={plan.pp}, dp={plan.dp})"

    def _call(
        self,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reply_rank: int | None,
        timeout: float | None,
    ) -> Any:
        call = self._pending(method, args, kwargs, reply_rank)
        deadline = Deadline.after(timeout)
        try:
            return self._crew.dispatcher.call(call, deadline)
        except GroupTimeoutError:
            if call.done:
                return call.result()
            raise self._crew.late(call, timeout) from None

    def _pending(
        self,
        method: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reply_rank: int | None,
    ) -> PendingCall:
        if not isinstance(method, str):
            raise TypeError(f"method must be the name of a worker's method; got {method!r}")
        return PendingCall(method, args, kwargs, self.n_workers, reply_rank)


def _stop_at_exit(crew: Crew, owner: int) -> None:
    if os.getpid() != owner:
        return
    if crew.is_own(threading.current_thread()):
        # The garbage collector found the pool in the middle of whatever that thread does.
        threading.Thread(target=crew.stop, args=(_EXIT_SECONDS, False), name="pool-end").start()
    else:
        crew.stop(_EXIT_SECONDS, finish=False)
