"""OpenAI's API of embeddings and models: reading a request, answering it, and its errors.

Nothing here is unpickled, and what is read is checked by type before it is used.
"""

from __future__ import annotations

import base64
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

MAX_INPUTS = 2048
"""Inputs of one request at most, as in OpenAI's API."""

Input: TypeAlias = "str | list[int]"


class ApiError(Exception):
    """An answer with an HTTP status that is not 200.

    Attributes:
        status: the HTTP status.
        message: for people.
        kind: OpenAI's type of error.
        param: the field that is wrong, if it is one.
        code: for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code

    def body(self) -> bytes:
        """The answer's JSON."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that requests have to name.

    Attributes:
        name: what requests call it.
        hidden_size: the length of its vectors.
        max_tokens: tokens of an input at most.
        vocabulary: how many token ids there are, from 0.
        created: when serving it began, in seconds since the epoch.
    """

    name: str
    hidden_size: int
    max_tokens: int
    vocabulary: int
    created: int = field(default_factory=lambda: int(time.time()))

    def entry(self) -> dict[str, object]:
        """The model's entry in a list of models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "group-coordinator",
        }

    def check_name(self, asked: str) -> None:
        """Raise unless it is this model that was asked for.

        Raises:
            ApiError: 404.
        """
        if asked != self.name:
            message = f"the model {asked!r} does not exist; this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")


class EmbeddingRequest(msgspec.Struct):
    """The body of a request, as far as its types go.

    ``truncate`` is not OpenAI's: what is too long is cut; ``None``: as the server does by itself.
    """

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    truncate: bool | None = None


_decoder = msgspec.json.Decoder(EmbeddingRequest)
_FIELD = re.compile(r"`(?:\$\.)?(\w+)[^`]*`$")
"""The field that msgspec complains of: its path, or the name of one that is missing."""


def read_request(
    body: bytes | bytearray, model: ServedModel
) -> tuple[EmbeddingRequest, list[Input]]:
    """The request in ``body``, and its inputs as a list.

    Args:
        body: as it came.
        model: what is served.

    Raises:
        ApiError: what is wrong with it; 400, or 404 for another model.
    """
    try:
        request = _decoder.decode(str(body, "utf-8"))  # msgspec checks no text that it skips
    except msgspec.ValidationError as error:
        field = _FIELD.search(str(error))
        message = f"the body is not an embeddings request: {error}"
        raise ApiError(400, message, param=field and field[1]) from error
    except RecursionError as error:
        raise ApiError(400, "the body is JSON that is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    model.check_name(request.model)
    hidden = model.hidden_size
    if request.dimensions not in (None, hidden):
        message = f"dimensions must be {hidden}, all that this model has; got {request.dimensions}"
        raise ApiError(400, message, param="dimensions")
    return request, _inputs(request.input)


def write_response(
    request: EmbeddingRequest, vectors: Sequence[np.ndarray], n_tokens: int
) -> bytes:
    """The answer's JSON.

    Args:
        request: what was asked.
        vectors: float32 [hidden] for each input.
        n_tokens: of all inputs.
    """
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
    """A text, texts, token ids or lists of them, as a list of texts or of token ids."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise ApiError(400, "input is an empty list", param="input")
    kinds = {type(item) for item in given}
    if len(kinds) > 1:
        raise ApiError(400, "input mixes texts, token ids and lists of them", param="input")
    inputs: list[Input] = [given] if int in kinds else given
    if len(inputs) > MAX_INPUTS:
        message = f"input has {len(inputs)} items; at most {MAX_INPUTS} are allowed"
        raise ApiError(400, message, param="input")
    return inputs


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode()
