"""The OpenAPI document of the service: what its routes take and answer, for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from ..embedding.openai_api import MAX_INPUTS

if TYPE_CHECKING:
    from ..embedding.openai_api import ServedModel

Schema: TypeAlias = "dict[str, Any]"

_STRING: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_REASONS = {
    400: "The request is wrong; says how.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    429: "Too much waits; try again.",
    500: "The workers failed to compute it.",
    503: "The service starts, stands still, stops, or has failed.",
    504: "It was not answered in time.",
}


def document(model: ServedModel, *, with_key: bool) -> Schema:
    """OpenAPI 3.1.

    Args:
        model: what is served.
        with_key: whether requests have to show a key.
    """
    locked: list[Any] = [{"bearer": []}] if with_key else []
    ask = "application/json"
    name = {"name": "model", "in": "path", "required": True, "schema": {"enum": [model.name]}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "group-coordinator embeddings", "version": "1"},
        "paths": {
            "/": _get("page", _STRING, [], kind="text/html"),
            "/events": _get("events", _STRING, locked, 503, kind="text/event-stream"),
            "/v1/embeddings": {
                "post": {
                    "operationId": "embed",
                    "security": locked,
                    "requestBody": {
                        "required": True,
                        "content": {ask: {"schema": _request(model)}},
                    },
                    "responses": _responses(_answer(model), *_REASONS),
                }
            },
            "/v1/models": _get("models", _models(), locked),
            "/v1/models/{model}": {
                **_get("model", _entry(), locked, 404),
                "parameters": [name],
            },
            "/health": _get("health", _object(status=_STRING), [], failing=_reason("status")),
            "/health/progress": _get(
                "progress", _object(status=_STRING), [], failing=_reason("status")
            ),
            "/ready": _get(
                "ready", _object(ready={"const": True}), [], failing=_reason("ready", "boolean")
            ),
            "/status": _get("status", {"type": "object"}, locked),
            "/metrics": _get("metrics", _STRING, locked, kind="text/plain"),
        },
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _error()},
        },
    }


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
            "input": {"anyOf": [_STRING, {**many, "items": _STRING}, ids, {**many, "items": ids}]},
            "encoding_format": {"enum": ["float", "base64", None]},
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
    entry = _object(
        object={"const": "embedding"}, index=_COUNT, embedding={"anyOf": [floats, _STRING]}
    )
    return _object(
        object={"const": "list"},
        data={"type": "array", "items": entry},
        model={"const": model.name},
        usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
    )


def _models() -> Schema:
    return _object(object={"const": "list"}, data={"type": "array", "items": _entry()})


def _entry() -> Schema:
    return _object(id=_STRING, object={"const": "model"}, created=_COUNT, owned_by=_STRING)


def _error() -> Schema:
    maybe = {"type": ["string", "null"]}
    return _object(error=_object(message=_STRING, type=_STRING, param=maybe, code=maybe))


def _reason(what: str, kind: str = "string") -> Schema:
    return _object(**{what: {"type": kind}, "reason": _STRING})


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


def _get(
    operation: str,
    schema: Schema,
    security: list[Any],
    *statuses: int,
    kind: str = "application/json",
    failing: Schema | None = None,
) -> Schema:
    refused = (401,) if security else ()
    responses = _responses(schema, *refused, *statuses, kind=kind)
    if failing is not None:
        responses["503"] = {"description": "It is not.", "content": {kind: {"schema": failing}}}
    return {"get": {"operationId": operation, "security": security, "responses": responses}}


def _responses(schema: Schema, *statuses: int, kind: str = "application/json") -> Schema:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    found: Schema = {"200": {"description": "As asked.", "content": {kind: {"schema": schema}}}}
    for status in statuses:
        found[str(status)] = {"description": _REASONS[status], "content": error}
    return found
