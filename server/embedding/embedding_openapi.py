"""The OpenAPI document of a service of embeddings: what its routes take and answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..web.openapi import COUNT, REASONS, STRING, document_of, object_of, responses
from .embedding_api import FORMATS, MAX_INPUTS

if TYPE_CHECKING:
    from ..web.api import ServedModel
    from ..web.openapi import Schema


def embedding_document(model: ServedModel, *, with_key: bool) -> Schema:
    """OpenAPI 3.1 of a service of embeddings.

    Args:
        model: what is served.
        with_key: whether requests have to show a key.
    """
    asked = {"/v1/embeddings": ("embed", _request(model), responses(_answer(model), *REASONS))}
    return document_of("embeddings", asked, model, with_key=with_key)


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
            "input": {"anyOf": [STRING, {**many, "items": STRING}, ids, {**many, "items": ids}]},
            "encoding_format": {"enum": [*FORMATS, None]},
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
    entry = object_of(
        object={"const": "embedding"}, index=COUNT, embedding={"anyOf": [floats, STRING]}
    )
    return object_of(
        object={"const": "list"},
        data={"type": "array", "items": entry},
        model={"const": model.name},
        usage=object_of(prompt_tokens=COUNT, total_tokens=COUNT),
    )
