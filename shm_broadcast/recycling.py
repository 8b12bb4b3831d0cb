"""Memory for large results whose pages are not fresh: blocks return when nobody looks at them.

A first pass over fresh pages costs four to seven times a pass over pages that are mapped already,
so whoever receives large tensors again and again should not get fresh memory each time.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

RECYCLED_BYTES: Final = 1 << 20
"""Smaller requests take ordinary memory, whose pages malloc keeps."""

DEFAULT_KEPT_BYTES: Final = 256 << 20


class RecyclingPool:
    """Hands out byte arrays; one's memory comes back when its last reference goes.

    Guarantees: no two living arrays share memory, whatever views were made of them. Threads may
    share it. There is no lock, for memory comes back at any moment, in any thread, also amid
    another call of that thread: each step is atomic; where two meet, a block is freed, not kept.
    """

    def __init__(self, kept_bytes: int = DEFAULT_KEPT_BYTES) -> None:
        """Keep at most ``kept_bytes`` of unused blocks; the sizes unused for longest go first."""
        self._kept_limit = kept_bytes
        self._unused: dict[int, deque[NDArray[np.uint8]]] = {}
        self._lent: dict[int, _Loan] = {}  # by id: a weakref hashes as its array, which does not

    @property
    def kept_bytes(self) -> int:
        """Bytes of blocks that wait to be used again."""
        return sum(capacity * len(blocks) for capacity, blocks in list(self._unused.items()))

    def take(self, size: int) -> NDArray[np.uint8]:
        """A writable array of ``size`` bytes with any content."""
        if size < RECYCLED_BYTES:
            return np.empty(size, dtype=np.uint8)
        capacity = size_class(size)
        try:
            block = self._unused[capacity].pop()
        except LookupError:
            block = np.empty(capacity, dtype=np.uint8)
        # torch and numpy keep the array they were given alive, so its end is the block's release.
        array = np.frombuffer(memoryview(cast("Buffer", block))[:size], dtype=np.uint8)
        loan = _Loan(array, self._give_back)
        loan.block = block
        self._lent[id(loan)] = loan
        return array

    def _give_back(self, loan: _Loan) -> None:
        block = self._lent.pop(id(loan)).block
        if block.nbytes > self._kept_limit:
            return
        blocks = self._unused.pop(block.nbytes, None) or deque()
        blocks.append(block)
        self._unused[block.nbytes] = blocks  # the last of all sizes again
        while self.kept_bytes > self._kept_limit:
            oldest = next(iter(list(self._unused)), 0)
            try:
                self._unused[oldest].pop()
            except LookupError:
                self._unused.pop(oldest, None)


class _Loan(weakref.ref["NDArray[np.uint8]"]):
    """What was handed out, and the memory that comes back with it."""

    __slots__ = ("block",)
    block: NDArray[np.uint8]


def size_class(size: int) -> int:
    """``size`` rounded up so that at most an eighth is wasted, and similar sizes share a class."""
    step = 1 << max(size.bit_length() - 4, 0)
    return -(-size // step) * step


def memory_of(array: NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array (numpy's stubs hide that arrays are buffers)."""
    return memoryview(cast("Buffer", array)).cast("B")
