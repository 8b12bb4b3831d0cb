"""Convert nested dicts, lists and tuples to a flat list of leaves and a description, and back."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any


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
