"""A pool of memory for large results: it comes back when its last reference goes.

The first pass over newly mapped pages costs four to seven times a later one (page faults), so
whoever receives large tensors again and again should not get new memory each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shm_broadcast.atomics import native

if TYPE_CHECKING:
    from shm_broadcast._native import RecyclingPool

RECYCLED_BYTES: Final = 1 << 20
"""Smaller requests are not pooled: malloc itself keeps their pages."""

KEPT_BYTES: Final = 256 << 20


def new_pool() -> RecyclingPool | FreshMemory:
    """A pool whose ``take(size)`` gives writable memory of so many bytes, of undefined content.

    Guarantees: no two blocks that are referred to share memory, whatever views were made of them.
    Any thread, and any signal handler, may use the pool. At most `KEPT_BYTES` of unused blocks are
    kept; what was unused for longest goes first.
    """
    return FreshMemory() if native is None else native.RecyclingPool(KEPT_BYTES)


class FreshMemory:
    """The extension's ``RecyclingPool`` in Python: nothing is used again."""

    kept_bytes: Final = 0

    def take(self, size: int) -> bytearray:
        """Memory of ``size`` bytes."""
        return bytearray(size)


def size_class(size: int) -> int:
    """``size`` rounded up by at most an eighth, so that similar sizes can use the same blocks."""
    step = 1 << max(size.bit_length() - 4, 0)
    return -(-size // step) * step
