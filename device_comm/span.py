"""Pieces of memory by address, as plans and kernels are told of them."""

from __future__ import annotations

from typing import Final, NamedTuple


class Span(NamedTuple):
    """A piece of memory, on the host or a device; kept alive by whoever tells of it."""

    address: int
    size: int
    """Bytes."""


NOTHING: Final = Span(0, 0)
