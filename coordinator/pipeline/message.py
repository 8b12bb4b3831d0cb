"""A tree of tensors and values as a tensor dict, and back: pure functions.

    "way"     which way the message goes: "next" or "previous"
    "tree"    the nesting, pickled, as text
    "0" …     the leaves, in order

The header of the dict therefore says everything that a receiver has to know: the nesting, and
shape, dtype, device and requires_grad of every tensor.
"""

from __future__ import annotations

import pickle
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from coordinator.tree import flatten, unflatten
from shm_broadcast import MessageDecodeError

if TYPE_CHECKING:
    from coordinator.tensor_dict import Header
    from coordinator.tree import Structure

NEXT, PREV = "next", "previous"
"""Which way a message goes: to the next stage (activations) or to the previous one (gradients)."""


def to_dict(tree: Any, way: str) -> dict[str, Any]:
    """The tensor dict of a tree.

    Raises:
        TypeError: the key of a dict cannot be pickled.
    """
    leaves, structure = flatten(tree)
    numbered = {str(number): leaf for number, leaf in enumerate(leaves)}
    return {"way": way, "tree": _describe(structure), **numbered}


def from_dict(values: dict[str, Any]) -> Any:
    """The tree of a tensor dict.

    Raises:
        MessageDecodeError: it cannot be restored here.
    """
    leaves = [values[str(number)] for number in range(len(values) - 2)]
    return unflatten(_restore(values["tree"]), leaves)


def way_of(header: Header) -> str:
    """Which way the message of a header goes.

    Raises:
        MessageDecodeError: a `Stage` did not send it.
    """
    way = header.scalars.get("way")
    if way not in (NEXT, PREV):
        raise MessageDecodeError("a message arrived that no pipeline stage sent")
    return str(way)


@lru_cache(maxsize=256)
def _describe(structure: Structure) -> str:
    try:
        return pickle.dumps(structure, protocol=pickle.HIGHEST_PROTOCOL).decode("latin-1")
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(f"cannot send this nesting: {error}") from error


@lru_cache(maxsize=256)
def _restore(text: str) -> Structure:
    try:
        return pickle.loads(text.encode("latin-1"))  # type: ignore[no-any-return]
    except Exception as error:
        raise MessageDecodeError(f"cannot restore the nesting of a message: {error}") from error
