"""OpenAI's API in common: the served model, errors, bodies; and what /status shows of the workers.

Nothing here is unpickled, and what is read is checked by type before it is used.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from shm_broadcast import MemberStatus
from shm_broadcast.inspection.snapshot import condition_of

if TYPE_CHECKING:
    from coordinator.rank_grid import RankGrid


LONGEST_TEXT = 4000
"""Characters of a text that are shown: messages of workers have no limit of their own."""


def workers(grid: RankGrid, statuses: Sequence[MemberStatus]) -> list[dict[str, Any]]:
    """Each worker: its status, its place on each axis, and whether its process is stopped."""
    return [
        {
            **asdict(status),
            "place": grid.coordinates(status.rank),
            "stopped": _is_stopped(status),
        }
        for status in statuses
    ]


def past_failure(failure: tuple[float, BaseException] | None) -> dict[str, object] | None:
    """When something failed last, in seconds since the epoch, and why."""
    return None if failure is None else {"at": failure[0], "text": clipped(failure[1])}


def clipped(text: object) -> str:
    """A text, cut where it is longer than `LONGEST_TEXT`."""
    whole = str(text)
    left = len(whole) - LONGEST_TEXT
    return whole if left <= 0 else f"{whole[:LONGEST_TEXT]} ... and {left} characters more"


def _is_stopped(status: MemberStatus) -> bool:
    here = not status.host and status.state in ("idle", "busy")
    return here and condition_of(status.pid) == "stopped"


T = TypeVar("T")

MAX_PARTS = 1 << 18
"""Texts, arrays and objects that a body may have: each takes memory, and the event loop's time."""
MAX_VALUES = (1 << 20) + MAX_PARTS
"""Values of all kinds, likewise: 512 token ids in each of 2048 inputs, and what is beside them."""
_NO_MARKS = bytes({*range(256)} - {*b'[{",'})
"""All but what parts and values are counted by."""
_FIELD = re.compile(r"(?<!got )`(?:\$\.)?(\w+)[^`]*`$")
"""The field that msgspec complains of: its path, or the name of one that is missing.

A body that is no object has none: its type is what msgspec got.
"""

_CUT_BYTES = 12
_CUT_PAIR = re.compile(rb"\\ud[89ab][0-9a-f]{2}[^\\]{,5}\Z", re.IGNORECASE | re.DOTALL)
"""Half of a surrogate pair where msgspec says only that the body ends too early."""
_HALF_PAIR = "half of a surrogate pair is no character"


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
        """The answer's JSON; of a long message, as of a long path that it names, its beginning."""
        error = {
            "message": clipped(self.message),
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


def too_many_connections() -> ApiError:
    """What a client is told on a connection beyond those that there may be."""
    message = "the server has too many connections"
    return ApiError(503, message, "server_error", code="overloaded")


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


def decode_body(decoder: msgspec.json.Decoder[T], body: bytes | bytearray, what: str) -> T:
    """What a request's body says.

    Args:
        decoder: of the type that it has to be of.
        body: as it came.
        what: it has to be, for people.

    Raises:
        ApiError: 400: it is not JSON, or not of this type; names the field.
    """
    if not body:
        raise ApiError(400, "the body is empty")
    if len(body) > MAX_PARTS:  # a shorter one has fewer
        _check_counts(body)
    try:
        return decoder.decode(str(body, "utf-8"))  # msgspec checks no text that it skips
    except msgspec.ValidationError as error:
        found = _FIELD.search(str(error))
        message = f"the body is not {what}: {error}"
        raise ApiError(400, message, param=found and found[1]) from error
    except RecursionError as error:
        raise ApiError(400, "the body is JSON that is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = _HALF_PAIR if _CUT_PAIR.search(body[-_CUT_BYTES:]) else error
        raise ApiError(400, f"the body is not JSON: {why}") from error


def _check_counts(body: bytes | bytearray) -> None:
    """Refuse a body of more parts or values than may be; those within texts do not count."""
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
