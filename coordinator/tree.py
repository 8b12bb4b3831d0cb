"""Convert nested dicts, lists and tuples to leaves and a description, or a tensor dict, and back.

The tensor dict of a tree:

    "tree"    the nesting, as plain data; itself if named tuples or keys are not plain
    "0" …     the leaves, in order
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from coordinator.messages.wire import decode_plain, encode_plain
from shm_broadcast import MessageDecodeError


@dataclass(frozen=True, slots=True)
class Node:
    """A container in a tree: picklable, hashable, equal to all containers of the same nesting.

    Attributes:
        kind: dict, list, tuple, or a named tuple's class.
        keys: a dict's keys, in its order; otherwise empty.
        children: the nesting of each item, in order; None: a leaf.
    """

    kind: type
    keys: tuple[Hashable, ...]
    children: tuple[Node | None, ...]


Structure = Node | None
"""The nesting of a tree; None: the tree is a single leaf."""


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of a tree, in order, and its nesting.

    Exactly dict, list, tuple and named tuples are containers; None and instances of subclasses are
    leaves.
    """
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves)


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """Return the tree with this nesting and these leaves."""
    return _unflatten(structure, iter(leaves))


def places(structure: Structure, root: str) -> Iterator[str]:
    """Yield each leaf's place, in order, as a Python expression: ``root['hidden'][0]``."""
    if structure is None:
        yield root
        return
    keys = structure.keys if structure.kind is dict else range(len(structure.children))
    for key, child in zip(keys, structure.children, strict=True):
        yield from places(child, f"{root}[{key!r}]")


def to_dict(tree: Any) -> dict[str, Any]:
    """Return the tensor dict of a tree."""
    leaves, structure = flatten(tree)
    numbered = {str(number): leaf for number, leaf in enumerate(leaves)}
    return {"tree": _describe(structure), **numbered}


def by_place(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree, by their places in it."""
    leaves, structure = flatten(tree)
    return dict(zip(places(structure, "tree"), leaves, strict=True))


def from_dict(values: dict[str, Any]) -> Any:
    """Return the tree of a tensor dict, or raise MessageDecodeError."""
    leaves = [values[str(number)] for number in range(len(values) - 1)]
    return unflatten(_restore(values["tree"]), leaves)


def _flatten(tree: Any, leaves: list[Any]) -> Structure:
    kind = type(tree)
    if kind is dict:
        return Node(kind, tuple(tree), tuple(_flatten(each, leaves) for each in tree.values()))
    if kind in (list, tuple) or (isinstance(tree, tuple) and hasattr(kind, "_fields")):
        return Node(kind, (), tuple(_flatten(each, leaves) for each in tree))
    leaves.append(tree)
    return None


def _unflatten(structure: Structure, leaves: Iterator[Any]) -> Any:
    if structure is None:
        return next(leaves)
    children = [_unflatten(child, leaves) for child in structure.children]
    if structure.kind is dict:
        return dict(zip(structure.keys, children, strict=True))
    if structure.kind in (list, tuple):
        return structure.kind(children)
    return structure.kind(*children)


def _describe(structure: Structure) -> bytes | Structure:
    return _cached_encode(structure) if _has_text_keys(structure) else _encode(structure)


def _has_text_keys(structure: Structure) -> bool:
    """Return whether equal keys are identical, unlike 1 and True: such structures are cached."""
    return structure is None or (
        _TEXT.issuperset(map(type, structure.keys)) and all(map(_has_text_keys, structure.children))
    )


_TEXT = frozenset({str})


def _encode(structure: Structure) -> bytes | Structure:
    try:
        return encode_plain(_to_plain(structure))
    except TypeError:
        return structure


_cached_encode = lru_cache(maxsize=256)(_encode)


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
