"""What `torch.compile` does not look into; in a module of its own, as it loads torch's compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.compiler import disable

T = TypeVar("T")


@disable  # type: ignore[untyped-decorator] # torch has no type for it
def call_outside_graph(function: Callable[..., T], *args: Any) -> T:
    """Call what needs a tensor's address, or its size, which a tensor that is traced has not."""
    return function(*args)
