"""Memory for large results whose pages are not fresh: blocks return when nobody looks at them.

A first pass over fresh pages costs four to seven times a pass over pages that are mapped already,
so whoever receives large tensors again and again should not get fresh memory each time.
"""

from __future__ import annotations

import threading
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

    Guarantees: no two living arrays share memory, whatever views were made of them. Thread-safe.
    """

    def __init__(self, kept_bytes: int = DEFAULT_KEPT_BYTES) -> None:
        """Keep at most ``kept_bytes`` of unused blocks; the sizes unused for longest go first."""
        self._kept_limit = kept_bytes
        self._kept = 0
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._lent: dict[int, _Loan] = {}
        self._returned: deque[NDArray[np.uint8]] = deque()
        self._lock = threading.Lock()

    @property
    def kept_bytes(self) -> int:
        """Bytes of blocks that wait to be used again."""
        return self._kept

    def take(self, size: int) -> NDArray[np.uint8]:
        """A writable array of ``size`` bytes with any content."""
        if size < RECYCLED_BYTES:
            return np.empty(size, dtype=np.uint8)
        capacity = size_class(size)
        with self._lock:
            self._settle()
            block = self._pop(capacity) if capacity in self._free else None
        if block is None:
            block = np.empty(capacity, dtype=np.uint8)
        # torch and numpy keep the array they were given alive, so its end is the block's release.
        array = np.frombuffer(memoryview(cast("Buffer", block))[:size], dtype=np.uint8)
        loan = _Loan(array, self._end)
        loan.block = block
        self._lent[id(loan)] = loan
        return array

    def _end(self, loan: _Loan) -> None:
        # Called at any moment, even in the thread that holds the lock: it must not wait.
        self._returned.append(self._lent.pop(id(loan)).block)
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            if block.nbytes > self._kept_limit:
                continue
            same = self._free.pop(block.nbytes, [])
            same.append(block)
            self._free[block.nbytes] = same  # the last of all sizes again
            self._kept += block.nbytes
            while self._kept > self._kept_limit:
                self._pop(next(iter(self._free)))

    def _pop(self, capacity: int) -> NDArray[np.uint8]:
        blocks = self._free[capacity]
        block = blocks.pop()
        if not blocks:
            del self._free[capacity]
        self._kept -= capacity
        return block


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
