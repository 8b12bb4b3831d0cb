"""Parse embedding requests and write responses, as in OpenAI's API."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from .api import ApiError, ServedModel, decode_body

if TYPE_CHECKING:
    import numpy as np


MAX_INPUTS = 2048
"""Maximum inputs of a request, as in OpenAI's API."""

FORMATS = ("float", "base64")
"""Encodings of a vector."""

Input: TypeAlias = "str | list[int]"


class EmbeddingRequest(msgspec.Struct):
    """Body of ``POST /v1/embeddings``.

    ``truncate`` extends OpenAI's API: whether to cut long inputs; ``None``: the server's default.
    """

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    truncate: bool | None = None


_decoder = msgspec.json.Decoder(EmbeddingRequest)


def read_request(
    body: bytes | bytearray, model: ServedModel
) -> tuple[EmbeddingRequest, list[Input]]:
    """Return the parsed request and the list of its inputs; raise `ApiError`: 400 or 404."""
    request = decode_body(_decoder, body, "an embeddings request")
    model.check_name(request.model)
    hidden = model.hidden_size
    if request.dimensions not in (None, hidden):
        message = f"dimensions must be {hidden}, all that this model has; got {request.dimensions}"
        raise ApiError(400, message, param="dimensions")
    if request.encoding_format not in (None, *FORMATS):
        message = f"encoding_format must be one of {FORMATS}; got {request.encoding_format!r}"
        raise ApiError(400, message, param="encoding_format")
    return request, _inputs(request.input)


def write_response(
    request: EmbeddingRequest, vectors: Sequence[np.ndarray], n_tokens: int
) -> bytes:
    """Return the response as JSON; ``vectors``: float32 [hidden] per input."""
    as_text = request.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": _base64(vector) if as_text else vector.tolist(),
        }
        for index, vector in enumerate(vectors)
    ]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": data,
            "model": request.model,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }
    )


def _inputs(given: str | list[Any]) -> list[Input]:
    if isinstance(given, str):
        return [given]
    if not given:
        raise ApiError(400, "input is an empty list", param="input")
    kinds = set(map(type, given))
    if len(kinds) > 1:
        raise ApiError(400, "input mixes texts, token ids and lists of them", param="input")
    inputs: list[Input] = [given] if int in kinds else given
    if len(inputs) > MAX_INPUTS:
        message = f"input has {len(inputs)} items; at most {MAX_INPUTS} are allowed"
        raise ApiError(400, message, param="input")
    return inputs


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
