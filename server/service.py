"""Embeddings as a service: a pool that is started beside the server, and batches for it.

Life: *starting* while the workers load; *ready* once a probe call came back; *failed* when the
workers did not start, or the pool broke; *stopping* from `EmbeddingService.stop` on.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

from server.batching import Batcher
from server.metrics import Metrics
from shm_broadcast import CoordinatorError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from server.openai_api import Input
    from server.pool import WorkerPool
    from server.workers.minilm import ModelFolder
    from shm_broadcast import MemberStatus

PROBE = "ready"
"""What the probe call embeds."""

_UNANSWERED_SECONDS = 1.0
"""How long clients have to take in that their requests were given up."""


class NotReadyError(CoordinatorError):
    """The service cannot answer now: it starts, has failed, or stops."""


class EmbeddingService:
    """Embeds inputs of many requests; belongs to one event loop.

    Args:
        folder: the model, for checking inputs.
        make_pool: starts the workers; runs in a thread.
        max_batch: inputs of one call to the workers, at most.
        max_waiting: inputs that may wait.
        in_flight: calls that may be with the workers at once.
        call_timeout: seconds for the workers to answer a call.
    """

    def __init__(
        self,
        folder: ModelFolder,
        make_pool: Callable[[], WorkerPool],
        *,
        max_batch: int,
        max_waiting: int,
        in_flight: int,
        call_timeout: float,
    ) -> None:
        self.folder = folder
        self._make_pool = make_pool
        self._call_timeout = call_timeout
        self._pool: WorkerPool | None = None
        self._probed = False
        self._stopping = False
        self._start_failure: Exception | None = None
        self._starting: asyncio.Task[None] | None = None
        self._giving_up: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._batcher: Batcher[Input, tuple[np.ndarray, int]] = Batcher(
            self._compute, max_batch=max_batch, max_waiting=max_waiting, in_flight=in_flight
        )
        self.metrics = Metrics(lambda: self._batcher.waiting, self.workers)

    @property
    def state(self) -> str:
        """``"starting"``, ``"ready"``, ``"failed"`` or ``"stopping"``."""
        if self._stopping:
            return "stopping"
        if self.failure is not None:
            return "failed"
        return "ready" if self._probed else "starting"

    @property
    def failure(self) -> Exception | None:
        """Why the workers did not start, or what broke the pool."""
        if self._start_failure is not None or self._pool is None:
            return self._start_failure
        return self._pool.failure

    @property
    def start_failure(self) -> Exception | None:
        """Why the workers did not start."""
        return self._start_failure

    def workers(self) -> Sequence[MemberStatus]:
        """What every worker was last seen doing; empty before they run and after they stop."""
        return () if self._pool is None or self._stopping else self._pool.status()

    def status(self) -> dict[str, object]:
        """All of it as plain data."""
        return {
            "state": self.state,
            "failure": None if self.failure is None else str(self.failure),
            "items_waiting": self._batcher.waiting,
            "batches_running": self._batcher.running,
            "workers": list(self.workers()),
        }

    def check_ready(self) -> None:
        """Raise unless requests can be answered.

        Raises:
            NotReadyError: they cannot; says why.
        """
        if self.state != "ready":
            reason = "" if self.failure is None else f": {self.failure}"
            raise NotReadyError(f"the service is {self.state}{reason}") from self.failure

    async def embed(self, inputs: Sequence[Input]) -> tuple[list[np.ndarray], int]:
        """The vectors of ``inputs``, float32 [hidden] each, and the tokens they took in all.

        Raises:
            NotReadyError: see `check_ready`.
            QueueFullError: too much waits.
            TimeoutError: the workers did not answer in time.
            CoordinatorError: the workers failed.
        """
        self.check_ready()
        found = await self._batcher.submit(inputs)
        return [vector for vector, _ in found], sum(n_tokens for _, n_tokens in found)

    def start(self, on_failure: Callable[[], None]) -> None:
        """Begin to start the workers.

        Args:
            on_failure: called in the event loop if they do not start.
        """
        self._loop = asyncio.get_running_loop()
        self._starting = asyncio.create_task(self._start(on_failure))

    async def stop(self) -> None:
        """Finish what was accepted, then end the workers. Workers that still load are left to the
        end of this process, which ends them.
        """
        self._stopping = True
        if self._starting is not None:
            self._starting.cancel()
        await self._batcher.close()
        if self._pool is not None:
            await asyncio.to_thread(self._pool.shutdown)

    def give_up(self, then: Callable[[], None]) -> None:
        """End the workers now: requests that wait get an error. From any thread or signal handler.

        Args:
            then: called in the event loop when those who asked have had time to hear it.
        """
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin_giving_up, then)

    def _begin_giving_up(self, then: Callable[[], None]) -> None:
        self._giving_up = asyncio.create_task(self._give_up(then))

    async def _give_up(self, then: Callable[[], None]) -> None:
        self._stopping = True
        if self._pool is not None:
            await asyncio.to_thread(self._pool.shutdown, 0.0)
        await asyncio.sleep(_UNANSWERED_SECONDS)
        then()

    async def _start(self, on_failure: Callable[[], None]) -> None:
        try:
            self._pool = await _in_daemon_thread(self._make_pool)
            await self._compute([PROBE])
            self._probed = True
        except Exception as error:  # noqa: BLE001 - it is kept, and raised by whoever serves
            self._start_failure = error
            on_failure()

    async def _compute(self, inputs: list[Input]) -> list[tuple[np.ndarray, int]]:
        if self._pool is None:
            raise NotReadyError("the workers do not run")
        outcome = "error"
        try:
            future = asyncio.wrap_future(self._pool.submit("embed_counted", inputs))
            vectors, tokens = await asyncio.wait_for(future, self._call_timeout)
            outcome = "ok"
        finally:
            self.metrics.calls.labels(outcome).inc()
            self.metrics.batch_items.observe(len(inputs))
        return list(zip(vectors, tokens.tolist(), strict=True))


async def _in_daemon_thread(make: Callable[[], WorkerPool]) -> WorkerPool:
    """Run ``make`` in a thread that does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[WorkerPool] = loop.create_future()

    def tell(act: Callable[[], None]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: None if made.done() else act())

    def run() -> None:
        try:
            pool = make()
        except Exception as error:  # noqa: BLE001 - raised where it is awaited
            failure = error
            tell(lambda: made.set_exception(failure))
        else:
            tell(lambda: made.set_result(pool))

    threading.Thread(target=run, name="start-pool", daemon=True).start()
    return await made
