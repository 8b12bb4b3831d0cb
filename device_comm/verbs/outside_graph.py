"""Exclude calls from `torch.compile`; a separate module, since it imports torch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.compiler import disable

T = TypeVar("T")


@disable  # type: ignore[untyped-decorator] # torch has no type for it
def call_outside_graph(function: Callable[..., T], *args: Any) -> T:
    """Call a function that needs an address or a size, which traced tensors lack."""
    return function(*args)
