"""Build the OpenAPI document of a service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from .api import ServedModel


Schema: TypeAlias = "dict[str, Any]"

STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
REASONS = {
    400: "The request is invalid; the message has the reason.",
    401: "The API key is missing or wrong.",
    404: "The model does not exist.",
    408: "The request did not arrive in time.",
    413: "The body is too large.",
    415: "The body is compressed.",
    421: "There is no API key, and the request names another host.",
    429: "The queue is full; try again.",
    500: "The workers failed to compute it.",
    503: "The service is starting, restarting, stalled, stopping or failed.",
    504: "The request timed out.",
}


def document_of(
    what: str,
    asked: Mapping[str, tuple[str, Schema, Schema]],
    model: ServedModel,
    *,
    with_key: bool,
) -> Schema:
    """Return the OpenAPI 3.1 document of a service; ``what`` names its kind.

    ``asked`` has operation id, body and responses of each route to the model, by path.
    """
    locked: list[Any] = [{"bearer": []}] if with_key else []
    name = {"name": "model", "in": "path", "required": True, "schema": {"enum": [model.name]}}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"group-coordinator {what}", "version": "1"},
        "paths": {
            "/": _get("page", STRING, [], kind="text/html"),
            "/events": _get("events", STRING, locked, 503, kind="text/event-stream"),
            **{
                path: {
                    "post": {
                        "operationId": operation,
                        "security": locked,
                        "requestBody": {
                            "required": True,
                            "content": {"application/json": {"schema": body}},
                        },
                        "responses": answers,
                    }
                }
                for path, (operation, body, answers) in asked.items()
            },
            "/v1/models": _get("models", _models(), locked),
            "/v1/models/{model}": {
                **_get("model", _entry(), locked, 404),
                "parameters": [name],
            },
            "/health": _get("health", object_of(status=STRING), [], failing=_reason("status")),
            "/health/progress": _get(
                "progress", object_of(status=STRING), [], failing=_reason("status")
            ),
            "/ready": _get(
                "ready", object_of(ready={"const": True}), [], failing=_reason("ready", "boolean")
            ),
            "/status": _get("status", {"type": "object"}, locked),
            "/metrics": _get("metrics", STRING, locked, kind="text/plain"),
        },
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Error": _error()},
        },
    }


def _models() -> Schema:
    return object_of(object={"const": "list"}, data={"type": "array", "items": _entry()})


def _entry() -> Schema:
    return object_of(id=STRING, object={"const": "model"}, created=COUNT, owned_by=STRING)


def _error() -> Schema:
    maybe = {"type": ["string", "null"]}
    return object_of(error=object_of(message=STRING, type=STRING, param=maybe, code=maybe))


def _reason(what: str, kind: str = "string") -> Schema:
    return object_of(**{what: {"type": kind}, "reason": STRING})


def object_of(**properties: Schema) -> Schema:
    """Return the schema of an object that requires all ``properties``."""
    return {"type": "object", "required": list(properties), "properties": properties}


def _get(
    operation: str,
    schema: Schema,
    security: list[Any],
    *statuses: int,
    kind: str = "application/json",
    failing: Schema | None = None,
) -> Schema:
    refused = (401,) if security else (421,) if failing is None else ()
    documented = responses(schema, *refused, *statuses, kind=kind)
    if failing is not None:
        documented["503"] = {
            "description": "The check failed.",
            "content": {kind: {"schema": failing}},
        }
    return {"get": {"operationId": operation, "security": security, "responses": documented}}


def responses(schema: Schema, *statuses: int, kind: str = "application/json") -> Schema:
    """Return responses: 200 with ``schema``, and errors with ``statuses``."""
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    documented: Schema = {"200": {"description": "Success.", "content": {kind: {"schema": schema}}}}
    for status in statuses:
        documented[str(status)] = {"description": REASONS[status], "content": error}
    return documented
