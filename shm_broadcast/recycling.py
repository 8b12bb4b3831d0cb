"""A pool of memory for large results: it comes back when its last reference goes.

The first pass over newly mapped pages costs four to seven times a later one (page faults), so
whoever receives large tensors again and again should not get new memory each time.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import Buffer

RECYCLED_BYTES: Final = 1 << 20
"""Smaller requests are not pooled: malloc itself keeps their pages."""

DEFAULT_KEPT_BYTES: Final = 256 << 20


class RecyclingPool:
    """Hands out byte arrays whose memory is used again once their last reference has gone.

    Guarantees: no two living arrays share memory, whatever views were made of them. Threads may
    share the pool. It takes no lock: an array's last reference may go while the same thread is
    inside a call of the pool, which would deadlock. Each step is atomic instead; where two calls
    interfere, a block is freed rather than kept.
    """

    def __init__(self, kept_bytes: int = DEFAULT_KEPT_BYTES) -> None:
        """Keep at most ``kept_bytes`` of unused blocks; the sizes unused for longest go first."""
        self._kept_limit = kept_bytes
        self._unused: dict[int, deque[NDArray[np.uint8]]] = {}
        self._lent: dict[int, _Loan] = {}  # by id: a weakref hashes as its array, which does not

    @property
    def kept_bytes(self) -> int:
        """Bytes of blocks that nobody uses now."""
        return sum(capacity * len(blocks) for capacity, blocks in list(self._unused.items()))

    def take(self, size: int) -> NDArray[np.uint8]:
        """A writable array of ``size`` bytes; its content is undefined."""
        import numpy as np  # noqa: PLC0415 - 70 ms, which a process with small messages saves

        if size < RECYCLED_BYTES:
            return np.empty(size, dtype=np.uint8)
        capacity = size_class(size)
        try:
            block = self._unused[capacity].pop()
        except LookupError:
            block = np.empty(capacity, dtype=np.uint8)
        # Views in numpy and torch keep `array` alive: when it goes, nothing refers to the block.
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
        self._unused[block.nbytes] = blocks  # moves this size to the end: used most recently
        while self.kept_bytes > self._kept_limit:
            oldest = next(iter(list(self._unused)), 0)
            try:
                self._unused[oldest].pop()
            except LookupError:
                self._unused.pop(oldest, None)


class _Loan(weakref.ref["NDArray[np.uint8]"]):
    """A weak reference to an array that was handed out, with the block that it lies in."""

    __slots__ = ("block",)
    block: NDArray[np.uint8]


def size_class(size: int) -> int:
    """``size`` rounded up by at most an eighth, so that similar sizes can use the same blocks."""
    step = 1 << max(size.bit_length() - 4, 0)
    return -(-size // step) * step


def memory_of(array: NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array (numpy's stubs hide that arrays are buffers)."""
    return memoryview(cast("Buffer", array)).cast("B")
