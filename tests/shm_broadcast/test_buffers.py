"""Large buffers: used where they lie, and memory used again after its last reference."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shm_broadcast import SharedMemoryError
from shm_broadcast._native import RecyclingPool
from shm_broadcast.ring.buffers import (
    RECYCLED_BYTES,
    BlockReader,
    BlockWriter,
    PlacedBuffer,
    size_class,
)
from tests.forked import in_a_child
from tests.patience import until
from tests.shm_broadcast.leaks import open_descriptors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20


def content(mark: int, size: int = MIB) -> memoryview:
    return memoryview(bytes([mark]) * size)


class Rig:
    """A writer of blocks and its readers, in one process."""

    def __init__(self, n_readers: int = 2, limit: int = 8 * MIB) -> None:
        self.left: set[int] = set()
        self.ended: set[int] = set()
        self.joined = [0] * n_readers
        self.published = 0
        self.readers = [BlockReader(reader) for reader in range(n_readers)]
        self.writer = BlockWriter(self, limit)

    def has_left(self, reader: int) -> bool:
        return reader in self.left

    def joined_at(self, reader: int) -> int:
        return self.joined[reader]

    def is_attached(self, reader: int) -> bool:
        return reader not in self.ended

    def is_running(self, reader: int, pid: int) -> bool:
        return pid == os.getpid() and reader < len(self.readers)

    def place(self, buffer: memoryview) -> PlacedBuffer:
        """Place the only buffer of a message."""
        placed = self.writer.place(buffer)
        assert placed is not None
        self.published += 1
        return placed

    def share(self, mark: int, size: int = MIB) -> list[np.ndarray[Any, Any]]:
        """Place a buffer and resolve it at every reader."""
        descriptor = bytes(self.place(content(mark, size)).descriptor)
        return [reader.resolve(descriptor) for reader in self.readers]


# --- blocks that readers share ---------------------------------------------------------------


def test_a_block_is_used_again_when_all_have_released_it() -> None:
    rig = Rig()
    rig.share(1)
    before = open_descriptors()
    for mark in range(2, 30):
        first, second = rig.share(mark)
        assert (first == mark).all() and (second == mark).all()
        del first, second
    assert open_descriptors() == before


def test_a_block_is_not_written_while_one_reader_holds_it() -> None:
    rig = Rig()
    first, second = rig.share(1)
    del second
    others = [rig.share(mark) for mark in range(2, 5)]
    assert (first == 1).all()
    for mark, pair in enumerate(others, 2):
        assert all((array == mark).all() for array in pair)


VIEWS: list[Callable[[Any], Any]] = [
    lambda array: array[10:20],
    lambda array: array.view(np.float32).reshape(2, -1).T,
    lambda array: memoryview(array)[5:].cast("B"),
    lambda array: np.frombuffer(array, dtype=np.int64),
    lambda array: torch.frombuffer(array, dtype=torch.uint8).view(torch.bfloat16)[3:7],
    lambda array: torch.from_numpy(array).view(2, -1).t(),
    lambda array: torch.frombuffer(array, dtype=torch.float32).numpy()[::2],
    lambda array: torch.nn.Parameter(torch.frombuffer(array, dtype=torch.float32)),
]


def test_any_view_holds_a_block() -> None:
    in_a_child(hold_a_block)  # where no thread of another test closes descriptors


def hold_a_block() -> None:
    rig = Rig(n_readers=1, limit=MIB)
    rig.share(0)
    before = open_descriptors()
    for number, view in enumerate(VIEWS):
        shown = view(rig.share(number)[0])
        assert rig.writer.place(content(99)) is None, f"view {number} holds nothing"
        del shown
    assert (rig.share(3)[0] == 3).all()
    assert open_descriptors() == before


def test_a_reader_that_left_holds_what_it_took_only() -> None:
    rig = Rig(limit=MIB)
    descriptor = bytes(rig.place(content(1)).descriptor)
    rig.readers[0].resolve(descriptor)
    assert rig.writer.place(content(2)) is None  # reader 1 may take it
    rig.left.add(1)
    first = rig.readers[0].resolve(bytes(rig.place(content(2)).descriptor))
    rig.left.add(0)
    assert rig.writer.place(content(3)) is None
    assert (first == 2).all()
    del first
    rig.place(content(3))


def test_a_reader_holds_no_block_of_before_it_joined() -> None:
    rig = Rig(n_readers=2, limit=MIB)
    descriptor = bytes(rig.place(content(1)).descriptor)
    first = rig.readers[0].resolve(descriptor)
    del first
    assert rig.writer.place(content(2)) is None  # reader 1 may take it
    rig.published = rig.joined[1] = 64
    rig.place(content(2))
    assert rig.writer.place(content(3)) is None


def test_no_block_is_used_twice_in_a_message() -> None:
    rig = Rig(n_readers=1)
    rig.left.add(0)
    placed = [rig.writer.place(content(mark)) for mark in (1, 2)]
    rig.left.clear()  # it has come back before the message is published
    found = [rig.readers[0].resolve(bytes(each.descriptor))[0] for each in placed if each]
    assert found == [1, 2]


@contextmanager
def child(do: Callable[[], object]) -> Iterator[None]:
    """A process that does something and then waits; inside, it is there."""
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        kept = do()
        os.write(done, b"x" if kept is not None else b"-")
        signal.pause()
    os.read(ready, 1)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(done)


def test_a_block_is_free_once_the_process_that_holds_it_has_ended() -> None:
    rig = Rig(n_readers=1, limit=MIB)  # by the board, another process is that reader by now
    descriptor = bytes(rig.place(content(1)).descriptor)
    rig.left.add(0)
    with child(lambda: rig.readers[0].resolve(descriptor)):
        assert rig.writer.place(content(2)) is None
    rig.place(content(2))


def test_a_forked_child_does_not_release_its_parents_block() -> None:
    rig = Rig(n_readers=1, limit=MIB)
    held = rig.share(1)
    with child(held.clear):
        assert rig.writer.place(content(2)) is None
    assert (held[0] == 1).all()
    held.clear()
    rig.place(content(2))


def test_beyond_the_limit_nothing_is_placed() -> None:
    rig = Rig(n_readers=1, limit=3 * MIB)
    assert rig.writer.place(content(0, 4 * MIB)) is None
    held = [rig.share(mark) for mark in range(3)]
    assert rig.writer.place(content(9)) is None
    held.pop()
    for _ in range(5):  # of a cancelled message nothing is left
        rig.place(content(9)).withdraw()
    rig.place(content(9))


def test_free_blocks_of_other_sizes_make_room() -> None:
    before = open_descriptors()
    rig = Rig(n_readers=1, limit=4 * MIB)
    for size in (MIB, 2 * MIB, 3 * MIB, 4 * MIB, MIB):
        assert (rig.share(size // MIB, size)[0] == size // MIB).all()
    (last,) = rig.share(5)
    rig.writer.close()
    rig.readers[0].forget()
    del rig
    gc.collect()
    assert (last == 5).all()  # an array outlives both ends
    del last
    assert open_descriptors() == before


def test_mappings_beyond_the_limit_are_dropped_the_oldest_first() -> None:
    rig = Rig(n_readers=1, limit=16 * MIB)
    reader = rig.readers[0] = BlockReader(0, limit=3 * MIB)
    arrays = [rig.share(mark)[0] for mark in range(6)]
    assert len(reader._mapped) == 2
    for mark, array in enumerate(arrays):
        assert (array == mark).all()
    arrays.clear()
    for mark in range(12):
        assert (rig.share(mark)[0] == mark).all()


def joins_later(rig: Rig) -> None:
    rig.joined[1] = 64


@pytest.mark.parametrize(
    "go", [lambda rig: rig.left.add(1), lambda rig: rig.ended.add(1), joins_later]
)
@pytest.mark.parametrize("first", ["goes", "closed"])
def test_a_closed_writer_keeps_no_block_for_a_reader_that_left(
    first: str, go: Callable[[Rig], object]
) -> None:
    before = open_descriptors()
    rig = Rig()
    descriptor = bytes(rig.place(content(1)).descriptor)
    rig.readers[0].resolve(descriptor)
    rig.readers[0].forget()
    if first == "goes":
        go(rig)
    rig.writer.close()
    if first == "closed":
        go(rig)
        until(lambda: open_descriptors() == before)
    assert open_descriptors() == before
    with pytest.raises(SharedMemoryError):
        rig.readers[1].resolve(descriptor)


def test_a_closed_writer_that_gets_no_thread_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    before = open_descriptors()
    rig = Rig(n_readers=1)
    rig.place(content(1))
    monkeypatch.setattr(threading.Thread, "start", refuse)
    rig.writer.close()
    assert open_descriptors() == before


# --- recycled memory of one process ----------------------------------------------------------


def taken(pool: RecyclingPool, size: int) -> Any:
    """An array over a block."""
    return np.frombuffer(memoryview(pool.take(size)), dtype=np.uint8)


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


@settings(max_examples=50)
@given(st.integers(1, 1 << 40), st.integers(MIB, 64 * MIB))
def test_a_size_is_rounded_up_by_an_eighth_at_most(any_size: int, size: int) -> None:
    assert any_size <= size_class(any_size) <= any_size + any_size // 8 + 1
    assert size_class(size_class(any_size)) == size_class(any_size)
    pool = RecyclingPool()
    pool.take(size)
    assert pool.kept_bytes == size_class(size)


def test_memory_is_used_again_by_sizes_of_its_class() -> None:
    pool = RecyclingPool()
    for size in (0, RECYCLED_BYTES - 1):  # ordinary memory
        assert taken(pool, size).nbytes == size
        assert pool.kept_bytes == 0
    first = taken(pool, 3 * MIB)
    first[:] = 7
    at = address(first)
    assert pool.kept_bytes == 0
    del first
    for size in (3 * MIB, 3 * MIB - 100):
        assert pool.kept_bytes == size_class(3 * MIB)
        again = taken(pool, size)
        assert (address(again), again.nbytes) == (at, size)
        assert pool.kept_bytes == 0
        del again


def test_any_view_keeps_the_memory() -> None:
    for number, view in enumerate(VIEWS):
        pool = RecyclingPool()
        array = taken(pool, 2 * MIB)
        at, shown = address(array), view(array)
        del array
        assert pool.kept_bytes == 0, f"view {number} holds nothing"
        other = taken(pool, 2 * MIB)
        assert abs(address(other) - at) >= 2 * MIB
        del other
        kept = pool.kept_bytes
        assert kept > 0
        del shown
        assert pool.kept_bytes == 2 * kept, f"view {number} is kept"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(MIB - 1, 5 * MIB)), max_size=20))
def test_no_two_living_arrays_share_memory(steps: list[tuple[bool, int]]) -> None:
    pool = RecyclingPool(kept_bytes=12 * MIB)
    living: list[tuple[int, Any]] = []
    for number, (takes, size) in enumerate(steps):
        if takes or not living:
            array = taken(pool, size)
            assert array.nbytes == size
            array[::4096] = number % 256
            array[-1] = number % 256
            living.append((number % 256, array))
        else:
            living.pop(size % len(living))
        for mark, array in living:
            assert (array[::4096] == mark).all()
            assert array[-1] == mark
        spans = sorted((address(array), array.nbytes) for _, array in living)
        for (start, size_), (following, _) in itertools.pairwise(spans):
            assert start + size_ <= following
        assert 0 <= pool.kept_bytes <= 12 * MIB


def test_the_limit_bounds_what_is_kept_and_old_sizes_make_room() -> None:
    pool = RecyclingPool(kept_bytes=8 * MIB)
    arrays = [taken(pool, 2 * MIB) for _ in range(5)]
    arrays.clear()
    assert pool.kept_bytes == 8 * MIB
    at = set()
    for _ in range(3):
        at.add(address(taken(pool, 5 * MIB)))
    assert 0 < pool.kept_bytes <= 8 * MIB
    assert len(at) == 1
    taken(pool, 9 * MIB)
    assert pool.kept_bytes > 0
    array = taken(pool, 2 * MIB)
    none = RecyclingPool(kept_bytes=0)
    taken(none, 2 * MIB)
    assert none.kept_bytes == 0
    del pool, none
    gc.collect()
    array[:] = 1  # it outlives its pool
    assert array.sum() == 2 * MIB
