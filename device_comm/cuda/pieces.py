"""Cutting what is to be moved into chunks and parts. Addresses and sizes are in bytes."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from device_comm.cuda.abi import ALIGN, NOTHING, Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def align(size: int) -> int:
    """The next multiple of `ALIGN`."""
    return -(-size // ALIGN) * ALIGN


def chunks(size: int, most: int) -> Iterator[tuple[int, int]]:
    """Where chunks of ``size`` bytes begin, and their sizes: ``most``, and what is left."""
    for begin in range(0, size, max(most, 1)):
        yield begin, min(size - begin, most)


def part(size: int, begin: int, most: int) -> tuple[int, int]:
    """What is at most ``most`` bytes from ``begin`` on, of ``size``; none of it may be left."""
    return begin, max(min(size - begin, most), 0)


def span(address: int, within: tuple[int, int]) -> Span:
    """A `part` of what is at ``address``."""
    begin, size = within
    return Span(address + begin, size) if size else NOTHING


def cut(address: int, sizes: Sequence[int], begin: int = 0, most: int | None = None) -> list[Span]:
    """The same `part` of each of several that lie in a row; None: all of it."""
    starts = accumulate(sizes[:-1], initial=address)
    return [
        span(start, part(size, begin, size if most is None else most))
        for start, size in zip(starts, sizes, strict=True)
    ]
