"""OpenAI's API of completions and chats: reading a request, and writing its answer.

Unsupported fields that would change the answer are refused by name; all others are ignored.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from ..web.api import ApiError, decode_body
from ..workers.decoder import Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..web.api import ServedModel

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
class Wish:
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


def read_completion(body: bytes | bytearray, model: ServedModel) -> Wish:
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
    return _wish(request, prompt, model, max_tokens=most)


def read_chat(body: bytes | bytearray, model: ServedModel) -> Wish:
    """What a request for a chat asks for.

    Raises:
        ApiError: what is wrong with it; 400, or 404 for another model.
    """
    request = decode_body(_chat, body, "a request for a chat")
    if not request.messages:
        raise ApiError(400, "messages is an empty list", param="messages")
    messages = [each.plain() for each in request.messages]
    most, older = request.max_completion_tokens, request.max_tokens
    return _wish(request, messages, model, max_completion_tokens=most, max_tokens=older)


@dataclass(frozen=True, slots=True)
class Writer:
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

    def opening(self) -> list[bytes]:
        """What a stream begins with."""
        first = {"delta": {"role": "assistant", "content": ""}}
        return [self._event([_choice(first, None)])] if self.is_chat else []

    def piece(self, text: str) -> bytes:
        """More text, in a stream."""
        said = {"delta": {"content": text}} if self.is_chat else {"text": text}
        return self._event([_choice(said, None)])

    def closing(self, reason: str, tokens: tuple[int, int] | None) -> list[bytes]:
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


def _wish(request: Any, prompt: Any, model: ServedModel, **most: int | None) -> Wish:
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
    return Wish(
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
