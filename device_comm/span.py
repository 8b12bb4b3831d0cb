"""Pieces of memory by address: what plans, transfers and kernels are made of."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final, NamedTuple, Self

if TYPE_CHECKING:
    from torch import Tensor

    from shm_broadcast.segment import Segment

copy_bytes = ctypes.memmove
"""``copy_bytes(to, from, size)``; other threads run meanwhile."""


class Span(NamedTuple):
    """A piece of memory, on the host or a device; kept alive by whoever tells of it."""

    address: int
    size: int
    """Bytes."""

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """The memory of a contiguous tensor."""
        return cls(tensor.data_ptr(), tensor.nbytes)


NOTHING: Final = Span(0, 0)


def address_of(segment: Segment) -> int:
    """Where a segment is mapped; it stays there as long as ``segment.memory`` is referenced."""
    return ctypes.addressof(ctypes.c_char.from_buffer(segment.memory))
