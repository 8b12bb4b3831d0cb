"""Blocks of large buffers: used where they lie, and not again before all readers let go."""

from __future__ import annotations

import gc
import os
import signal
import threading
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from shm_broadcast.errors import SharedMemoryError
from shm_broadcast.ring.buffers import BlockReader, BlockWriter, PlacedBuffer
from shm_broadcast.segment import Segment
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


def test_readers_see_the_bytes_where_they_lie() -> None:
    first, second = Rig().share(7, 2 * MIB + 3)
    assert first.nbytes == second.nbytes == 2 * MIB + 3
    assert (first == 7).all()
    first[5] = 8
    assert second[5] == 8


def test_a_block_is_used_again_when_all_have_let_go() -> None:
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
    lambda array: array[5:10],
    lambda array: memoryview(array)[5:].cast("B"),
    lambda array: np.frombuffer(array, dtype=np.int32),
    lambda array: torch.frombuffer(array, dtype=torch.float32)[::7],
    lambda array: torch.from_numpy(array).view(torch.bfloat16).t(),
]


@pytest.mark.parametrize("view", VIEWS)
def test_any_view_holds_the_block(view: Callable[[Any], Any]) -> None:
    in_a_child(partial(hold_the_block, view))  # where no thread of another test closes descriptors


def hold_the_block(view: Callable[[Any], Any]) -> None:
    rig = Rig(n_readers=1)
    (array,) = rig.share(1)
    shown = view(array)
    before = bytes(np.ascontiguousarray(shown)) if isinstance(shown, np.ndarray) else None
    del array
    gc.collect()
    (other,) = rig.share(2)
    if before is not None:
        assert bytes(np.ascontiguousarray(shown)) == before
    del shown
    gc.collect()
    descriptors = open_descriptors()
    (third,) = rig.share(3)
    assert open_descriptors() == descriptors
    assert (other == 2).all()
    assert (third == 3).all()


def test_what_a_cancelled_message_placed_is_free_again() -> None:
    rig = Rig(limit=MIB)
    for _ in range(5):
        rig.place(content(1)).withdraw()
    rig.place(content(1))
    assert rig.writer.place(content(2)) is None


def test_a_reader_that_left_before_it_took_the_block_holds_nothing() -> None:
    rig = Rig(limit=MIB)
    descriptor = bytes(rig.place(content(1)).descriptor)
    first = rig.readers[0].resolve(descriptor)
    del first
    assert rig.writer.place(content(2)) is None
    rig.left.add(1)
    rig.place(content(2))


def test_a_reader_that_has_joined_since_takes_nothing_of_before() -> None:
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


def test_a_block_whose_filling_is_interrupted_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    rig = Rig(limit=MIB)
    rig.place(content(1)).withdraw()
    (block,) = rig.writer._blocks
    with monkeypatch.context() as patch:
        patch.setattr(
            block.segment,
            "words",
            SimpleNamespace(
                write=interrupt,
                load64=block.segment.words.load64,
                store64=block.segment.words.store64,
            ),
        )
        with pytest.raises(KeyboardInterrupt):
            rig.place(content(2))
    rig.place(content(3))


def test_what_a_reader_that_left_still_holds_is_not_written() -> None:
    rig = Rig(limit=MIB)
    first, second = rig.share(1)
    del first
    rig.left.add(1)
    assert rig.writer.place(content(2)) is None
    assert (second == 1).all()
    del second
    rig.place(content(2))


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


def test_what_another_process_holds_is_free_once_it_has_ended() -> None:
    rig = Rig(n_readers=1, limit=MIB)  # by the board, another process is that reader by now
    descriptor = bytes(rig.place(content(1)).descriptor)
    rig.left.add(0)
    with child(lambda: rig.readers[0].resolve(descriptor)):
        assert rig.writer.place(content(2)) is None
    rig.place(content(2))


def test_what_a_forked_child_lets_go_of_is_held_by_its_parent() -> None:
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
    rig.place(content(9)).withdraw()


def test_free_blocks_of_other_sizes_make_room() -> None:
    rig = Rig(n_readers=1, limit=4 * MIB)
    before = open_descriptors()
    for size in (MIB, 2 * MIB, 3 * MIB, 4 * MIB, MIB):
        (array,) = rig.share(size // MIB, size)
        assert (array == size // MIB).all()
        del array
    rig.writer.close()
    rig.readers[0].forget()
    gc.collect()
    assert open_descriptors() == before


def test_arrays_outlive_the_writer_s_blocks_and_the_reader_s_mappings() -> None:
    rig = Rig(n_readers=1)
    (array,) = rig.share(5)
    rig.writer.close()
    rig.readers[0].forget()
    del rig
    gc.collect()
    assert (array == 5).all()


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


def test_a_closed_writer_keeps_a_block_until_every_reader_has_mapped_it() -> None:
    before = open_descriptors()
    rig = Rig()
    descriptors = [bytes(rig.place(content(mark)).descriptor) for mark in (1, 2)]
    held = [rig.readers[0].resolve(each) for each in descriptors]
    rig.writer.close()
    rig.writer.close()
    for mark, each in enumerate(descriptors, 1):
        assert (rig.readers[1].resolve(each) == mark).all()
    for reader in rig.readers:
        reader.forget()
    assert [array[0] for array in held] == [1, 2]
    held.clear()
    until(lambda: open_descriptors() == before)


def joins_later(rig: Rig) -> None:
    rig.joined[1] = 64


@pytest.mark.parametrize(
    "go", [lambda rig: rig.left.add(1), lambda rig: rig.ended.add(1), joins_later]
)
@pytest.mark.parametrize("first", ["goes", "closed"])
def test_a_closed_writer_keeps_no_block_for_a_reader_that_does_not_come(
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


def test_too_little_memory_for_a_block_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks save a copy; without memory for them, messages travel through the ring."""

    def refuse(*_: object) -> None:
        raise SharedMemoryError("1 byte of shared memory is required, 0 are free")

    monkeypatch.setattr(Segment, "create", refuse)
    assert Rig().writer.place(content(1)) is None
