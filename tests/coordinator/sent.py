"""Compare what is sent with what is received; count the elements on a link."""

from __future__ import annotations

from typing import Any

import torch


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def same(a: Any, b: Any) -> bool:
    """Whether two trees have equal tensors and values, of the same types."""
    if isinstance(b, torch.Tensor):
        return (
            isinstance(a, torch.Tensor)
            and (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
            and torch.equal(as_bytes(a), as_bytes(b))
        )
    if type(a) is not type(b):
        return False
    if isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in b)
    if isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def agree(found: Any, sent: Any) -> None:
    assert same(found, sent), (found, sent)


def counting(send: Any, sent: list[int]) -> Any:
    """``send``, with a note of how many elements of each tensor go over the link."""

    def counted(x: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if x.dtype != torch.uint8:
            sent.append(x.numel())
        return send(x, *rest, **options)

    return counted
