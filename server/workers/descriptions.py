"""Reads the JSON files that describe a model in its folder."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

    T = TypeVar("T")

PositiveInt = Annotated[int, msgspec.Meta(gt=0)]


def read_description(path: Path, kind: type[T], error: type[ValueError]) -> T:
    """A file's content as ``kind``.

    Raises:
        What ``error`` is: the file cannot be read, or holds something else; names it and says why.
    """
    try:
        return msgspec.convert(json.loads(path.read_bytes()), kind)
    except FileNotFoundError as failed:
        raise error(f"{path}: missing") from failed
    except OSError as failed:
        raise error(f"{path}: {failed.strerror}") from failed
    except (ValueError, msgspec.MsgspecError) as failed:
        raise error(f"{path}: {failed}") from failed
