"""Serve completions and chats over OpenAI's API, from a pool of decoder workers.

Unsupported fields that would change the answer are rejected by name; others are ignored.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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
from .face import ServiceApp, json_answer, unless_client_leaves
from .openapi import COUNT, REASONS, STRING, Schema, document_of, object_of, responses
from .page import EventStream
from .pool_service import InstrumentedPool, PoolService

T = TypeVar("T", bound=msgspec.Struct)

MAX_STOPS = 4
"""Maximum stop strings of a request, as in OpenAI's API."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of a message, as in OpenAI's API; the model's chat template may allow fewer."""
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


class TextPart(msgspec.Struct):
    """Text part of a message."""

    type: str
    text: str | None = None

    def said(self) -> str:
        """Return the text; raise `ApiError` (400) for a part of another type."""
        if self.type != "text" or self.text is None:
            message = f"a message has a part of type {self.type!r}; this model takes text alone"
            raise ApiError(400, message, param="messages")
        return self.text


class ChatMessage(msgspec.Struct):
    """Message of a chat."""

    role: str
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        """Return role and content; raise `ApiError` (400) for an unknown role or part."""
        if self.role not in ROLES:
            message = f"a message has the role {self.role!r}; it must be one of {ROLES}"
            raise ApiError(400, message, param="messages")
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.said() for part in parts)
        return {"role": self.role, "content": text}


class _RequestFields(msgspec.Struct):
    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(_RequestFields, kw_only=True):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[str | int]


class ChatRequest(_RequestFields, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None


def _with_plain(kind: type[T]) -> type[T]:
    plain = [(name, Any, None) for name in PLAIN]
    subclass = msgspec.defstruct(kind.__name__, plain, bases=(kind,), kw_only=True)
    return cast("type[T]", subclass)


_completion = msgspec.json.Decoder(_with_plain(CompletionRequest))
_chat = msgspec.json.Decoder(_with_plain(ChatRequest))


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
    return _params(request, prompt, model, max_tokens=most)


def read_chat(body: bytes | bytearray, model: ServedModel) -> CompletionParams:
    """Parse a chat request; raise `ApiError`: 400, or 404 for another model."""
    request = decode_body(_chat, body, "a request for a chat")
    if not request.messages:
        raise ApiError(400, "messages is an empty list", param="messages")
    messages = [each.plain() for each in request.messages]
    most, older = request.max_completion_tokens, request.max_tokens
    return _params(request, messages, model, max_completion_tokens=most, max_tokens=older)


@dataclass(frozen=True, slots=True)
class ResponseWriter:
    """Writes one answer, whole or as chunks; ``created`` is in seconds since the epoch."""

    model: str
    is_chat: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, reason: str, tokens: tuple[int, int]) -> bytes:
        """Return the answer as JSON; ``tokens``: counts of prompt and answer."""
        content = (
            {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        )
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._json(kind, [_choice(content, reason)], usage=_usage(tokens))

    def first_chunk(self) -> list[bytes]:
        """Return the events that begin a stream."""
        first = {"delta": {"role": "assistant", "content": ""}}
        return [self._event([_choice(first, None)])] if self.is_chat else []

    def chunk(self, text: str) -> bytes:
        """Return an event with more text."""
        content = {"delta": {"content": text}} if self.is_chat else {"text": text}
        return self._event([_choice(content, None)])

    def last_chunk(self, reason: str, tokens: tuple[int, int] | None) -> list[bytes]:
        """Return the events that end a stream; ``tokens``: as for `whole`, if requested."""
        content: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        usage = [] if tokens is None else [self._event([], usage=_usage(tokens))]
        return [self._event([_choice(content, reason)]), *usage, b"data: [DONE]\n\n"]

    def _event(self, choices: list[Any], **more: object) -> bytes:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return b"data: " + self._json(kind, choices, **more) + b"\n\n"

    def _json(self, kind: str, choices: list[Any], **more: object) -> bytes:
        return msgspec.json.encode(
            {
                "id": ("chatcmpl-" if self.is_chat else "cmpl-") + self.id,
                "object": kind,
                "created": self.created,
                "model": self.model,
                "choices": choices,
                **more,
            }
        )


def error_event(error: ApiError) -> bytes:
    """Return the event that ends a failed stream."""
    return b"data: " + error.body() + b"\n\n"


def _choice(content: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": 0, **content, "logprobs": None, "finish_reason": reason}


def _usage(tokens: tuple[int, int]) -> dict[str, int]:
    prompt, answer = tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
    }


def _params(request: Any, prompt: Any, model: ServedModel, **most: int | None) -> CompletionParams:
    """Build the parameters; ``most``: token limits by field name, the first given one counts."""
    model.check_name(request.model)
    for name, values in PLAIN.items():
        if not _is_one_of(values, getattr(request, name)):
            raise ApiError(400, f"{name} is not supported; leave it out", param=name)
    given = {name: count for name, count in most.items() if count is not None}
    for name, count in given.items():
        if count < 1:
            raise ApiError(400, f"{name} must be 1 or more; got {count}", param=name)
    options = request.stream_options
    return CompletionParams(
        prompt=prompt,
        is_chat=isinstance(request, ChatRequest),
        max_tokens=next(iter(given.values()), None),
        sampling=_sampling(request),
        stops=_stops(request.stop),
        stream=bool(request.stream),
        with_usage=bool(options and options.include_usage),
    )


def _is_one_of(values: Sequence[object], given: object) -> bool:
    """Compare as JSON does: ``false`` is not 0."""
    return any(
        given == value and isinstance(given, bool) == isinstance(value, bool) for value in values
    )


def _sampling(request: Any) -> Sampling:
    try:
        return Sampling(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=0 if request.top_k in (None, _NO_TOP_K) else request.top_k,
            seed=request.seed,
        )
    except ValueError as error:
        raise ApiError(400, str(error), param=str(error).partition(" ")[0]) from error


def _stops(given: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > MAX_STOPS:
        message = f"stop has {len(stops)} items; at most {MAX_STOPS} are allowed"
        raise ApiError(400, message, param="stop")
    if "" in stops:
        raise ApiError(400, "stop has an empty text", param="stop")
    return stops


def completion_document(model: ServedModel, *, with_key: bool) -> Schema:
    """Return the service's OpenAPI 3.1 document; ``with_key``: requests need an API key."""
    ids = {
        "type": "array",
        "minItems": 1,
        "maxItems": model.max_tokens - 1,
        "items": {"type": "integer", "minimum": 0, "maximum": model.vocabulary - 1},
    }
    parts = {"type": "array", "items": object_of(type={"const": "text"}, text=STRING)}
    message = object_of(role={"enum": list(ROLES)}, content={"anyOf": [STRING, parts]})
    messages = {"type": "array", "minItems": 1, "items": message}
    text = {"type": "string", "minLength": 1}
    completion = _body(model, prompt={"anyOf": [text, ids]})
    chat = _body(model, messages=messages)
    chat["properties"]["max_completion_tokens"] = _MOST
    reply = object_of(role={"const": "assistant"}, content=STRING)
    return document_of(
        "completions",
        {
            "/v1/completions": ("complete", completion, _answers(model, text=STRING)),
            "/v1/chat/completions": ("chat", chat, _answers(model, message=reply)),
        },
        model,
        with_key=with_key,
    )


_MOST: Schema = {"type": ["integer", "null"], "minimum": 1}


def _body(model: ServedModel, **required: Schema) -> Schema:
    stop = {"type": "string", "minLength": 1}
    stops = {"type": "array", "maxItems": MAX_STOPS, "items": stop}
    nothing: Schema = {"type": "null"}
    return {
        "type": "object",
        "required": ["model", *required],
        "properties": {
            "model": {"enum": [model.name]},
            **required,
            "max_tokens": _MOST,
            "temperature": {"type": ["number", "null"], "minimum": 0},
            "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
            "top_k": {"type": ["integer", "null"], "minimum": -1},
            "seed": {"type": ["integer", "null"]},
            "stop": {"anyOf": [stop, stops, nothing]},
            "stream": {
                "type": ["boolean", "null"],
                "description": "Answer with server-sent events, as in OpenAI's API.",
            },
            "stream_options": {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {"include_usage": {"type": ["boolean", "null"]}},
                    },
                    nothing,
                ]
            },
            **{name: {"enum": list(values)} for name, values in PLAIN.items()},
        },
    }


def _answers(model: ServedModel, **content: Schema) -> Schema:
    choice = object_of(index={"const": 0}, finish_reason={"enum": ["stop", "length"]}, **content)
    answer = object_of(
        id=STRING,
        object=STRING,
        created=COUNT,
        model={"const": model.name},
        choices={"type": "array", "minItems": 1, "maxItems": 1, "items": choice},
        usage=object_of(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT),
    )
    documented = responses(answer, *REASONS)
    streamed: Any = {"text/event-stream": {}}
    documented["200"]["content"] |= streamed
    return documented


_POLL_SECONDS = 0.02


class CompletionService(PoolService):
    """Completes prompts with an engine over the pool; belongs to one event loop."""

    def __init__(
        self,
        text: DecoderText,
        make_pool: Callable[[], WorkerPool],
        limits: ServiceLimits,
    ) -> None:
        super().__init__(make_pool, limits, "completion")
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
        return engine.submit(prompt, max_tokens, sampling, timeout=self._limits.request_timeout)

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


_TOO_LONG = "context_length_exceeded"
"""OpenAI's code of the error."""


class CompletionApp(ServiceApp[CompletionService]):
    """Routes of a completion service."""

    def model_routes(self) -> list[Route]:
        """See `ServiceApp`."""
        return [
            Route("/v1/completions", self.answering(self._complete), methods=["POST"]),
            Route("/v1/chat/completions", self.answering(self._chat), methods=["POST"]),
        ]

    def openapi(self, *, with_key: bool) -> Schema:
        """See `ServiceApp`."""
        return completion_document(self.model, with_key=with_key)

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
            return EventStream(events, generation)
        with generation:
            text = await unless_client_leaves(request, answer.whole())
        request.state.facts["tokens"] = answer.tokens
        self._count_answer(len(prompt) + answer.tokens)
        return json_answer(writer.whole(text, answer.reason, (len(prompt), answer.tokens)))

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
            usage = (n_prompt, answer.tokens) if params.with_usage else None
            for event in writer.last_chunk(answer.reason, usage):
                yield event
            request.state.outcome = 200
            self._count_answer(n_prompt + answer.tokens)
        except Exception as error:  # noqa: BLE001 - sent to the client and logged
            failure = self.as_api_error(error, request.state.request_id)
            request.state.outcome = failure.status
            self.service.metrics.errors.labels(failure.code or failure.kind).inc()
            yield error_event(failure)
        finally:
            request.state.facts["tokens"] = answer.tokens

    def _count_answer(self, tokens: int) -> None:
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
