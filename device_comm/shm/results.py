"""Memory for results: large ones come from a pool whose pages are not fresh."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from shm_broadcast.ring.recycling import RECYCLED_BYTES, new_pool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Results:
    """Makes tensors on the CPU.

    The C extension holds it, so it must not hold the backend that holds the extension's end.
    """

    def __init__(self) -> None:
        self._pool = new_pool()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A new contiguous tensor of ``shape``."""
        size = math.prod(shape) * dtype.itemsize
        if size < RECYCLED_BYTES:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        flat = torch.frombuffer(self._pool.take(size), dtype=dtype)
        return flat if len(shape) == 1 else flat.view(shape)

    def empty_like(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """As `empty`, of the dtype of ``like``."""
        return self.empty(shape, like.dtype)
