"""Build the OpenAPI document of a service from the types of its requests and responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .api import ErrorResponse, Health, ModelEntry, ModelList, Readiness, ServedModel

Schema: TypeAlias = "dict[str, Any]"

_JSON = "application/json"
_ERRORS = {
    400: "The request is invalid; the message has the reason.",
    401: "The API key is missing or wrong.",
    404: "The model does not exist.",
    413: "The body is too large.",
    415: "The body is compressed.",
    429: "The queue is full; try again.",
    500: "The workers failed to compute it.",
    503: "The service is starting, restarting, stalled, stopping or failed.",
    504: "The request timed out.",
}


@dataclass(frozen=True, slots=True)
class PostRoute:
    """One route to the model: its path, id, handler and types.

    Attributes:
        limits: schemas of fields of the request that depend on the model.
        streams: whether the response may be server-sent events.
    """

    path: str
    name: str
    handler: Callable[[Request], Awaitable[Response]]
    request: type[msgspec.Struct]
    response: type[msgspec.Struct]
    limits: Schema
    streams: bool = False


def document_of(
    title: str, posts: Sequence[PostRoute], model: ServedModel, *, with_key: bool
) -> Schema:
    """Return the OpenAPI 3.1 document of a service; ``with_key``: requests need an API key."""
    types = [ErrorResponse, ModelList, ModelEntry, Health, Readiness]
    types += [each for post in posts for each in (post.request, post.response)]
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for post in posts:
        limits = {"model": {"const": model.name}, **post.limits}
        schemas[post.request.__name__]["properties"] |= limits
    locked: list[Schema] = [{"bearer": []}] if with_key else []
    refused = (401,) if with_key else ()

    def get(name: str, content: Schema, errors: tuple[int, ...] = refused, **more: Any) -> Schema:
        security = locked if errors else []
        responses = {**_responses(content, errors), **more}
        return {"get": {"operationId": name, "security": security, "responses": responses}}

    def probe(name: str, answer: type[msgspec.Struct]) -> Schema:
        failed = {"description": "The check failed.", "content": _json(answer)}
        return get(name, _json(answer), (), **{"503": failed})

    one = {"name": "model", "in": "path", "required": True, "schema": {"const": model.name}}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"group-coordinator {title}", "version": "1"},
        "paths": {
            "/": get("page", _text("text/html"), ()),
            **{
                post.path: {
                    "post": {
                        "operationId": post.name,
                        "security": locked,
                        "requestBody": {"required": True, "content": _json(post.request)},
                        "responses": _responses(_answers(post), _ERRORS),
                    }
                }
                for post in posts
            },
            "/v1/models": get("models", _json(ModelList)),
            "/v1/models/{model}": {
                **get("model", _json(ModelEntry), (*refused, 404)),
                "parameters": [one],
            },
            "/health": probe("health", Health),
            "/health/progress": probe("progress", Health),
            "/ready": probe("ready", Readiness),
            "/status": get("status", {_JSON: {"schema": {"type": "object"}}}),
            "/metrics": get("metrics", _text("text/plain")),
        },
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas,
        },
    }


def _json(kind: type[msgspec.Struct]) -> Schema:
    return {_JSON: {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}


def _answers(post: PostRoute) -> Schema:
    streams: Schema = {"text/event-stream": {}} if post.streams else {}
    return {**_json(post.response), **streams}


def _text(kind: str) -> Schema:
    return {kind: {"schema": {"type": "string"}}}


def _responses(content: Schema, errors: Iterable[int]) -> Schema:
    return {
        "200": {"description": "Success.", "content": content},
        **{
            str(status): {"description": _ERRORS[status], "content": _json(ErrorResponse)}
            for status in errors
        },
    }


def token_ids(model: ServedModel, most: int) -> Schema:
    """Return the schema of 1 to ``most`` token ids."""
    ids = {"type": "integer", "minimum": 0, "maximum": model.vocabulary - 1}
    return {"type": "array", "minItems": 1, "maxItems": most, "items": ids}
