"""Serve completions and chats over OpenAI's API, from a pool of decoder workers.

Unsupported fields that would change the answer are rejected by name; others are ignored.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..config import MAX_INPUTS, ServiceLimits
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

    prompt: str | list[str | int | list[int]]


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
        prompts: texts or token ids, one for each answer; or the messages of a chat.
        max_tokens: maximum tokens of the answer; ``None``: up to the context's end.
        stops: strings that end the answer.
        with_usage: whether a stream ends with token counts.
    """

    prompts: Sequence[str | list[int] | list[dict[str, str]]]
    is_chat: bool
    max_tokens: int | None
    sampling: Sampling
    stops: tuple[str, ...]
    stream: bool
    with_usage: bool


def read_completion(body: bytes | bytearray, model: ServedModel) -> CompletionParams:
    """Parse a completion request; raise `ApiError`: 400, or 404 for another model."""
    request = decode_body(_completion, body, "a request for a completion")
    prompts: Any = request.prompt
    kinds = {*map(type, prompts)}
    if kinds <= {int} or isinstance(prompts, str):
        prompts = [prompts]
    elif len(kinds) > 1:
        message = "prompt must be a text, the token ids of one, or several of one kind"
        raise ApiError(400, message, param="prompt")
    if len(prompts) > MAX_INPUTS:
        message = f"prompt has {len(prompts)} prompts; a request may have {MAX_INPUTS}"
        raise ApiError(400, message, param="prompt")
    most = _COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    return _params(request, prompts, model, most)


def read_chat(body: bytes | bytearray, model: ServedModel) -> CompletionParams:
    """Parse a chat request; raise `ApiError`: 400, or 404 for another model."""
    request = decode_body(_chat, body, "a request for a chat")
    messages = [each.plain() for each in request.messages]
    return _params(request, [messages], model, request.max_completion_tokens or request.max_tokens)


@dataclass(frozen=True, slots=True)
class ResponseWriter:
    """Writes one answer, whole or as chunks; ``created`` is in seconds since the epoch."""

    model: str
    is_chat: bool
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[tuple[str, str]], usage: Usage) -> Completion:
        """Return all answers, each a text and a finish reason."""
        choices = [
            CompletionChoice(
                index=index,
                text=UNSET if self.is_chat else text,
                message=ChatAnswer(text, "assistant") if self.is_chat else UNSET,
                finish_reason=reason,
            )
            for index, (text, reason) in enumerate(answers)
        ]
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._completion(kind, choices, usage)

    def first_chunk(self) -> list[bytes]:
        """Return the events that begin a stream."""
        answer = ChatAnswer("", "assistant")
        return [self._event(CompletionChoice(delta=answer))] if self.is_chat else []

    def chunk(self, index: int, text: str) -> bytes:
        """Return an event with more text of an answer."""
        if self.is_chat:
            return self._event(CompletionChoice(index=index, delta=ChatAnswer(text)))
        return self._event(CompletionChoice(index=index, text=text))

    def last_chunk(self, index: int, reason: str) -> bytes:
        """Return the event that ends an answer."""
        if self.is_chat:
            choice = CompletionChoice(index=index, delta=ChatAnswer(), finish_reason=reason)
        else:
            choice = CompletionChoice(index=index, text="", finish_reason=reason)
        return self._event(choice)

    def end(self, usage: Usage | None) -> list[bytes]:
        """Return the events that end a stream; ``usage``: if requested."""
        counts = [] if usage is None else [self._event(usage=usage)]
        return [*counts, b"data: [DONE]\n\n"]

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
    request: Any, prompts: Sequence[Any], model: ServedModel, max_tokens: int | None
) -> CompletionParams:
    model.check_name(request.model)
    for name, values in PLAIN.items():
        if not _is_one_of(values, getattr(request, name)):
            raise ApiError(400, f"{name} is not supported; leave it out", param=name)
    options, stop = request.stream_options, request.stop
    return CompletionParams(
        prompts=prompts,
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
    """Server-sent events of a response; `slots` are freed at the end."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], slots: ExitStack) -> None:
        super().__init__(events, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self._slots = slots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._slots:
            await super().__call__(scope, receive, send)


_TOO_LONG = "context_length_exceeded"
"""OpenAI's code of the error."""


class CompletionApp(ServiceApp[CompletionService]):
    """Routes of a completion service."""

    title = "completions"

    def posts(self) -> list[PostRoute]:
        """See `ServiceApp`."""
        text = {"type": "string", "minLength": 1}
        ids = token_ids(self.model, self.model.max_tokens - 1)
        many = {"type": "array", "minItems": 1, "maxItems": MAX_INPUTS}
        prompt = {"anyOf": [text, ids, {**many, "items": text}, {**many, "items": ids}]}
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
        writer = ResponseWriter(self.model.name, params.is_chat)
        with ExitStack() as slots:
            answers = []
            try:
                for prompt in [await self._tokens(each) for each in params.prompts]:
                    generation = self.service.generate(prompt, params.max_tokens, params.sampling)
                    reader = self.service.text.reader(params.stops)
                    answers.append(_DetokenizedStream(len(prompt), generation, reader))
                    slots.enter_context(generation)
            except PromptTooLongError as error:
                raise ApiError(400, str(error), param=param, code=_TOO_LONG) from error
            except ValueError as error:
                raise ApiError(400, str(error), param=param) from error
            request.state.facts["prompt_tokens"] = sum(each.n_prompt for each in answers)
            if params.stream:
                events = self._streamed(request, writer, answers, params.with_usage)
                return _EventStream(events, slots.pop_all())
            texts = asyncio.gather(*(answer.whole() for answer in answers))
            found = await unless_client_leaves(request, texts)
            reasons = [answer.reason for answer in answers]
            usage = self._count_answers(request, answers)
            return json_answer(writer.whole([*zip(found, reasons, strict=True)], usage))

    async def _tokens(self, prompt: str | list[int] | list[dict[str, str]]) -> list[int]:
        """Tokenize a prompt in a thread; raise `ApiError` if it is too long to tokenize."""
        text = self.service.text
        if isinstance(prompt, str):
            self._check_length(len(prompt), "prompt")
            return await asyncio.to_thread(text.encode, prompt)
        if not prompt or isinstance(prompt[0], int):
            return cast("list[int]", prompt)
        messages = prompt
        self._check_length(
            sum(len(part) for each in messages for part in each.values()), "messages"
        )
        if len(messages) > self.model.max_tokens:
            message = f"the chat has {len(messages)} messages; each takes a token at least"
            raise ApiError(400, message, param="messages", code=_TOO_LONG)
        return await asyncio.to_thread(text.encode_chat, messages)

    def _check_length(self, characters: int, param: str) -> None:
        most = self.service.text.longest * self.model.max_tokens
        if characters > most:
            message = f"the prompt has {characters} characters; at most {most} can fit"
            raise ApiError(400, message, param=param, code=_TOO_LONG)

    async def _streamed(
        self,
        request: Request,
        writer: ResponseWriter,
        answers: Sequence[_DetokenizedStream],
        with_usage: bool,
    ) -> AsyncIterator[bytes]:
        try:
            for event in writer.first_chunk():
                yield event
            async for index, text in _merged(answers):
                if text is None:
                    yield writer.last_chunk(index, answers[index].reason)
                else:
                    yield writer.chunk(index, text)
            usage = self._count_answers(request, answers)
            for event in writer.end(usage if with_usage else None):
                yield event
            request.state.outcome = 200
        except Exception as error:  # noqa: BLE001 - sent to the client and logged
            failure = self.as_api_error(error, request.state.request_id)
            request.state.outcome = failure.status
            self.service.metrics.errors.labels(failure.code or failure.kind).inc()
            yield _event(failure.response())
        finally:
            request.state.facts["tokens"] = sum(each.tokens for each in answers)

    def _count_answers(self, request: Request, answers: Sequence[_DetokenizedStream]) -> Usage:
        prompt = sum(each.n_prompt for each in answers)
        tokens = sum(each.tokens for each in answers)
        request.state.facts["tokens"] = tokens
        for each in answers:
            self.service.metrics.finished(each.reason)
        self.service.metrics.inputs.inc(len(answers))
        self.service.metrics.tokens.inc(prompt + tokens)
        return Usage.of(prompt, tokens)


class _DetokenizedStream:
    """Detokenizes a generated sequence, of a prompt of ``n_prompt`` tokens."""

    def __init__(self, n_prompt: int, generation: GeneratedSequence, reader: AnswerReader) -> None:
        self.n_prompt, self.tokens = n_prompt, 0
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


async def _merged(
    answers: Sequence[_DetokenizedStream],
) -> AsyncIterator[tuple[int, str | None]]:
    """Yield indices and texts of answers as they arrive; ``None`` ends an answer."""
    pieces = [answer.pieces() for answer in answers]
    pending = {asyncio.ensure_future(anext(each, None)): at for at, each in enumerate(pieces)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                index, text = pending.pop(each), each.result()
                if text is not None:
                    pending[asyncio.ensure_future(anext(pieces[index], None))] = index
                yield index, text
    finally:
        for each in pending:
            each.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
