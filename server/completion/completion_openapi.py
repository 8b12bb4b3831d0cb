"""The OpenAPI document of a service of completions: what its routes take and answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..web.openapi import COUNT, REASONS, STRING, document_of, object_of, responses
from .completion_api import MAX_STOPS, PLAIN, ROLES

if TYPE_CHECKING:
    from ..web.api import ServedModel
    from ..web.openapi import Schema


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
