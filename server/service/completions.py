"""Serve completions and chats over OpenAI's API, from a pool of decoder workers.

Unsupported fields that would change the answer are rejected by name; others are ignored.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..config import ServiceLimits
from ..pool import WorkerPool
from ..workers.decoder import (
    AnswerReader,
    DecoderText,
    Engine,
    GeneratedSequence,
    PromptTooLongError,
    Sampling,
)
from .api import ApiError, ServedModel, decode_body
from .app import ServiceApp, json_answer, unless_client_leaves
from .metrics import CompletionMetrics
from .openapi import PostRoute, token_ids
from .pool_service import InstrumentedPool, PoolService

if TYPE_CHECKING:
    from prometheus_client import Metric
    from starlette.types import Receive, Scope, Send

T = TypeVar("T", bound=msgspec.Struct)

MAX_STOPS = 4
"""Maximum stop strings of a request, as in OpenAI's API."""
_COMPLETION_TOKENS = 16
"""Default ``max_tokens`` of a completion, as in OpenAI's API."""
_NO_TOP_K = -1
"""No limit in vLLM's clients; 0 in `Sampling`."""
PLAIN: dict[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "logprobs": (None, False),
    "top_logprobs": (None, 0, False),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "ignore_eos": (None, False),
    "stop_token_ids": (None, []),
    "tools": (None, []),
    "functions": (None, []),
    "response_format": (None, {"type": "text"}),
    "audio": (None,),
}
"""Unsupported fields, each with the values that a request may give."""


class StreamOptions(msgspec.Struct):
    """Options of a stream."""

    include_usage: bool | None = None


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """Text part of a message."""

    text: str


class ChatMessage(msgspec.Struct):
    """Message of a chat; the model's chat template may allow fewer roles."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        """Return role and text."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text}


_Count = Annotated[int, Meta(ge=1)]
_Stop = Annotated[str, Meta(min_length=1)]


class _RequestFields(msgspec.Struct):
    model: str
    max_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=_NO_TOP_K)] | None = None
    seed: int | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(_RequestFields, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[str | int]


class ChatRequest(_RequestFields, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: _Count | None = None


def _with_plain(kind: type[T]) -> type[T]:
    """Return ``kind`` with the fields of `PLAIN`."""
    plain = []
    for name, values in PLAIN.items():
        schema = {"enum": list(values), "description": f"Other values of {name} are refused."}
        plain.append((name, Annotated[Any, Meta(extra_json_schema=schema)], None))
    subclass = msgspec.defstruct(kind.__name__, plain, bases=(kind,), kw_only=True)
    return cast("type[T]", subclass)


_CompletionBody = _with_plain(CompletionRequest)
_ChatBody = _with_plain(ChatRequest)
_completion = msgspec.json.Decoder(_CompletionBody)
_chat = msgspec.json.Decoder(_ChatBody)


class Usage(msgspec.Struct):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt: int, answer: int) -> Usage:
        """Return the counts of a prompt and an answer."""
        return cls(prompt, answer, prompt + answer)


class ChatAnswer(msgspec.Struct):
    """Answer of a chat, or a piece of it."""

    content: str | UnsetType = UNSET
    role: Literal["assistant"] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    """Answer: ``text`` of a completion, ``message`` of a chat, ``delta`` of a chat's stream."""

    index: int = 0
    text: str | UnsetType = UNSET
    message: ChatAnswer | UnsetType = UNSET
    delta: ChatAnswer | UnsetType = UNSET
    logprobs: None = None
    finish_reason: str | None = None


class Completion(msgspec.Struct):
    """Response to a request for a completion or a chat, and chunk of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class CompletionParams:
    """Parsed request for a completion or a chat.

    Attributes:
        prompt: text, token ids, or messages of a chat.
        max_tokens: maximum tokens of the answer; ``None``: up to the context's end.
        stops: strings that end the answer.
        with_usage: whether a stream ends with token counts.
    """

    prompt: str | list[int] | list[dict[str, str]]
    is_chat: bool
    max_tokens: int | None
    sampling: Sampling
    stops: tuple[str, ...]
    stream: bool
    with_usage: bool


def read_completion(body: bytes | bytearray, model: ServedModel) -> CompletionParams:
    """Parse a completion request; raise `ApiError`: 400, or 404 for another model."""
    request = decode_body(_completion, body, "a request for a completion")
    prompt = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, list) and not set(map(type, prompt)) <= {int}:
        message = "prompt must be one text, or the token ids of one"
        raise ApiError(400, message, param="prompt")
    most = _COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    return _params(request, prompt, model, most)


def read_chat(body: bytes | bytearray, model: ServedModel) -> CompletionParams:
    """Parse a chat request; raise `ApiError`: 400, or 404 for another model."""
    request = decode_body(_chat, body, "a request for a chat")
    messages = [each.plain() for each in request.messages]
    return _params(request, messages, model, request.max_completion_tokens or request.max_tokens)


@dataclass(frozen=True, slots=True)
class ResponseWriter:
    """Writes one answer, whole or as chunks; ``created`` is in seconds since the epoch."""

    model: str
    is_chat: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, reason: str, usage: Usage) -> Completion:
        """Return the answer in one piece."""
        if self.is_chat:
            choice = CompletionChoice(message=ChatAnswer(text, "assistant"), finish_reason=reason)
            return self._completion("chat.completion", [choice], usage)
        choice = CompletionChoice(text=text, finish_reason=reason)
        return self._completion("text_completion", [choice], usage)

    def first_chunk(self) -> list[bytes]:
        """Return the events that begin a stream."""
        return [self._event(self._piece("", role="assistant"))] if self.is_chat else []

    def chunk(self, text: str) -> bytes:
        """Return an event with more text."""
        return self._event(self._piece(text))

    def last_chunk(self, reason: str, usage: Usage | None) -> list[bytes]:
        """Return the events that end a stream; ``usage``: if requested."""
        counts = [] if usage is None else [self._event(usage=usage)]
        last = self._event(self._piece(UNSET if self.is_chat else "", reason))
        return [last, *counts, b"data: [DONE]\n\n"]

    def _piece(
        self,
        text: str | UnsetType,
        reason: str | None = None,
        role: Literal["assistant"] | UnsetType = UNSET,
    ) -> CompletionChoice:
        if self.is_chat:
            return CompletionChoice(delta=ChatAnswer(text, role), finish_reason=reason)
        return CompletionChoice(text=text, finish_reason=reason)

    def _event(self, *choices: CompletionChoice, usage: Usage | UnsetType = UNSET) -> bytes:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return _event(self._completion(kind, [*choices], usage))

    def _completion(
        self, kind: str, choices: list[CompletionChoice], usage: Usage | UnsetType
    ) -> Completion:
        prefix = "chatcmpl-" if self.is_chat else "cmpl-"
        return Completion(prefix + self.id, kind, self.created, self.model, choices, usage)


def _event(content: object) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _params(
    request: Any, prompt: Any, model: ServedModel, max_tokens: int | None
) -> CompletionParams:
    model.check_name(request.model)
    for name, values in PLAIN.items():
        if not _is_one_of(values, getattr(request, name)):
            raise ApiError(400, f"{name} is not supported; leave it out", param=name)
    options, stop = request.stream_options, request.stop
    return CompletionParams(
        prompt=prompt,
        is_chat=isinstance(request, ChatRequest),
        max_tokens=max_tokens,
        sampling=Sampling(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=0 if request.top_k in (None, _NO_TOP_K) else request.top_k,
            seed=request.seed,
        ),
        stops=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        stream=bool(request.stream),
        with_usage=bool(options and options.include_usage),
    )


def _is_one_of(values: Sequence[object], given: object) -> bool:
    """Compare as JSON does: ``false`` is not 0."""
    return any(
        given == value and isinstance(given, bool) == isinstance(value, bool) for value in values
    )


_POLL_SECONDS = 0.02


class CompletionService(PoolService):
    """Completes prompts with an engine over the pool; belongs to one event loop."""

    metrics: CompletionMetrics

    def __init__(
        self,
        text: DecoderText,
        make_pool: Callable[[], WorkerPool],
        limits: ServiceLimits,
        model_name: str,
    ) -> None:
        """``model_name`` is for metrics; for other arguments see `PoolService`."""
        super().__init__(make_pool, limits, partial(CompletionMetrics, model_name=model_name))
        self.text = text
        self._engine: Engine | None = None

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for a slot."""
        return 0 if self._engine is None else self._engine.waiting

    def generate(
        self, prompt: Sequence[int], max_tokens: int | None, sampling: Sampling
    ) -> GeneratedSequence:
        """Start an answer; see `Engine.submit`.

        Raises:
            NotReadyError: see `check_ready`.
            ValueError: invalid prompt or ``max_tokens``.
            QueueFullError: too many requests wait.
            CoordinatorError: the workers failed.
        """
        self.check_ready()
        engine = cast("Engine", self._engine)  # set before the state is ready
        seconds = self._limits.request_timeout
        return engine.submit(prompt, max_tokens, sampling, timeout=seconds, observer=self.metrics)

    def status(self) -> dict[str, Any]:
        """Return also the engine's load."""
        running, waiting, usage = self._load()
        load = {"running": running, "waiting": waiting, "cache_usage": usage}
        return {**super().status(), "sequences": load}

    def _now(self) -> Iterator[Metric]:
        yield from super()._now()
        yield from self.metrics.of_engine(*self._load())

    def _load(self) -> tuple[int, int, float]:
        engine = self._engine
        if engine is None:
            return 0, 0, 0.0
        return engine.running, engine.waiting, engine.cache_usage

    async def _probe(self, pool: InstrumentedPool) -> None:
        if self._engine is None:
            chunk, most = self._limits.max_tokens, self._limits.max_waiting
            self._engine = await asyncio.to_thread(Engine, pool, chunk=chunk, max_waiting=most)
        async for _ in self._engine.submit([0], 1, timeout=self._limits.request_timeout):
            pass

    async def _finish(self) -> None:
        if self._engine is not None:
            while self._engine.running or self._engine.waiting:
                await asyncio.sleep(_POLL_SECONDS)
            await asyncio.to_thread(self._engine.close)


class _EventStream(StreamingResponse):
    """Server-sent events of one answer, whose slot is freed at the end."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], generation: GeneratedSequence) -> None:
        super().__init__(events, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation:
            await super().__call__(scope, receive, send)


_TOO_LONG = "context_length_exceeded"
"""OpenAI's code of the error."""


class CompletionApp(ServiceApp[CompletionService]):
    """Routes of a completion service."""

    title = "completions"

    def posts(self) -> list[PostRoute]:
        """See `ServiceApp`."""
        text = {"type": "string", "minLength": 1}
        prompt = {"anyOf": [text, token_ids(self.model, self.model.max_tokens - 1)]}
        limits, plain, chat = {"prompt": prompt}, (_CompletionBody, Completion), _ChatBody
        return [
            PostRoute("/v1/completions", "complete", self._complete, *plain, limits, True),
            PostRoute("/v1/chat/completions", "chat", self._chat, chat, Completion, {}, True),
        ]

    async def _complete(self, request: Request) -> Response:
        async with self.bodies.read(request) as body:
            params = read_completion(body, self.model)
        return await self._answer(request, params)

    async def _chat(self, request: Request) -> Response:
        async with self.bodies.read(request) as body:
            params = read_chat(body, self.model)
        return await self._answer(request, params)

    async def _answer(self, request: Request, params: CompletionParams) -> Response:
        self.service.check_ready()
        param = "messages" if params.is_chat else "prompt"
        try:
            prompt = await self._tokens(params)
            generation = self.service.generate(prompt, params.max_tokens, params.sampling)
        except PromptTooLongError as error:
            raise ApiError(400, str(error), param=param, code=_TOO_LONG) from error
        except ValueError as error:
            raise ApiError(400, str(error), param=param) from error
        writer = ResponseWriter(self.model.name, params.is_chat)
        answer = _DetokenizedStream(generation, self.service.text.reader(params.stops))
        request.state.facts["prompt_tokens"] = len(prompt)
        if params.stream:
            events = self._streamed(request, params, writer, answer, len(prompt))
            return _EventStream(events, generation)
        with generation:
            text = await unless_client_leaves(request, answer.whole())
        request.state.facts["tokens"] = answer.tokens
        self._count_answer(len(prompt) + answer.tokens, answer.reason)
        return json_answer(writer.whole(text, answer.reason, Usage.of(len(prompt), answer.tokens)))

    async def _tokens(self, params: CompletionParams) -> list[int]:
        """Tokenize the prompt in a thread; raise `ApiError` if it is too long to tokenize."""
        if params.is_chat:
            messages = cast("list[dict[str, str]]", params.prompt)
            length = sum(len(text) for each in messages for text in each.values())
            self._check_length(length, "messages")
            if len(messages) > self.model.max_tokens:
                message = f"the chat has {len(messages)} messages; each takes a token at least"
                raise ApiError(400, message, param="messages", code=_TOO_LONG)
            return await asyncio.to_thread(self.service.text.encode_chat, messages)
        if isinstance(params.prompt, str):
            self._check_length(len(params.prompt), "prompt")
            return await asyncio.to_thread(self.service.text.encode, params.prompt)
        return cast("list[int]", params.prompt)

    def _check_length(self, characters: int, param: str) -> None:
        most = self.service.text.longest * self.model.max_tokens
        if characters > most:
            message = f"the prompt has {characters} characters; at most {most} can fit"
            raise ApiError(400, message, param=param, code=_TOO_LONG)

    async def _streamed(
        self,
        request: Request,
        params: CompletionParams,
        writer: ResponseWriter,
        answer: _DetokenizedStream,
        n_prompt: int,
    ) -> AsyncIterator[bytes]:
        try:
            for event in writer.first_chunk():
                yield event
            async for text in answer.pieces():
                yield writer.chunk(text)
            usage = Usage.of(n_prompt, answer.tokens) if params.with_usage else None
            for event in writer.last_chunk(answer.reason, usage):
                yield event
            request.state.outcome = 200
            self._count_answer(n_prompt + answer.tokens, answer.reason)
        except Exception as error:  # noqa: BLE001 - sent to the client and logged
            failure = self.as_api_error(error, request.state.request_id)
            request.state.outcome = failure.status
            self.service.metrics.errors.labels(failure.code or failure.kind).inc()
            yield _event(failure.response())
        finally:
            request.state.facts["tokens"] = answer.tokens

    def _count_answer(self, tokens: int, reason: str) -> None:
        self.service.metrics.finished(reason)
        self.service.metrics.inputs.inc()
        self.service.metrics.tokens.inc(tokens)


class _DetokenizedStream:
    """Detokenizes a generated sequence."""

    def __init__(self, generation: GeneratedSequence, reader: AnswerReader) -> None:
        self.tokens = 0
        self._generation = generation
        self._reader = reader

    @property
    def reason(self) -> str:
        return "stop" if self._reader.stopped else self._generation.reason or "stop"

    async def pieces(self) -> AsyncIterator[str]:
        """Yield text as tokens arrive; cancel the sequence at a stop string."""
        async for token in self._generation:
            self.tokens += 1
            if text := self._reader.read(token):
                yield text
            if self._reader.stopped:
                self._generation.cancel()
                return
        if rest := self._reader.rest():
            yield rest

    async def whole(self) -> str:
        return "".join([text async for text in self.pieces()])
