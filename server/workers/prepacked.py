"""Matrix products on a CPU whose weight is packed once, in the layout of oneDNN's kernels.

torch's own float32 product repacks the weight in every call: for the few rows of one text that
takes longer than the product itself.

oneDNN keeps kernels, 0.6 MiB of them, for each number of rows that it has met. So rows are computed
in blocks, and the last block is padded to one of a few sizes. The same goes for oneDNN's own
functions, such as gelu. Their kernels are small, but fragment the heap between the tensors of
batches: 600 batches of different sizes left 0.5 GiB that later batches could not use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCK = 128
"""Rows computed at once; fewer make poor use of the caches, more need more memory for kernels."""
_COARSE, _FINE = 32, 8
"""A block is filled up to a multiple of these rows: of `_COARSE` beyond ``2 * _COARSE`` rows."""
_FUSED: dict[object, tuple[str, str]] = {None: ("none", ""), functional.gelu: ("gelu", "none")}
"""What oneDNN computes along with a product, which saves a pass over the memory: its names."""


def can_prepack(weight: torch.Tensor) -> bool:
    """Whether `linear` takes such a weight once it is prepacked."""
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
    return on_cpu and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def prepack(weight: torch.Tensor) -> torch.Tensor:
    """A float32 weight [outputs, inputs] as `linear` takes it: opaque, and of the same size."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _BLOCK)
    return packed


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """``activation(x @ weight.T + bias)``: float32 [rows, inputs] → a new [rows, outputs].

    Args:
        x: on the CPU.
        weight: prepacked.
        bias: [outputs].
        activation: a function of each element.
    """
    blocks = [_block(each, weight, bias, activation) for each in torch.split(x, _BLOCK)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _block(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    rows = len(x)
    missing = -rows % (_FINE if rows <= 2 * _COARSE else _COARSE)
    if missing:
        x = functional.pad(x, (0, 0, 0, missing))
    name, algorithm = _FUSED.get(activation, _FUSED[None])
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, name, [], algorithm)
    if activation is not None and activation not in _FUSED:
        y = activation(y)
    return y[:rows]
