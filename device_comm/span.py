"""Pieces of memory by address, as plans and kernels are told of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, Self

if TYPE_CHECKING:
    from torch import Tensor


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
