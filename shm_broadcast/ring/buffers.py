"""Move large buffers without copies: shared blocks that readers map, and recycled memory.

The first pass over newly mapped pages costs four to seven times a later one (page faults), so a
receiver of large tensors should not get new memory each time.

A block is a shared-memory segment that holds one buffer. The writer fills it and sends its
descriptor through the ring instead of the bytes. Each reader maps the block once, keeps the
mapping, and returns an array over it. Before that it stores its process in the block ("holder").
When the array's last reference is dropped, it stores the block's generation ("released"). The
generation grows by one with each message. The writer may fill a block again once every reader has
released the current generation, has closed the queue without mapping it, has joined the queue
since, has dropped the message because it cannot map the block, or has exited.

::

    block   0     segment header
            64    for reader 0, 1, ...: released generation, holder (u64 each)
            4096  the buffer's bytes

- A block is not written while any process holds an array over it, even if that reader has closed
  the queue.
- All blocks together take at most the limit given to `BlockWriter`; a buffer without a free block
  travels through the ring.
- A thread of a closed writer keeps a block open until every joined reader has mapped it, closed the
  queue or exited. A block that a reader has not mapped when the writer's process ends is lost to
  that reader.

Assumes: readers only read the arrays: all readers share the memory.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from shm_broadcast._native import RecyclingPool, Words
from shm_broadcast.errors import SharedMemoryError
from shm_broadcast.layout import SEGMENT_NONCE_BYTES
from shm_broadcast.process import ProcessId
from shm_broadcast.segment import Segment, SegmentHandle

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shm_broadcast.ring.writer import RingWriter


RECYCLED_BYTES: Final = 1 << 20
"""Smaller requests are not pooled: malloc itself keeps their pages."""

KEPT_BYTES: Final = 256 << 20


def new_pool() -> RecyclingPool:
    """A pool whose ``take(size)`` gives writable memory of so many bytes, of undefined content.

    Blocks that are referred to, even by a view, never share memory. Any thread, and any signal
    handler, may use the pool. At most `KEPT_BYTES` of unused blocks are kept; the longest unused
    are freed first.
    """
    return RecyclingPool(KEPT_BYTES)


def size_class(size: int) -> int:
    """Return ``size`` rounded up by at most an eighth, so that similar sizes share blocks."""
    step = 1 << max(size.bit_length() - 4, 0)
    return -(-size // step) * step


PLACED_BYTES: Final = 1 << 20
"""Buffers of this size and more are placed in blocks."""

DEFAULT_BLOCK_BYTES: Final = 512 << 20

_READERS: Final = 64
"""Offset of reader 0's two words, released and holder; see the drawing above."""
_READER_BYTES: Final = 16
_HOLDER: Final = 8
"""`ProcessId.word` of the process that holds an array; 0: none."""
_DATA: Final = 4096
_DESCRIPTOR: Final = struct.Struct(f"<IIQ{SEGMENT_NONCE_BYTES}sQQQ")

_LOOK_SECONDS: Final = (0.01, 1.0)
"""The first and the longest interval between checks whether all readers have mapped a block."""


class BlockWriter:
    """Allocates, fills and reuses blocks at the writer."""

    def __init__(self, readers: RingWriter, limit: int) -> None:
        """Keep blocks of at most ``limit`` bytes in total, for the ring's ``readers``."""
        self._readers = readers
        self._n_readers = len(readers.readers)
        self._limit = limit
        self._blocks: list[_Block] = []

    def place(self, buffer: memoryview) -> PlacedBuffer | None:
        """Copy ``buffer`` into a free block, or into a new one.

        Returns None if no block is free, and the limit, the free memory or the free descriptors
        allow no new one.
        """
        block = self._free_block(size_class(buffer.nbytes))
        if block is None:
            return None
        block.segment.words.write(_DATA, buffer)
        for reader in range(self._n_readers):
            block.segment.words.store64(_line(reader) + _HOLDER, 0)
        block.position = self._readers.published
        block.generation += 1  # last: if a signal handler raises before, the block stays free
        return PlacedBuffer(block, buffer.nbytes, self._n_readers)

    def close(self) -> None:
        """Close each block after its last reader has mapped it; does not wait for that.

        Arrays over the blocks stay valid in the readers that hold them.
        """
        blocks, self._blocks = self._blocks, []
        self._close_mapped(blocks)
        if blocks:
            keeper = threading.Thread(
                target=self._keep, args=(blocks,), name="blocks-to-map", daemon=True
            )
            with suppress(RuntimeError):  # no thread can start, as at the end of the process
                keeper.start()

    def _keep(self, blocks: list[_Block]) -> None:
        seconds, longest = _LOOK_SECONDS
        while blocks:
            time.sleep(seconds)
            seconds = min(2 * seconds, longest)
            self._close_mapped(blocks)

    def _close_mapped(self, blocks: list[_Block]) -> None:
        for block in [*blocks]:
            if not any(
                self._is_to_map(block, reader) and self._readers.is_attached(reader)
                for reader in range(self._n_readers)
            ):
                blocks.remove(block)
                block.segment.close()

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
            block = _Block(Segment.create(_DATA + capacity, "group-block"), capacity)
        except (SharedMemoryError, OSError):  # the caller then sends through the ring
            return None
        self._blocks.append(block)
        return block

    def _used(self) -> int:
        return sum(block.capacity for block in self._blocks)

    def _is_free(self, block: _Block) -> bool:
        return not any(self._needs(block, reader) for reader in range(self._n_readers))

    def _needs(self, block: _Block, reader: int) -> bool:
        """Return whether reader ``reader`` holds an array over ``block``, or may still map it."""
        words, line = block.segment.words, _line(reader)
        if words.load64(line) == block.generation:
            return False
        if self._readers.published == block.position:  # its message is being sent
            return True
        # A closed reader, even with a successor, may still hold an array while its process runs.
        word = words.load64(line + _HOLDER)
        if not word:
            return self._is_to_map(block, reader)
        holder = ProcessId.from_word(word)
        if self._readers.is_running(reader, holder.pid):  # the usual case, in a tenth of the time
            return True
        return holder.is_running()

    def _is_to_map(self, block: _Block, reader: int) -> bool:
        """Return whether reader ``reader`` may still map ``block`` and has not done so."""
        words, line = block.segment.words, _line(reader)
        return not (
            words.load64(line) == block.generation
            or words.load64(line + _HOLDER)
            or self._readers.has_left(reader)
            or self._readers.joined_at(reader) > block.position
        )


class _Block:
    def __init__(self, segment: Segment, capacity: int) -> None:
        self.segment = segment
        self.handle = segment.handle()
        self.capacity = capacity
        self.generation = 0
        self.position = 0


class PlacedBuffer:
    """A buffer that was copied into a block; its ``descriptor`` travels through the ring."""

    def __init__(self, block: _Block, size: int, n_readers: int) -> None:
        handle = block.handle
        facts = (handle.pid, handle.fd, handle.start_time, handle.nonce, handle.size)
        self.descriptor = memoryview(_DESCRIPTOR.pack(*facts, block.generation, size))
        self._block = block
        self._n_readers = n_readers

    def withdraw(self) -> None:
        """Release the block for all readers: the message was cancelled."""
        for reader in range(self._n_readers):
            self._block.segment.words.store64(_line(reader), self._block.generation)


class BlockReader:
    """One reader's cache of mapped blocks; beyond ``limit`` bytes it drops the least recently used.

    A dropped mapping remains as long as an array over it.
    """

    def __init__(self, reader: int, limit: int = DEFAULT_BLOCK_BYTES) -> None:
        self._line = _line(reader)
        self._limit = limit
        self._mapped: dict[bytes, Segment] = {}
        self._holder = ProcessId(0, 0)

    def resolve(self, descriptor: bytes | bytearray) -> NDArray[np.uint8]:
        """Return an array of uint8 over the block of ``descriptor``, without a copy.

        The block is released when the array's last reference is dropped. Raises SharedMemoryError
        if the block is not mapped yet, and its writer has exited or no descriptor is free.
        """
        import numpy as np  # noqa: PLC0415 - takes 70 ms, and only blocks need it

        pid, fd, start_time, nonce, size, generation, n_bytes = _DESCRIPTOR.unpack(descriptor)
        segment = self._mapped.pop(nonce, None)
        if segment is None:
            segment = Segment.attach(SegmentHandle(pid, start_time, fd, nonce, size))
            segment.close()
        self._mapped[nonce] = segment
        self._forget_oldest()
        if os.getpid() != self._holder.pid:
            self._holder = ProcessId.of(os.getpid())
        segment.words.store64(self._line + _HOLDER, self._holder.word)
        array = np.frombuffer(segment.memory[_DATA : _DATA + n_bytes], dtype=np.uint8)
        facts = segment.words, self._line, generation, os.getpid()
        release = weakref.finalize(array, _release, *facts)
        release.atexit = False
        return array

    def forget(self) -> None:
        """Drop all mappings; arrays that are still in use keep theirs."""
        self._mapped.clear()

    def _forget_oldest(self) -> None:
        while (
            len(self._mapped) > 1 and sum(each.size for each in self._mapped.values()) > self._limit
        ):
            self._mapped.pop(next(iter(self._mapped)))


def _line(reader: int) -> int:
    return _READERS + _READER_BYTES * reader


def _release(words: Words, line: int, generation: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has a copy of the array; the block is its parent's
        words.store64(line, generation)
