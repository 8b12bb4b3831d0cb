"""Describe memory by address and size, for transfers and kernels."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final, NamedTuple, Self

if TYPE_CHECKING:
    from torch import Tensor

    from shm_broadcast.segment import Segment

copy_bytes = ctypes.memmove
"""``copy_bytes(to, from, size)``; releases the interpreter lock."""


class Span(NamedTuple):
    """A piece of host or device memory; its owner keeps it alive."""

    address: int
    size: int
    """Bytes."""

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Return the memory of a contiguous tensor."""
        return cls(tensor.data_ptr(), tensor.nbytes)


NOTHING: Final = Span(0, 0)


def address_of(segment: Segment) -> int:
    """Return a segment's address; valid while ``segment.memory`` is referenced."""
    return ctypes.addressof(ctypes.c_char.from_buffer(segment.memory))
