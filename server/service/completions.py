"""Serve completions and chats: read requests, run an engine, answer or stream, as OpenAI's API.

Unsupported fields that would change the answer are refused by name; all others are ignored.
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
"""Stops of one request at most, as in OpenAI's API."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who may say a message of a chat: OpenAI's roles; the model's template may take fewer."""
_COMPLETION_TOKENS = 16
"""Tokens of a completion where a request does not say, as in OpenAI's API."""
_NO_TOP_K = -1
"""In vLLM's clients, that all tokens count; 0 is here."""
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
"""Fields that must have one of these values, where they are given."""


class StreamOptions(msgspec.Struct):
    """How a stream ends."""

    include_usage: bool | None = None


class TextPart(msgspec.Struct):
    """A part of a message."""

    type: str
    text: str | None = None

    def said(self) -> str:
        """Its text.

        Raises:
            ApiError: it has none.
        """
        if self.type != "text" or self.text is None:
            message = f"a message has a part of type {self.type!r}; this model takes text alone"
            raise ApiError(400, message, param="messages")
        return self.text


class ChatMessage(msgspec.Struct):
    """A message of a chat."""

    role: str
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        """Role and content, as templates take them.

        Raises:
            ApiError: it has another role, or a part of it is no text.
        """
        if self.role not in ROLES:
            message = f"a message has the role {self.role!r}; it must be one of {ROLES}"
            raise ApiError(400, message, param="messages")
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.said() for part in parts)
        return {"role": self.role, "content": text}


class _Asked(msgspec.Struct):
    """What requests for completions and for chats have in common, as far as its types go."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(_Asked, kw_only=True):
    """The body of a request for a completion."""

    prompt: str | list[str | int]


class ChatRequest(_Asked, kw_only=True):
    """The body of a request for a chat."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None


def _with_plain(kind: type[T]) -> type[T]:
    """``kind``, and with the fields of `PLAIN`, whatever they hold."""
    plain = [(name, Any, None) for name in PLAIN]
    made = msgspec.defstruct(kind.__name__, plain, bases=(kind,), kw_only=True)
    return cast("type[T]", made)


_completion = msgspec.json.Decoder(_with_plain(CompletionRequest))
_chat = msgspec.json.Decoder(_with_plain(ChatRequest))


@dataclass(frozen=True, slots=True)
class CompletionParams:
    """What a request asks for.

    Attributes:
        prompt: a text, token ids, or the messages of a chat.
        is_chat: whether it is a chat.
        max_tokens: of the answer; ``None``: as many as there is room for.
        sampling: how tokens are drawn.
        stops: texts that end the answer.
        stream: whether it is sent as it comes.
        with_usage: whether a stream ends with the numbers of tokens.
    """

    prompt: str | list[int] | list[dict[str, str]]
    is_chat: bool
    max_tokens: int | None
    sampling: Sampling
    stops: tuple[str, ...]
    stream: bool
    with_usage: bool


def read_completion(body: bytes | bytearray, model: ServedModel) -> CompletionParams:
    """What a request for a completion asks for.

    Raises:
        ApiError: what is wrong with it; 400, or 404 for another model.
    """
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
    """What a request for a chat asks for.

    Raises:
        ApiError: what is wrong with it; 400, or 404 for another model.
    """
    request = decode_body(_chat, body, "a request for a chat")
    if not request.messages:
        raise ApiError(400, "messages is an empty list", param="messages")
    messages = [each.plain() for each in request.messages]
    most, older = request.max_completion_tokens, request.max_tokens
    return _params(request, messages, model, max_completion_tokens=most, max_tokens=older)


@dataclass(frozen=True, slots=True)
class ResponseWriter:
    """Writes one answer, whole or in pieces.

    Attributes:
        model: its name.
        is_chat: whether it answers a chat.
        id: the answer's.
        created: when it was begun, in seconds since the epoch.
    """

    model: str
    is_chat: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, reason: str, tokens: tuple[int, int]) -> bytes:
        """The answer's JSON; ``tokens``: of the prompt and of the answer."""
        said = (
            {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        )
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._json(kind, [_choice(said, reason)], usage=_usage(tokens))

    def first_chunk(self) -> list[bytes]:
        """What a stream begins with."""
        first = {"delta": {"role": "assistant", "content": ""}}
        return [self._event([_choice(first, None)])] if self.is_chat else []

    def chunk(self, text: str) -> bytes:
        """More text, in a stream."""
        said = {"delta": {"content": text}} if self.is_chat else {"text": text}
        return self._event([_choice(said, None)])

    def last_chunk(self, reason: str, tokens: tuple[int, int] | None) -> list[bytes]:
        """What a stream ends with; ``tokens``: `whole`'s, if they are wanted."""
        said: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        usage = [] if tokens is None else [self._event([], usage=_usage(tokens))]
        return [self._event([_choice(said, reason)]), *usage, b"data: [DONE]\n\n"]

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
    """What ends a stream that fails."""
    return b"data: " + error.body() + b"\n\n"


def _choice(said: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": 0, **said, "logprobs": None, "finish_reason": reason}


def _usage(tokens: tuple[int, int]) -> dict[str, int]:
    prompt, answer = tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
    }


def _params(request: Any, prompt: Any, model: ServedModel, **most: int | None) -> CompletionParams:
    """The wish; ``most``: tokens of the answer, by the fields that say it; the first one counts."""
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
    """As in JSON, where ``false`` is no 0."""
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
    """OpenAPI 3.1 of a service of completions.

    Args:
        model: what is served.
        with_key: whether requests have to show a key.
    """
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
    said = object_of(role={"const": "assistant"}, content=STRING)
    return document_of(
        "completions",
        {
            "/v1/completions": ("complete", completion, _answers(model, text=STRING)),
            "/v1/chat/completions": ("chat", chat, _answers(model, message=said)),
        },
        model,
        with_key=with_key,
    )


_MOST: Schema = {"type": ["integer", "null"], "minimum": 1}


def _body(model: ServedModel, **asked: Schema) -> Schema:
    stop = {"type": "string", "minLength": 1}
    stops = {"type": "array", "maxItems": MAX_STOPS, "items": stop}
    nothing: Schema = {"type": "null"}
    return {
        "type": "object",
        "required": ["model", *asked],
        "properties": {
            "model": {"enum": [model.name]},
            **asked,
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


def _answers(model: ServedModel, **said: Schema) -> Schema:
    choice = object_of(index={"const": 0}, finish_reason={"enum": ["stop", "length"]}, **said)
    answer = object_of(
        id=STRING,
        object=STRING,
        created=COUNT,
        model={"const": model.name},
        choices={"type": "array", "minItems": 1, "maxItems": 1, "items": choice},
        usage=object_of(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT),
    )
    found = responses(answer, *REASONS)
    streamed: Any = {"text/event-stream": {}}
    found["200"]["content"] |= streamed
    return found


_LOOK_SECONDS = 0.02


class CompletionService(PoolService):
    """Answers prompts of many requests; belongs to one event loop.

    Args:
        text: the model's tokenizer.
        make_pool, limits: see `PoolService`.
    """

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
        """How many requests wait for a slot."""
        return 0 if self._engine is None else self._engine.waiting

    def generate(
        self, prompt: Sequence[int], max_tokens: int | None, sampling: Sampling
    ) -> GeneratedSequence:
        """Begin an answer; see `Engine.submit`.

        Raises:
            NotReadyError: see `check_ready`.
            ValueError: the prompt or ``max_tokens`` makes no sense.
            QueueFullError: too many requests wait.
            CoordinatorError: the workers failed.
        """
        self.check_ready()
        engine = cast("Engine", self._engine)  # there is one once it is ready
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
                await asyncio.sleep(_LOOK_SECONDS)
            await asyncio.to_thread(self._engine.close)


_TOO_LONG = "context_length_exceeded"
"""OpenAI's code of the error."""


class CompletionApp(ServiceApp[CompletionService]):
    """The face of a service of completions."""

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
        asked = "messages" if params.is_chat else "prompt"
        try:
            prompt = await self._tokens(params)
            generation = self.service.generate(prompt, params.max_tokens, params.sampling)
        except PromptTooLongError as error:
            raise ApiError(400, str(error), param=asked, code=_TOO_LONG) from error
        except ValueError as error:
            raise ApiError(400, str(error), param=asked) from error
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
        """The prompt's tokens; the event loop goes on meanwhile.

        Raises:
            ApiError: it is too long to be looked at.
            ValueError: the model's template refuses the chat.
        """
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

    def _check_length(self, characters: int, asked: str) -> None:
        most = self.service.text.longest * self.model.max_tokens
        if characters > most:
            message = f"the prompt has {characters} characters; at most {most} can fit"
            raise ApiError(400, message, param=asked, code=_TOO_LONG)

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
        except Exception as error:  # noqa: BLE001 - told to the client and to the log
            told = self.as_api_error(error, request.state.request_id)
            request.state.outcome = told.status
            self.service.metrics.errors.labels(told.code or told.kind).inc()
            yield error_event(told)
        finally:
            request.state.facts["tokens"] = answer.tokens

    def _count_answer(self, tokens: int) -> None:
        """Count an answer that was given, and the tokens of its prompt and its own."""
        self.service.metrics.inputs.inc()
        self.service.metrics.tokens.inc(tokens)


class _DetokenizedStream:
    """The text of a generation.

    Attributes:
        tokens: how many there were so far.
    """

    def __init__(self, generation: GeneratedSequence, reader: AnswerReader) -> None:
        self.tokens = 0
        self._generation = generation
        self._reader = reader

    @property
    def reason(self) -> str:
        """Why it has ended, in OpenAI's words."""
        return "stop" if self._reader.stopped else self._generation.reason or "stop"

    async def pieces(self) -> AsyncIterator[str]:
        """The text as it comes; the generation is cancelled at a stop."""
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
        """All of the text."""
        return "".join([text async for text in self.pieces()])
