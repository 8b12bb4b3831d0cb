"""Serve embeddings: tokenise requests, batch them for a pool, answer ``POST /v1/embeddings``.

Pure logic: no waiting, no tasks. The requests take turns, in the order of arrival. In its turn a
request may fill a share of a batch's tokens; the rest of its items wait for its next turn, behind
the other requests (deficit round robin). So a small request waits for one share of each request
that came before it, however large these are, and a large one that is alone fills whole batches.

A signal handler may raise after any call, but never between two assignments, so the count of
waiting items stays correct.

Nothing is delayed to fill a batch: as soon as a batch may start, it takes the waiting items, up to
its size, as `batch_queue` chooses them. The number of waiting items is bounded: a request that
would exceed it is refused at once.

The next piece of a request is queued when the one before it is done, behind the pieces of other
requests, so a small request waits for one piece of each large one. A single short text is tokenised
in the event loop itself, because waking the thread would take longer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shm_broadcast import CoordinatorError

from ..config import ServiceLimits
from ..errors import CallTimeoutError, PoolClosedError, QueueFullError
from ..spans import Carrier, carried, of_batch
from ..workers.minilm import EncodedText, InputTooLongError, SentenceTokenizer
from .api import ApiError, ServedModel
from .embedding_api import FORMATS, MAX_INPUTS, Input, read_request, write_response
from .face import ServiceApp, json_answer, unless_client_leaves
from .openapi import COUNT, REASONS, STRING, Schema, document_of, object_of, responses
from .pool_service import InstrumentedPool, NotReadyError, PoolService

if TYPE_CHECKING:
    from ..pool import WorkerPool
    from ..replicas import Replicas


Item = TypeVar("Item", bound="Sized")
Result = TypeVar("Result")

_SHARES = 4
"""In one turn a request may fill a batch to one part in this many."""


@dataclass(eq=False)
class BatchRequest(Generic[Item, Result]):
    """Items that are answered together.

    Attributes:
        items: what was asked; the length of each is what it costs.
        results: one for each item, filled in once its batch is done.
        left: how many results are missing.
        answer: given ``results`` when none is missing.
        next: the index of the first item that is in no batch yet.
        credit: the tokens that it may still put into batches in this turn.
        trace: the trace context of whoever asks.
    """

    items: Sequence[Item]
    results: list[Any]
    left: int
    answer: asyncio.Future[list[Result]]
    next: int = 0
    credit: int = 0
    trace: Carrier | None = None

    @property
    def waiting(self) -> int:
        """How many items are in no batch yet."""
        return len(self.items) - self.next


@dataclass(frozen=True, slots=True)
class RequestPiece(Generic[Item, Result]):
    """The part ``items[start:stop]`` of a request, in one batch."""

    request: BatchRequest[Item, Result]
    start: int
    stop: int

    @property
    def items(self) -> Sequence[Item]:
        """The items of this part."""
        return self.request.items[self.start : self.stop]


@dataclass
class BatchQueue(Generic[Item, Result]):
    """The requests of which items wait for a batch.

    Attributes:
        max_tokens: tokens of a batch at most; an item that has more is a batch of its own.
        max_waiting: items that may wait, at most.
        waiting: how many items wait.
    """

    max_tokens: int
    max_waiting: int
    waiting: int = 0
    _turns: deque[BatchRequest[Item, Result]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """Raise `ValueError` for a limit below 1."""
        if self.max_tokens < 1 or self.max_waiting < 1:
            raise ValueError(
                "max_tokens and max_waiting must be 1 or more; "
                f"got {self.max_tokens} and {self.max_waiting}"
            )
        self._share = max(1, self.max_tokens // _SHARES)

    def add(self, request: BatchRequest[Item, Result]) -> None:
        """Let a request wait, behind the others.

        Raises:
            QueueFullError: there is no room for all of it.
        """
        asked = len(request.items)
        if self.waiting + asked > self.max_waiting:
            raise QueueFullError(asked, self.waiting, self.max_waiting)
        request.credit = self._share
        self.waiting += asked
        self._turns.append(request)

    def take(self) -> list[RequestPiece[Item, Result]]:
        """The next batch; empty if nothing waits."""
        batch: list[RequestPiece[Item, Result]] = []
        room = self.max_tokens
        while self._turns:
            request = self._turns[0]
            piece, cost, full = self._turn(request, room, first=not batch)
            if piece.stop > piece.start:
                batch.append(piece)
                room -= cost
            if full:
                break
            if request.waiting:
                request.credit += self._share
                self._turns.rotate(-1)
            else:
                self._turns.popleft()
        return batch

    def _turn(
        self, request: BatchRequest[Item, Result], room: int, first: bool
    ) -> tuple[RequestPiece[Item, Result], int, bool]:
        """What a request puts into a batch, how many tokens that is, and whether the batch is full.

        ``first``: the batch is empty so far, so that one item fits, however many tokens it has.
        """
        start, taken = request.next, 0
        full = False
        while request.waiting:
            cost = len(request.items[request.next])
            if cost > request.credit:
                break
            full = taken + cost > room and not (first and not taken)
            if full:
                break
            taken += cost
            request.credit -= cost
            request.next += 1
            self.waiting -= 1
        return RequestPiece(request, start, request.next), taken, full

    def drop(self, request: BatchRequest[Item, Result]) -> None:
        """Forget the items of a request that are in no batch yet."""
        if request in self._turns:
            left = request.waiting
            self.waiting -= left
            self._turns.remove(request)


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


_PIECE_CHARACTERS = 1 << 15
"""About how long a piece is; it takes some 10 ms, and 10 MB of memory meanwhile."""
_SHORT_CHARACTERS = 1 << 10
"""The longest text that the event loop tokenises itself; it takes 1 ms at most."""


class Tokenizing:
    """A thread that tokenises; belongs to one event loop."""

    def __init__(self, tokenizer: SentenceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, "tokenize")

    async def encode(self, inputs: Sequence[Input], *, truncate: bool) -> EncodedText:
        """See `SentenceTokenizer.encode`."""
        if len(inputs) == 1 and len(inputs[0]) <= _SHORT_CHARACTERS:
            return self._tokenizer.encode(inputs, truncate=truncate)
        found = EncodedText()
        loop = asyncio.get_running_loop()
        for start, stop in self._pieces(inputs):
            work = partial(
                self._tokenizer.encode, inputs[start:stop], truncate=truncate, first=start
            )
            part = await loop.run_in_executor(self._thread, work)
            found.tokens.extend(part.tokens)
            found.truncated.extend(part.truncated)
        return found

    def close(self) -> None:
        """Tokenise nothing more; pieces that are queued are dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _pieces(self, inputs: Sequence[Input]) -> Iterator[tuple[int, int]]:
        start = size = 0
        for index, item in enumerate(inputs):
            size += min(len(item), self._tokenizer.max_characters)
            if size >= _PIECE_CHARACTERS:
                yield start, index + 1
                start, size = index + 1, 0
        if start < len(inputs):
            yield start, len(inputs)


PROBE = "ready"
"""What the probe call embeds."""


class RequestTimeoutError(CoordinatorError, TimeoutError):
    """A request was not answered in time: the requests before it took too long."""


class BadInputError(CoordinatorError, ValueError):
    """An input cannot be embedded; ``__cause__`` is the error that says why."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """A request's embeddings.

    Attributes:
        vectors: float32 [hidden] for each input.
        n_tokens: how many tokens all inputs have together.
        truncated: the numbers of the inputs that were cut, as longer than the model takes.
    """

    vectors: list[np.ndarray]
    n_tokens: int
    truncated: list[int]


class EmbeddingService(PoolService):
    """Embeds inputs of many requests; belongs to one event loop.

    Args:
        tokenizer: the model's.
        make_pool, limits: see `PoolService`.
        in_flight: calls that may be with the workers at once.
    """

    def __init__(
        self,
        tokenizer: SentenceTokenizer,
        make_pool: Callable[[], WorkerPool | Replicas],
        limits: ServiceLimits,
        *,
        in_flight: int,
    ) -> None:
        super().__init__(make_pool, limits, "embedding")
        self._tokenizing = Tokenizing(tokenizer)
        self._batcher: Batcher[np.ndarray, np.ndarray] = Batcher(
            self._compute,
            max_tokens=limits.max_tokens,
            max_waiting=limits.max_waiting,
            in_flight=in_flight,
        )

    @property
    def waiting(self) -> int:
        """How many inputs wait to be sent to the workers."""
        return self._batcher.waiting

    async def embed(self, inputs: Sequence[Input], *, truncate: bool) -> Embedded:
        """Embed texts, or lists of token ids.

        Args:
            inputs: what to embed.
            truncate: cut those that are longer than the model takes, in place of refusing them.

        Raises:
            NotReadyError: see `check_ready`.
            BadInputError: an input is too long, or not for this model.
            QueueFullError: too many inputs wait.
            CallTimeoutError: the workers did not answer in time; says which.
            RequestTimeoutError: the requests before it took too long.
            CoordinatorError: the workers failed.
        """
        self.check_ready()
        try:
            async with asyncio.timeout(self._limits.request_timeout):
                encoded = await self._encode(inputs, truncate=truncate)
                vectors = await self._batcher.submit(encoded.tokens)
        except CallTimeoutError:
            raise
        except TimeoutError as error:
            raise RequestTimeoutError(
                f"not answered within {self._limits.request_timeout:g} s; "
                f"{self._batcher.waiting} other inputs wait"
            ) from error
        return Embedded(vectors, sum(map(len, encoded.tokens)), encoded.truncated)

    async def stop(self) -> None:
        """See `PoolService.stop`."""
        await super().stop()
        self._tokenizing.close()

    async def _probe(self, pool: InstrumentedPool) -> None:
        await _vectors(pool, (await self._encode([PROBE], truncate=False)).tokens, [])

    async def _finish(self) -> None:
        await self._batcher.close()

    async def _encode(self, inputs: Sequence[Input], *, truncate: bool) -> EncodedText:
        try:
            return await self._tokenizing.encode(inputs, truncate=truncate)
        except (TypeError, ValueError) as error:
            raise BadInputError(str(error)) from error

    async def _compute(
        self, tokens: list[np.ndarray], traces: list[Carrier]
    ) -> Sequence[np.ndarray]:
        if self._pool is None:
            raise NotReadyError("the workers do not run")
        return await _vectors(self._pool, tokens, traces)


async def _vectors(
    pool: InstrumentedPool, tokens: list[np.ndarray], traces: Sequence[Carrier]
) -> Sequence[np.ndarray]:
    """The vectors of some lists of tokens, float32 [hidden] each, for those who asked."""
    sizes = [len(each) for each in tokens]
    about = {"items": len(sizes), "tokens": sum(sizes)}
    with pool.counted(sizes), of_batch("embed batch", traces, about):
        future = pool.pool.submit("embed", tokens, timeout=pool.call_timeout, retry=True)
        vectors: np.ndarray = await asyncio.wrap_future(future)
    return list(vectors)


def embedding_document(model: ServedModel, *, with_key: bool) -> Schema:
    """OpenAPI 3.1 of a service of embeddings.

    Args:
        model: what is served.
        with_key: whether requests have to show a key.
    """
    asked = {"/v1/embeddings": ("embed", _request(model), responses(_answer(model), *REASONS))}
    return document_of("embeddings", asked, model, with_key=with_key)


def _request(model: ServedModel) -> Schema:
    ids = {
        "type": "array",
        "minItems": 1,
        "maxItems": model.max_tokens,
        "items": {"type": "integer", "minimum": 0, "maximum": model.vocabulary - 1},
    }
    many = {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS}
    return {
        "type": "object",
        "required": ["model", "input"],
        "properties": {
            "model": {"enum": [model.name]},
            "input": {"anyOf": [STRING, {**many, "items": STRING}, ids, {**many, "items": ids}]},
            "encoding_format": {"enum": [*FORMATS, None]},
            "dimensions": {"enum": [model.hidden_size, None]},
            "user": {"type": ["string", "null"]},
            "truncate": {
                "type": ["boolean", "null"],
                "description": f"Cut inputs of more than {model.max_tokens} tokens.",
            },
        },
    }


def _answer(model: ServedModel) -> Schema:
    size = model.hidden_size
    floats = {"type": "array", "minItems": size, "maxItems": size, "items": {"type": "number"}}
    entry = object_of(
        object={"const": "embedding"}, index=COUNT, embedding={"anyOf": [floats, STRING]}
    )
    return object_of(
        object={"const": "list"},
        data={"type": "array", "items": entry},
        model={"const": model.name},
        usage=object_of(prompt_tokens=COUNT, total_tokens=COUNT),
    )


class EmbeddingApp(ServiceApp[EmbeddingService]):
    """The face of a service of embeddings.

    Args:
        service, model, api_key, on_failure: see `ServiceApp`.
        truncate: whether inputs that are too long are cut where a request does not say.
    """

    def __init__(
        self,
        service: EmbeddingService,
        model: ServedModel,
        *,
        api_key: str | None,
        truncate: bool,
        on_failure: Callable[[], None],
    ) -> None:
        super().__init__(service, model, api_key=api_key, on_failure=on_failure)
        self._truncate = truncate

    def model_routes(self) -> list[Route]:
        """See `ServiceApp`."""
        return [Route("/v1/embeddings", self.answering(self._embed), methods=["POST"])]

    def openapi(self, *, with_key: bool) -> Schema:
        """See `ServiceApp`."""
        return embedding_document(self.model, with_key=with_key)

    def as_api_error(self, error: Exception, request_id: str) -> ApiError:
        """See `ServiceApp`."""
        match error:
            case BadInputError(__cause__=InputTooLongError()):
                return ApiError(400, str(error), param="input", code="context_length_exceeded")
            case BadInputError():
                return ApiError(400, str(error), param="input")
        return super().as_api_error(error, request_id)

    async def _embed(self, request: Request) -> Response:
        async with self.bodies.read(request) as body:
            asked, inputs = read_request(body, self.model)
            truncate = self._truncate if asked.truncate is None else asked.truncate
            found = await unless_client_leaves(
                request, self.service.embed(inputs, truncate=truncate)
            )
        response = json_answer(write_response(asked, found.vectors, found.n_tokens))
        request.state.facts.update(inputs=len(inputs), tokens=found.n_tokens)
        self.service.metrics.inputs.inc(len(inputs))
        self.service.metrics.tokens.inc(found.n_tokens)
        if found.truncated:
            self.service.metrics.truncated.inc(len(found.truncated))
            response.headers["x-truncated-inputs"] = str(len(found.truncated))
            request.state.facts["truncated"] = len(found.truncated)
        return response
