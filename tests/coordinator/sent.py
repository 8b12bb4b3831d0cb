"""What is sent: how much of it goes over the link, and whether what comes is the same."""

from __future__ import annotations

from typing import Any

import torch


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (
            isinstance(b, torch.Tensor)
            and (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
            and torch.equal(a.contiguous().reshape(-1).view(torch.uint8),
                            b.contiguous().reshape(-1).view(torch.uint8))
        )  # fmt: skip
    return type(a) is type(b) and a == b


def agree(found: dict[str, Any], sent: dict[str, Any]) -> None:
    assert list(found) == list(sent)
    for key, value in sent.items():
        assert same(found[key], value), (key, found[key], value)


def counting(send: Any, sent: list[int]) -> Any:
    """``send``, with a note of how many elements of each tensor go over the link."""

    def counted(x: torch.Tensor, *rest: Any, **options: Any) -> Any:
        if x.dtype != torch.uint8:
            sent.append(x.numel())
        return send(x, *rest, **options)

    return counted
