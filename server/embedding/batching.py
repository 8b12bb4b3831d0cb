"""Dynamic batching: requests that wait together are computed together.

Nothing is delayed to fill a batch: as soon as a batch may start, it takes the waiting items, up to
its size, as `batch_queue` chooses them. The number of waiting items is bounded: a request that
would exceed it is refused at once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Generic

from shm_broadcast import CoordinatorError

from ..errors import PoolClosedError
from ..spans import carried
from .batch_queue import BatchQueue, BatchRequest, Item, RequestPiece, Result

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ..spans import Carrier


class Batcher(Generic[Item, Result]):
    """Collects requests and has them computed; belongs to one event loop.

    Args:
        compute: gives the results of a batch's items, in their order; also has the trace contexts
            of those who asked for them.
        max_tokens: how long the items of a batch may be together.
        max_waiting: items that may wait, beside those that are being computed.
        in_flight: batches that may be computed at once.
    """

    def __init__(
        self,
        compute: Callable[[list[Item], list[Carrier]], Awaitable[Sequence[Result]]],
        *,
        max_tokens: int,
        max_waiting: int,
        in_flight: int,
    ) -> None:
        self._compute = compute
        self._queue: BatchQueue[Item, Result] = BatchQueue(max_tokens, max_waiting)
        self._in_flight = in_flight
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many items wait for a batch."""
        return self._queue.waiting

    @property
    def running(self) -> int:
        """How many batches are being computed."""
        return len(self._running)

    async def submit(self, items: Sequence[Item]) -> list[Result]:
        """The results of ``items``, in their order. If cancelled, items that wait are dropped.

        Raises:
            QueueFullError: no room; nothing of it will be computed.
            PoolClosedError: `close` was called.
            What computing raised.
        """
        if self._closed:
            raise PoolClosedError("shutting down: no new requests are taken")
        if not items:
            return []
        answer: asyncio.Future[list[Result]] = asyncio.get_running_loop().create_future()
        request = BatchRequest(items, [None] * len(items), len(items), answer, trace=carried())
        try:
            self._queue.add(request)
            self._start()
            return await answer
        except BaseException:  # cancelled, or a signal handler's
            self._queue.drop(request)
            raise

    async def close(self) -> None:
        """Take no new requests, and wait until those that were taken are answered."""
        self._closed = True
        while self._running:
            await asyncio.wait(self._running)

    def _start(self) -> None:
        while len(self._running) < self._in_flight and (batch := self._queue.take()):
            task = asyncio.create_task(self._run(batch))
            task.add_done_callback(self._running.discard)  # no Python: nothing interrupts it
            task.add_done_callback(lambda _: self._start())
            self._running.add(task)

    async def _run(self, batch: list[RequestPiece[Item, Result]]) -> None:
        try:
            items = [item for piece in batch for item in piece.items]
            traces = [trace for piece in batch if (trace := piece.request.trace) is not None]
            self._answer(batch, await self._compute(items, traces))
        except Exception as error:  # noqa: BLE001 - whatever it is, those who asked get it
            self._fail(batch, error)
        except BaseException as error:
            self._fail(batch, CoordinatorError(f"a batch was given up: {error!r}"))
            raise

    def _answer(self, batch: list[RequestPiece[Item, Result]], results: Sequence[Result]) -> None:
        at = 0
        for piece in batch:
            size = piece.stop - piece.start
            request = piece.request
            request.results[piece.start : piece.stop] = results[at : at + size]
            request.left -= size
            at += size
            if not request.left and not request.answer.done():
                request.answer.set_result(request.results)

    def _fail(self, batch: list[RequestPiece[Item, Result]], error: Exception) -> None:
        for piece in batch:
            if not piece.request.answer.done():
                piece.request.answer.set_exception(error)
            self._queue.drop(piece.request)
