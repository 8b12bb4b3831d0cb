"""A tree of tensors and values as a tensor dict, and back: pure functions.

    "way"     which way the message goes: "next" or "previous"
    "tree"    the nesting, as plain data; where named tuples or keys are not plain, itself
    "0" …     the leaves, in order

or, where it cannot be sent, "way" and

    "refused"   why

The header of the dict therefore says everything that a receiver has to know: the nesting, and
shape, dtype, device and requires_grad of every tensor.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from coordinator.messages.plain import decode_plain, encode_plain
from coordinator.messages.wire import why_refused
from coordinator.tree import Node, flatten, places, unflatten
from shm_broadcast import MessageDecodeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from coordinator.messages.tensor_dict import Header
    from coordinator.tree import Structure
    from shm_broadcast import MessageRefusedError

NEXT, PREV = "next", "previous"
"""Which way a message goes: to the next stage (activations) or to the previous one (gradients)."""

WAY = "way"
"""The key at which a message says that."""


def to_dict(tree: Any, way: str) -> dict[str, Any]:
    """The tensor dict of a tree."""
    leaves, structure = flatten(tree)
    numbered = {str(number): leaf for number, leaf in enumerate(leaves)}
    return {WAY: way, "tree": _describe(structure), **numbered}


def refused_tree(error: Exception, way: str) -> dict[str, Any]:
    """The tensor dict in the place of a tree that cannot be sent for ``error``."""
    return {WAY: way, "refused": why_refused(error)}


def by_place(tree: Any) -> dict[str, Any]:
    """The leaves of a tree, by their places in it."""
    leaves, structure = flatten(tree)
    return dict(zip(places(structure, "tree"), leaves, strict=True))


def from_dict(values: dict[str, Any], refused: Callable[[str], MessageRefusedError]) -> Any:
    """The tree of a tensor dict; ``refused`` makes the error of one in the place of a tree.

    Raises:
        MessageRefusedError: its sender could not send it.
        MessageDecodeError: it cannot be restored here.
    """
    if "refused" in values:
        raise refused(values["refused"])
    leaves = [values[str(number)] for number in range(len(values) - 2)]
    return unflatten(_restore(values["tree"]), leaves)


def way_of(header: Header) -> str:
    """Which way the message of a header goes.

    Raises:
        MessageDecodeError: a `Stage` did not send it.
    """
    way = header.scalars.get(WAY)
    if way not in (NEXT, PREV):
        raise MessageDecodeError("a message arrived that no pipeline stage sent")
    return str(way)


def _describe(structure: Structure) -> bytes | Structure:
    return _remembered(structure) if _has_text_keys(structure) else _encode(structure)


def _has_text_keys(structure: Structure) -> bool:
    """Whether equal structures are the same: other keys may be equal and differ, as 1 and True."""
    return structure is None or (
        _TEXT.issuperset(map(type, structure.keys)) and all(map(_has_text_keys, structure.children))
    )


_TEXT = frozenset({str})


def _encode(structure: Structure) -> bytes | Structure:
    try:
        return encode_plain(_to_plain(structure))
    except TypeError:
        return structure


_remembered = lru_cache(maxsize=256)(_encode)


def _restore(described: bytes | Structure) -> Structure:
    if isinstance(described, bytes):
        return _decode(described)
    if described is None or isinstance(described, Node):
        return described
    raise MessageDecodeError(f"the nesting of a message is a {type(described).__name__}")


@lru_cache(maxsize=256)
def _decode(data: bytes) -> Structure:
    try:
        return _from_plain(decode_plain(data))
    except (TypeError, ValueError, KeyError) as error:
        raise MessageDecodeError(f"cannot restore the nesting of a message: {error}") from error


_KINDS: dict[str, type] = {"dict": dict, "list": list, "tuple": tuple}


def _to_plain(structure: Structure) -> Any:
    if structure is None:
        return None
    if structure.kind not in _KINDS.values():
        raise TypeError(f"a {structure.kind.__name__}")
    children = [_to_plain(child) for child in structure.children]
    return structure.kind.__name__, structure.keys, children


def _from_plain(value: Any) -> Structure:
    if value is None:
        return None
    kind, keys, children = value
    return Node(_KINDS[kind], tuple(keys), tuple(_from_plain(child) for child in children))
