"""Checking what arrived against the shapes that a caller says it has: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from coordinator.tree import flatten

if TYPE_CHECKING:
    import torch

Shapes = Sequence[int] | Sequence[Sequence[int]]
"""One tensor's shape; or one for each tensor of a tree, in order."""


def check(tree: Any, shapes: Shapes | None, dtype: torch.dtype | None) -> None:
    """Require that the tensors of ``tree`` have these shapes and this dtype; None: any will do.

    Raises:
        ValueError: they have not.
    """
    if tree is None:
        return
    tensors = [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]
    if shapes is not None:
        many = any(isinstance(each, Sequence) for each in shapes)
        wanted = [tuple(each) for each in shapes] if many else [tuple(shapes)]  # type: ignore[arg-type]
        found = [tuple(tensor.shape) for tensor in tensors]
        if found != wanted:
            raise ValueError(f"tensors of shapes {found} arrived where {wanted} were expected")
    others = {tensor.dtype for tensor in tensors} - {dtype}
    if dtype is not None and others:
        raise ValueError(f"tensors of {others} arrived where {dtype} was expected")
