"""Read the JSON files of a model folder, and divide layers and heads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

    T = TypeVar("T")

PositiveInt = Annotated[int, msgspec.Meta(gt=0)]


def read_description(path: Path, kind: type[T], error: type[ValueError]) -> T:
    """Decode a JSON file as ``kind``; raise ``error`` with file and reason on failure."""
    try:
        return msgspec.convert(json.loads(path.read_bytes()), kind)
    except FileNotFoundError as failed:
        raise error(f"{path}: missing") from failed
    except OSError as failed:
        raise error(f"{path}: {failed.strerror}") from failed
    except (ValueError, msgspec.MsgspecError) as failed:
        raise error(f"{path}: {failed}") from failed


def share(total: int, part: int, parts: int) -> range:
    """Return the consecutive items of one of ``parts``; earlier parts have the remainder.

    Items are layers of pipeline stages, or heads of ranks.
    """
    each, more = divmod(total, parts)
    start = part * each + min(part, more)
    return range(start, start + each + (part < more))


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """Attention heads sharded over ranks: whole key heads, each with its query heads.

    Attributes:
        queries: query heads of each rank.
        keys: key-value heads of each rank.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @classmethod
    def over(cls, queries: int, keys: int, ranks: int) -> HeadSplit:
        """Shard the heads; raise `ValueError` if a rank gets none, or ``keys`` does not divide
        ``queries``.
        """
        if queries % keys:
            raise ValueError(f"{queries} query heads do not share {keys} key-value heads evenly")
        if not 1 <= ranks <= keys:
            raise ValueError(f"tp must be 1 to {keys}, the model's key-value heads; got {ranks}")
        each = tuple(len(share(keys, rank, ranks)) for rank in range(ranks))
        return cls(tuple(count * (queries // keys) for count in each), each)

    def query_sizes(self, head_size: int) -> tuple[int, ...]:
        """Return the outputs of the query projection on each rank."""
        return tuple(count * head_size for count in self.queries)

    def key_sizes(self, head_size: int) -> tuple[int, ...]:
        """Return the outputs of the key, or the value, projection on each rank."""
        return tuple(count * head_size for count in self.keys)
