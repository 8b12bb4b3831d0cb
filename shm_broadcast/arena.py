"""Large buffers that readers use where they lie: one copy in all, the writer's into shared memory.

A block is a segment of its own. The writer fills a block and sends its descriptor through the ring
instead of the bytes; each reader maps the block (once: it keeps the mapping) and hands out an array
over it. When the array's last reference goes, the reader stores the block's generation in its
release word; a block is free for the next message once all readers have.

::

    block   0     segment header
            64    release word of reader 0, 1, ... (u64 each): the generation it has released
            4096  the bytes

Guarantees: a block is not written while a reader that has not left holds an array over it. Blocks
take at most the limit given to `BlockWriter`; what does not fit travels through the ring.

Assumes: readers only read the arrays. They share the memory with each other.
"""

from __future__ import annotations

import struct
import weakref
from typing import TYPE_CHECKING, Final

import numpy as np

from shm_broadcast.errors import SharedMemoryError
from shm_broadcast.layout import NONCE_BYTES
from shm_broadcast.recycling import size_class
from shm_broadcast.segment import Segment, SegmentHandle

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from shm_broadcast.atomics import WordsLike

PLACED_BYTES: Final = 1 << 20
"""Buffers of this size and more are placed in blocks."""

DEFAULT_BLOCK_BYTES: Final = 512 << 20

_RELEASED: Final = 64
_DATA: Final = 4096
_DESCRIPTOR: Final = struct.Struct(f"<IIQ{NONCE_BYTES}sQQQ")


class BlockWriter:
    """The writer's blocks."""

    def __init__(self, n_readers: int, limit: int, has_left: Callable[[int], bool]) -> None:
        """Use at most ``limit`` bytes; ``has_left`` tells whether a reader will release no more."""
        self._n_readers = n_readers
        self._limit = limit
        self._has_left = has_left
        self._blocks: list[_Block] = []

    def place(self, buffer: memoryview) -> Placed | None:
        """Copy ``buffer`` into a free block.

        Returns:
            What to send, or None if no block is free, and the limit or the memory allows no further
            one.
        """
        block = self._free_block(size_class(buffer.nbytes))
        if block is None:
            return None
        block.generation += 1
        block.segment.words.write(_DATA, buffer)
        return Placed(block, buffer.nbytes, self._n_readers)

    def close(self) -> None:
        """Let go of all blocks. Arrays over them stay valid in the readers that hold them."""
        for block in self._blocks:
            block.segment.close()
        self._blocks.clear()

    def _free_block(self, capacity: int) -> _Block | None:
        for block in self._blocks:
            if block.capacity == capacity and self._is_free(block):
                return block
        for block in [each for each in self._blocks if self._is_free(each)]:
            if self._used() + capacity <= self._limit:
                break
            self._blocks.remove(block)
            block.segment.close()
        if self._used() + capacity > self._limit:
            return None
        try:
            segment = Segment.create(_DATA + capacity, "group-block")
        except SharedMemoryError:  # the ring needs no memory of its own
            return None
        self._blocks.append(_Block(segment, capacity))
        return self._blocks[-1]

    def _used(self) -> int:
        return sum(block.capacity for block in self._blocks)

    def _is_free(self, block: _Block) -> bool:
        words, generation = block.segment.words, block.generation
        return all(
            words.load64(_RELEASED + 8 * reader) == generation or self._has_left(reader)
            for reader in range(self._n_readers)
        )


class _Block:
    def __init__(self, segment: Segment, capacity: int) -> None:
        self.segment = segment
        self.capacity = capacity
        self.generation = 0


class Placed:
    """A buffer in a block, not sent yet."""

    def __init__(self, block: _Block, size: int, n_readers: int) -> None:
        handle = block.segment.handle()
        facts = (handle.pid, handle.fd, handle.start_time, handle.nonce, handle.size)
        self.descriptor = memoryview(_DESCRIPTOR.pack(*facts, block.generation, size))
        self._block = block
        self._n_readers = n_readers

    def withdraw(self) -> None:
        """Free the block again: the message was cancelled, so that no reader will."""
        for reader in range(self._n_readers):
            self._block.segment.words.store64(_RELEASED + 8 * reader, self._block.generation)


class BlockReader:
    """One reader's mappings of its writer's blocks, the least recently used dropped first."""

    def __init__(self, reader: int, limit: int = DEFAULT_BLOCK_BYTES) -> None:
        self._release_word = _RELEASED + 8 * reader
        self._limit = limit
        self._mapped: dict[bytes, Segment] = {}

    def resolve(self, descriptor: bytes | bytearray) -> NDArray[np.uint8]:
        """The bytes that a descriptor names, where they lie; released with their last reference.

        Raises:
            SharedMemoryError: the block is not mapped yet, and its writer has ended.
        """
        pid, fd, start_time, nonce, size, generation, n_bytes = _DESCRIPTOR.unpack(descriptor)
        segment = self._mapped.pop(nonce, None)
        if segment is None:
            segment = Segment.attach(SegmentHandle(pid, start_time, fd, nonce, size))
            segment.close()
        self._mapped[nonce] = segment
        self._forget_oldest()
        array = np.frombuffer(segment.memory[_DATA : _DATA + n_bytes], dtype=np.uint8)
        release = weakref.finalize(array, _release, segment.words, self._release_word, generation)
        release.atexit = False
        return array

    def forget(self) -> None:
        """Drop all mappings; arrays keep theirs."""
        self._mapped.clear()

    def _forget_oldest(self) -> None:
        while (
            len(self._mapped) > 1 and sum(each.size for each in self._mapped.values()) > self._limit
        ):
            self._mapped.pop(next(iter(self._mapped)))


def _release(words: WordsLike, word: int, generation: int) -> None:
    words.store64(word, generation)
