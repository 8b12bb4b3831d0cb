"""Serve embeddings: tokenize requests, batch them for a pool, answer ``POST /v1/embeddings``.

A batch takes the waiting items as soon as it may start; nothing is delayed to fill it. The number
of waiting items is bounded: a request beyond the bound is rejected at once.

Requests take turns in the order of arrival (deficit round robin). In its turn a request may fill a
share of a batch's tokens; its other items wait behind all other requests. So a small request waits
for one share of each earlier request, and a large request alone fills whole batches. Tokenizing
takes turns in the same way, a piece of a request at a time. The event loop itself tokenizes a
single short text, since waking the thread takes longer.

A signal handler may raise after any call, but not between two assignments; the count of waiting
items relies on this.
"""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from shm_broadcast import CoordinatorError

from ..config import MAX_INPUTS, ServiceLimits
from ..errors import CallTimeoutError, PoolClosedError, QueueFullError
from ..spans import Carrier, carried, of_batch
from ..workers.minilm import EncodedText, InputTooLongError, SentenceTokenizer
from .api import ApiError, ServedModel, decode_body
from .app import ServiceApp, json_answer, unless_client_leaves
from .metrics import Metrics
from .openapi import PostRoute, token_ids
from .pool_service import InstrumentedPool, NotReadyError, PoolService

if TYPE_CHECKING:
    from ..pool import WorkerPool
    from ..replicas import Replicas


Input: TypeAlias = "str | list[int]"


class EmbeddingRequest(msgspec.Struct):
    """Body of ``POST /v1/embeddings``.

    ``truncate`` extends OpenAI's API: whether to cut long inputs; ``None``: the server's default.
    """

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    truncate: bool | None = None


class Embedding(msgspec.Struct, tag_field="object", tag="embedding"):
    """One vector, as numbers or base64 of float32."""

    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    """Counts of tokens."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct, tag_field="object", tag="list"):
    """Body of the response to ``POST /v1/embeddings``."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


_decoder = msgspec.json.Decoder(EmbeddingRequest)


def read_request(
    body: bytes | bytearray, model: ServedModel
) -> tuple[EmbeddingRequest, list[Input]]:
    """Return the parsed request and the list of its inputs; raise `ApiError`: 400 or 404."""
    request = decode_body(_decoder, body, "an embeddings request")
    model.check_name(request.model)
    hidden = model.hidden_size
    if request.dimensions not in (None, hidden):
        message = f"dimensions must be {hidden}, all that this model has; got {request.dimensions}"
        raise ApiError(400, message, param="dimensions")
    return request, _inputs(request.input)


def response_to(
    request: EmbeddingRequest, vectors: Sequence[np.ndarray], n_tokens: int
) -> EmbeddingResponse:
    """Return the response; ``vectors``: float32 [hidden] per input."""
    as_text = request.encoding_format == "base64"
    data = [
        Embedding(index, _base64(vector) if as_text else vector.tolist())
        for index, vector in enumerate(vectors)
    ]
    return EmbeddingResponse(data, request.model, EmbeddingUsage(n_tokens, n_tokens))


def _inputs(given: str | list[Any]) -> list[Input]:
    if isinstance(given, str):
        return [given]
    if not given:
        raise ApiError(400, "input is an empty list", param="input")
    kinds = set(map(type, given))
    if len(kinds) > 1:
        raise ApiError(400, "input mixes texts, token ids and lists of them", param="input")
    inputs: list[Input] = [given] if int in kinds else given
    if len(inputs) > MAX_INPUTS:
        message = f"input has {len(inputs)} items; at most {MAX_INPUTS} are allowed"
        raise ApiError(400, message, param="input")
    return inputs


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()


Item = TypeVar("Item", bound="Sized")
Result = TypeVar("Result")

_SHARES = 4
"""A request may fill one part in this many of a batch in one turn."""


@dataclass(eq=False)
class BatchRequest(Generic[Item, Result]):
    """Items that are answered together.

    Attributes:
        items: inputs; the length of an item is its cost in tokens.
        results: one per item, set when the item's batch is done.
        left: number of missing results.
        answer: future of ``results``.
        next: index of the first item that is in no batch.
        credit: tokens that the request may still put into batches in this turn.
        trace: trace context of the caller.
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
        """Return the number of items that are in no batch."""
        return len(self.items) - self.next


@dataclass(frozen=True, slots=True)
class RequestPiece(Generic[Item, Result]):
    """Part ``items[start:stop]`` of a request, in one batch."""

    request: BatchRequest[Item, Result]
    start: int
    stop: int

    @property
    def items(self) -> Sequence[Item]:
        """Return the items of this part."""
        return self.request.items[self.start : self.stop]


@dataclass
class BatchQueue(Generic[Item, Result]):
    """Items that wait for a batch; one with more than ``max_tokens`` is a batch of its own."""

    max_tokens: int
    max_waiting: int
    waiting: int = 0
    _turns: deque[BatchRequest[Item, Result]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.max_waiting < 1:
            raise ValueError(
                "max_tokens and max_waiting must be 1 or more; "
                f"got {self.max_tokens} and {self.max_waiting}"
            )
        self._share = max(1, self.max_tokens // _SHARES)

    def add(self, request: BatchRequest[Item, Result]) -> None:
        """Append a request; raise `QueueFullError` unless all its items fit."""
        added = len(request.items)
        if self.waiting + added > self.max_waiting:
            raise QueueFullError(added, self.waiting, self.max_waiting)
        request.credit = self._share
        self.waiting += added
        self._turns.append(request)

    def take(self) -> list[RequestPiece[Item, Result]]:
        """Return the next batch; empty if no item waits."""
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
        """Take items of a request; return them, their tokens, and whether the batch is full.

        ``first``: the batch is empty, so one item of any length fits.
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
        """Remove the items of a request that are in no batch."""
        if request in self._turns:
            left = request.waiting
            self.waiting -= left
            self._turns.remove(request)


class Batcher(Generic[Item, Result]):
    """Computes the items of many requests in batches; belongs to one event loop.

    Args:
        compute: returns the results of a batch's items in order; its second argument has the trace
            contexts of their requests.
        max_tokens: maximum tokens of a batch.
        max_waiting: maximum waiting items, without those in running batches.
        in_flight: maximum number of running batches.
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
        """Return the number of waiting items."""
        return self._queue.waiting

    @property
    def running(self) -> int:
        """Return the number of running batches."""
        return len(self._running)

    async def submit(self, items: Sequence[Item]) -> list[Result]:
        """Return the results of ``items`` in order; cancelling drops items that wait.

        Raises:
            QueueFullError: no room; no item is computed.
            PoolClosedError: `close` was called.
            Exception: any error of ``compute``.
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
        except BaseException:  # cancelled, or raised by a signal handler
            self._queue.drop(request)
            raise

    async def close(self) -> None:
        """Refuse new requests, and wait until accepted ones are answered."""
        self._closed = True
        while self._running:
            await asyncio.wait(self._running)

    def _start(self) -> None:
        while len(self._running) < self._in_flight and (batch := self._queue.take()):
            task = asyncio.create_task(self._run(batch))
            task.add_done_callback(self._running.discard)  # in C: no signal handler interrupts it
            task.add_done_callback(lambda _: self._start())
            self._running.add(task)

    async def _run(self, batch: list[RequestPiece[Item, Result]]) -> None:
        try:
            items = [item for piece in batch for item in piece.items]
            traces = [trace for piece in batch if (trace := piece.request.trace) is not None]
            self._answer(batch, await self._compute(items, traces))
        except Exception as error:  # noqa: BLE001 - raised by `submit`
            self._fail(batch, error)
        except BaseException as error:
            self._fail(batch, CoordinatorError(f"a batch was abandoned: {error!r}"))
            raise

    def _answer(self, batch: list[RequestPiece[Item, Result]], results: Sequence[Result]) -> None:
        offset = 0
        for piece in batch:
            size = piece.stop - piece.start
            request = piece.request
            request.results[piece.start : piece.stop] = results[offset : offset + size]
            request.left -= size
            offset += size
            if not request.left and not request.answer.done():
                request.answer.set_result(request.results)

    def _fail(self, batch: list[RequestPiece[Item, Result]], error: Exception) -> None:
        for piece in batch:
            if not piece.request.answer.done():
                piece.request.answer.set_exception(error)
            self._queue.drop(piece.request)


_PIECE_CHARACTERS = 1 << 15
"""Approximate length of a piece: tokenizing takes 10 ms and 10 MB."""
_SHORT_CHARACTERS = 1 << 10
"""Longest text that the event loop tokenizes itself, in at most 1 ms."""


class Tokenizing:
    """Tokenizes in a thread; belongs to one event loop."""

    def __init__(self, tokenizer: SentenceTokenizer) -> None:
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, "tokenize")

    async def encode(self, inputs: Sequence[Input], *, truncate: bool) -> EncodedText:
        """See `SentenceTokenizer.encode`."""
        if len(inputs) == 1 and len(inputs[0]) <= _SHORT_CHARACTERS:
            return self._tokenizer.encode(inputs, truncate=truncate)
        encoded = EncodedText()
        loop = asyncio.get_running_loop()
        for start, stop in self._pieces(inputs):
            work = partial(
                self._tokenizer.encode, inputs[start:stop], truncate=truncate, first=start
            )
            part = await loop.run_in_executor(self._thread, work)
            encoded.tokens.extend(part.tokens)
            encoded.truncated.extend(part.truncated)
        return encoded

    def close(self) -> None:
        """Stop the thread; queued pieces are dropped."""
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
"""Text of the probe call."""


class RequestTimeoutError(CoordinatorError, TimeoutError):
    """A request timed out while it waited for earlier requests."""


class BadInputError(CoordinatorError, ValueError):
    """An input cannot be embedded; ``__cause__`` has the reason."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """Embeddings of a request, float32 [hidden] each; ``truncated``: indexes of cut inputs."""

    vectors: list[np.ndarray]
    n_tokens: int
    truncated: list[int]


class EmbeddingService(PoolService):
    """Embeds the inputs of many requests; belongs to one event loop.

    ``in_flight``: maximum calls of the pool in flight; for other arguments see `PoolService`.
    """

    def __init__(
        self,
        tokenizer: SentenceTokenizer,
        make_pool: Callable[[], WorkerPool | Replicas],
        limits: ServiceLimits,
        *,
        in_flight: int,
    ) -> None:
        super().__init__(make_pool, limits, partial(Metrics, kind="embedding"))
        self._tokenizing = Tokenizing(tokenizer)
        self._batcher: Batcher[np.ndarray, np.ndarray] = Batcher(
            self._compute,
            max_tokens=limits.max_tokens,
            max_waiting=limits.max_waiting,
            in_flight=in_flight,
        )

    @property
    def waiting(self) -> int:
        """Return the number of inputs that wait for the workers."""
        return self._batcher.waiting

    async def embed(self, inputs: Sequence[Input], *, truncate: bool) -> Embedded:
        """Embed texts, or lists of token ids.

        Args:
            inputs: texts or lists of token ids.
            truncate: cut inputs that are too long, instead of raising `BadInputError`.

        Raises:
            NotReadyError: see `check_ready`.
            BadInputError: an input is too long, or invalid for this model.
            QueueFullError: too many inputs wait.
            CallTimeoutError: workers timed out; names them.
            RequestTimeoutError: earlier requests took too long.
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
    sizes = [len(each) for each in tokens]
    attributes = {"items": len(sizes), "tokens": sum(sizes)}
    with pool.counted(sizes), of_batch("embed batch", traces, attributes):
        future = pool.pool.submit("embed", tokens, timeout=pool.call_timeout, retry=True)
        vectors: np.ndarray = await asyncio.wrap_future(future)
    return list(vectors)


class EmbeddingApp(ServiceApp[EmbeddingService]):
    """Routes of an embedding service; ``truncate``: default of the field in requests."""

    title = "embeddings"

    def __init__(
        self,
        service: EmbeddingService,
        model: ServedModel,
        *,
        api_key: str | None,
        truncate: bool,
    ) -> None:
        super().__init__(service, model, api_key=api_key)
        self._truncate = truncate

    def posts(self) -> list[PostRoute]:
        """See `ServiceApp`."""
        model, text = self.model, {"type": "string"}
        ids = token_ids(model, model.max_tokens)
        many = {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS}
        limits = {
            "input": {"anyOf": [text, {**many, "items": text}, ids, {**many, "items": ids}]},
            "dimensions": {"enum": [model.hidden_size, None]},
        }
        types = EmbeddingRequest, EmbeddingResponse
        return [PostRoute("/v1/embeddings", "embed", self._embed, *types, limits)]

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
            parsed, inputs = read_request(body, self.model)
            truncate = self._truncate if parsed.truncate is None else parsed.truncate
            embedded = await unless_client_leaves(
                request, self.service.embed(inputs, truncate=truncate)
            )
        response = json_answer(response_to(parsed, embedded.vectors, embedded.n_tokens))
        request.state.facts.update(inputs=len(inputs), tokens=embedded.n_tokens)
        self.service.metrics.inputs.inc(len(inputs))
        self.service.metrics.tokens.inc(embedded.n_tokens)
        if embedded.truncated:
            self.service.metrics.truncated.inc(len(embedded.truncated))
            response.headers["x-truncated-inputs"] = str(len(embedded.truncated))
            request.state.facts["truncated"] = len(embedded.truncated)
        return response
