"""Divides memory into chunks and parts. Addresses and sizes are in bytes."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from device_comm.span import NOTHING, Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def chunks(size: int, most: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of consecutive chunks of ``size`` bytes, each of at most ``most`` bytes."""
    for begin in range(0, size, max(most, 1)):
        yield begin, min(size - begin, most)


def part(size: int, begin: int, most: int) -> tuple[int, int]:
    """(offset, size) of at most ``most`` of ``size`` bytes, from ``begin`` on; may be empty."""
    return begin, max(min(size - begin, most), 0)


def span(address: int, within: tuple[int, int]) -> Span:
    """The memory of a `part` of the data at ``address``."""
    begin, size = within
    return Span(address + begin, size) if size else NOTHING


def cut(address: int, sizes: Sequence[int], begin: int = 0, most: int | None = None) -> list[Span]:
    """The same `part` of each of several consecutive pieces of memory.

    Args:
        address: where the first one starts.
        sizes: the size of each.
        begin: the part's offset in each.
        most: the part's size at most; None: the whole piece.
    """
    starts = accumulate(sizes[:-1], initial=address)
    return [
        span(start, part(size, begin, size if most is None else most))
        for start, size in zip(starts, sizes, strict=True)
    ]
