"""Dynamic batching: requests that wait together are computed together.

Nothing is delayed to fill a batch: whenever a batch may start, it takes all that waits, in the
order of arrival, up to its size. A large request is computed in several batches; batches of
different requests are not reordered.

What waits is bounded: a request that does not fit is refused at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from server.errors import PoolClosedError, QueueFullError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(eq=False)
class Request(Generic[Item, Result]):
    """Items that are answered together.

    Attributes:
        items: what was asked.
        results: by item; each is filled in once its batch is done.
        left: how many results are missing.
        answer: given ``results`` when none is missing.
    """

    items: Sequence[Item]
    results: list[Any]
    left: int
    answer: asyncio.Future[list[Result]]


@dataclass(frozen=True, slots=True)
class Piece(Generic[Item, Result]):
    """The part ``items[start:stop]`` of a request, in one batch."""

    request: Request[Item, Result]
    start: int
    stop: int

    @property
    def items(self) -> Sequence[Item]:
        """What it asks."""
        return self.request.items[self.start : self.stop]


@dataclass
class BatchQueue(Generic[Item, Result]):
    """What waits, in order. Pure logic: no waiting, no tasks.

    Attributes:
        max_batch: items of a batch, at most.
        max_waiting: items that may wait.
        waiting: items that do.
    """

    max_batch: int
    max_waiting: int
    waiting: int = 0
    _pieces: deque[Piece[Item, Result]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        if self.max_batch < 1 or self.max_waiting < 1:
            raise ValueError(
                "max_batch and max_waiting must be 1 or more; "
                f"got {self.max_batch} and {self.max_waiting}"
            )

    def add(self, request: Request[Item, Result]) -> None:
        """Put a request last.

        Raises:
            QueueFullError: there is no room for all of it.
        """
        asked = len(request.items)
        if self.waiting + asked > self.max_waiting:
            raise QueueFullError(asked, self.waiting, self.max_waiting)
        self._pieces.append(Piece(request, 0, asked))
        self.waiting += asked

    def take(self) -> list[Piece[Item, Result]]:
        """The next batch; empty if nothing waits."""
        batch: list[Piece[Item, Result]] = []
        room = self.max_batch
        while room and self._pieces:
            piece = self._pieces.popleft()
            cut = min(piece.stop, piece.start + room)
            if cut < piece.stop:
                self._pieces.appendleft(Piece(piece.request, cut, piece.stop))
            batch.append(Piece(piece.request, piece.start, cut))
            room -= cut - piece.start
        self.waiting -= self.max_batch - room
        return batch

    def drop(self, request: Request[Item, Result]) -> None:
        """Forget what waits of a request."""
        kept = [piece for piece in self._pieces if piece.request is not request]
        self._pieces = deque(kept)
        self.waiting = sum(piece.stop - piece.start for piece in kept)


class Batcher(Generic[Item, Result]):
    """Collects requests and has them computed; belongs to one event loop.

    Args:
        compute: gives the results of a batch's items, in their order.
        max_batch: items of a batch, at most.
        max_waiting: items that may wait, beside those that are being computed.
        in_flight: batches that may be computed at once.
    """

    def __init__(
        self,
        compute: Callable[[list[Item]], Awaitable[Sequence[Result]]],
        *,
        max_batch: int,
        max_waiting: int,
        in_flight: int,
    ) -> None:
        self._compute = compute
        self._queue: BatchQueue[Item, Result] = BatchQueue(max_batch, max_waiting)
        self._in_flight = in_flight
        self._running: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def waiting(self) -> int:
        """Items that wait."""
        return self._queue.waiting

    @property
    def running(self) -> int:
        """Batches that are being computed."""
        return len(self._running)

    async def submit(self, items: Sequence[Item]) -> list[Result]:
        """The results of ``items``, in their order. Whoever cancels this is not computed for.

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
        request = Request(items, [None] * len(items), len(items), answer)
        self._queue.add(request)
        self._start()
        try:
            return await answer
        except asyncio.CancelledError:
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
            self._running.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._start()

    async def _run(self, batch: list[Piece[Item, Result]]) -> None:
        items = [item for piece in batch for item in piece.items]
        try:
            results = await self._compute(items)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who asked get it
            self._fail(batch, error)
            return
        at = 0
        for piece in batch:
            size = piece.stop - piece.start
            request = piece.request
            request.results[piece.start : piece.stop] = results[at : at + size]
            request.left -= size
            at += size
            if not request.left and not request.answer.done():
                request.answer.set_result(request.results)

    def _fail(self, batch: list[Piece[Item, Result]], error: Exception) -> None:
        for piece in batch:
            if not piece.request.answer.done():
                piece.request.answer.set_exception(error)
            self._queue.drop(piece.request)
