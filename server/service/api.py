"""Share OpenAI's API parts among services: model, errors, request bodies, worker status.

Request bodies are decoded by msgspec and type-checked; nothing is unpickled.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from shm_broadcast import MemberStatus

from ..inspection.snapshot import condition_of

if TYPE_CHECKING:
    from coordinator.rank_grid import RankGrid


LONGEST_TEXT = 4000
"""Maximum characters of a text in a response; messages of workers are unbounded."""


def workers(grid: RankGrid, statuses: Sequence[MemberStatus]) -> list[dict[str, Any]]:
    """Return each worker's status, its grid coordinates and whether it is stopped."""
    return [
        {
            **asdict(status),
            "activity": status.activity,
            "place": grid.coordinates(status.rank),
            "stopped": _is_stopped(status),
        }
        for status in statuses
    ]


def past_failure(failure: tuple[float, BaseException] | None) -> dict[str, object] | None:
    """Return the time (seconds since the epoch) and text of a failure, or ``None``."""
    return None if failure is None else {"at": failure[0], "text": clipped(failure[1])}


def clipped(text: object) -> str:
    """Return ``str(text)``, cut after `LONGEST_TEXT` characters."""
    whole = str(text)
    left = len(whole) - LONGEST_TEXT
    return whole if left <= 0 else f"{whole[:LONGEST_TEXT]} ... and {left} characters more"


def _is_stopped(status: MemberStatus) -> bool:
    is_local = not status.host and status.state in ("idle", "busy")
    return is_local and condition_of(status.pid) == "stopped"


T = TypeVar("T")

MAX_PARTS = 1 << 18
"""Maximum strings, arrays and objects of a body; each costs memory and event-loop time."""
MAX_VALUES = (1 << 20) + MAX_PARTS
"""Maximum values of a body: 512 token ids in each of 2048 inputs, plus `MAX_PARTS`."""
_NO_MARKS = bytes({*range(256)} - {*b'[{",'})
"""All bytes except those that count parts and values."""
_FIELD = re.compile(r"(?<!got )`(?:\$\.)?(\w+)[^`]*`$")
"""Match the field in an error of msgspec: its path, or the name of a missing field.

An error about the body itself ends with the type that msgspec got, and does not match.
"""

_CUT_BYTES = 12
_CUT_PAIR = re.compile(rb"\\ud[89ab][0-9a-f]{2}[^\\]{,5}\Z", re.IGNORECASE | re.DOTALL)
"""Match half of a surrogate pair at the end, which msgspec reports as a truncated body."""
_HALF_PAIR = "half of a surrogate pair is no character"


class ErrorFields(msgspec.Struct):
    """Fields of an error; ``type`` and ``code`` are OpenAI's, ``param`` is the invalid field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    """Body of an error response."""

    error: ErrorFields


class ModelEntry(msgspec.Struct, tag_field="object", tag="model"):
    """Model in ``/v1/models``; ``created`` is in seconds since the epoch."""

    id: str
    created: int
    owned_by: str = "group-coordinator"


class ModelList(msgspec.Struct, tag_field="object", tag="list"):
    """Body of ``/v1/models``."""

    data: list[ModelEntry]


class Health(msgspec.Struct, omit_defaults=True):
    """Body of ``/health``; ``reason`` says why ``status`` is not ``"ok"``."""

    status: str
    reason: str = ""


class Readiness(msgspec.Struct, omit_defaults=True):
    """Body of ``/ready``."""

    ready: bool
    reason: str = ""


class ApiError(Exception):
    """Error response: an HTTP status other than 200 and OpenAI's error body.

    ``kind`` and ``code`` are OpenAI's type and code, ``param`` is the invalid field, if any.
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

    def response(self) -> ErrorResponse:
        """Return the body; a long message is cut."""
        fields = ErrorFields(clipped(self.message), self.kind, self.param, self.code)
        return ErrorResponse(fields)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Model that requests must name; ``created`` is in seconds since the epoch."""

    name: str
    hidden_size: int
    max_tokens: int
    vocabulary: int
    created: int = field(default_factory=lambda: int(time.time()))

    def entry(self) -> ModelEntry:
        """Return the model's entry in ``/v1/models``."""
        return ModelEntry(self.name, self.created)

    def check_name(self, asked: str) -> None:
        """Raise `ApiError` (404) unless ``asked`` is this model's name."""
        if asked != self.name:
            message = f"the model {asked!r} does not exist; this server has {self.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes | bytearray, what: str) -> T:
    """Decode and type-check a request's JSON body; ``what`` names the type in errors.

    Raises:
        ApiError: 400; the body is not JSON or of another type; names the field.
    """
    if not body:
        raise ApiError(400, "the body is empty")
    if len(body) > MAX_PARTS:  # a shorter body cannot exceed the limits
        _check_counts(body)
    try:
        return decoder.decode(str(body, "utf-8"))  # msgspec skips unknown fields unchecked
    except msgspec.ValidationError as error:
        path = _FIELD.search(str(error))
        message = f"the body is not {what}: {error}"
        raise ApiError(400, message, param=path and path[1]) from error
    except RecursionError as error:
        raise ApiError(400, "the body is JSON that is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = _HALF_PAIR if _CUT_PAIR.search(body[-_CUT_BYTES:]) else error
        raise ApiError(400, f"the body is not JSON: {reason}") from error


def _check_counts(body: bytes | bytearray) -> None:
    """Raise `ApiError` for too many parts or values; bytes within strings do not count."""
    marks = body.translate(None, _NO_MARKS)
    if _n_parts(marks) <= MAX_PARTS and _n_values(marks) <= MAX_VALUES:
        return
    if b"\\" in body:
        marks = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NO_MARKS)
    n_texts = marks.count(b'"') // 2
    outside = b"" if n_texts > MAX_PARTS else b"".join(marks.split(b'"')[::2])
    if n_texts + _n_parts(outside) > MAX_PARTS:
        raise ApiError(400, f"the body has more than {MAX_PARTS} texts, arrays and objects")
    if _n_values(outside) > MAX_VALUES:
        raise ApiError(400, f"the body has more than {MAX_VALUES} values")


def _n_parts(marks: bytes | bytearray) -> int:
    return marks.count(b"[") + marks.count(b"{") + marks.count(b'"') // 2


def _n_values(marks: bytes | bytearray) -> int:
    return marks.count(b",") + 1
