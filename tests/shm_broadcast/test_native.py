"""The extension must have been built: without it everything works, and nothing is fast."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import resource
import signal
from typing import Any, cast

import pytest

from shm_broadcast import MessageDecodeError, layout
from shm_broadcast._native import FastReader
from tests.shm_broadcast.queues import LIMIT, ends
from tests.shm_broadcast.rings import CODEC, Ring, ring

PARTS = (b"", b"m" * 100, memoryview(b"b" * 30_000))
TOTAL = 30_100
LARGEST = 8192 - layout.RECORD_HEADER


def fast(end: Any) -> Any:
    return end._fast


def content(made: Ring) -> bytes:
    start = layout.data_offset(made.n_readers)
    return bytes(made.segment.memory[start : start + made.published])


def test_long_messages_lie_in_the_ring_as_python_puts_them() -> None:
    with ring(2) as one, ring(2) as other:
        for made in (one, other):
            made.begin_at(64 * 900)  # the ring ends within the second record
        other.writer._fast = None
        for made in (one, other):
            made.write(b"main" * 20, b"", b"part", buffers=[b"x" * 9000, b"", b"y" * 20_000])
        assert one.published == other.published
        assert content(one) == content(other)


def test_records_of_a_long_message_are_written_while_there_is_room() -> None:
    with ring() as made:
        writer = fast(made.writer)
        made.write(body := b"f" * (made.capacity - 20_000))
        writer.moved = 0
        writer.write_parts(CODEC, LARGEST, PARTS, 0)
        some = writer.moved
        assert 0 < some < TOTAL and some % LARGEST == 0
        writer.write_parts(CODEC, LARGEST, PARTS, 1000)
        assert writer.moved == some
        assert made.read() == (body, [])
        writer.write_parts(CODEC, LARGEST, PARTS, 0)
        assert writer.moved == TOTAL
        assert made.read() == (b"m" * 100 + b"b" * 30_000, [])


def test_no_record_of_a_long_message_is_written_after_an_abort() -> None:
    with ring() as made:
        made.boards[1].abort("stop")
        fast(made.writer).write_parts(CODEC, LARGEST, PARTS, 1000)
        assert fast(made.writer).moved == 0
        assert made.published == 0


def test_a_record_that_is_too_large_for_what_is_awaited_is_refused() -> None:
    with ring() as made:
        made.write(b"m" * 1000)
        reader = fast(made.readers[0])
        with pytest.raises(ValueError, match="another message"):
            reader.read_parts((bytearray(500), bytearray(499)), 0)
        assert (made.consumed(), reader.moved) == (0, 0)
        reader.read_parts((bytearray(500), bytearray(500)), 0)
        assert reader.moved == 1000


def read_into_memory_that_kills(made: Ring) -> None:
    target = mmap.mmap(-1, 1000)
    address = ctypes.addressof(ctypes.c_char.from_buffer(target))
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(1000), 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    fast(made.readers[0]).read_parts((target,), 0)


def test_a_record_is_given_back_when_it_has_been_copied_out() -> None:
    """A reader that is killed by the first byte that it copies has given nothing back."""
    with ring() as made:
        made.write(b"m" * 1000)
        pid = os.fork()
        if pid == 0:
            try:
                read_into_memory_that_kills(made)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV
        assert made.consumed() == 0
        assert made.read() == (b"m" * 1000, [])


def test_a_message_whose_records_do_not_fit_it_is_skipped() -> None:
    with ring() as made:
        made.write(b"m" * 40_000)
        total = layout.data_offset(1) + layout.RECORD_TOTAL
        made.segment.memory[total] = 0  # 0x9C40 becomes 0x9C00: less than its records bring
        with pytest.raises(MessageDecodeError, match="another message"):
            made.read()
        made.write(b"next")
        assert made.read() == (b"next", [])


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("size", [20_000, 500, 30_000])
def test_a_message_after_one_of_which_only_the_sizes_came(size: int, looks: bool) -> None:
    """Its writer died when the record before the ring's end was out, which holds nothing else."""
    with ring() as made:
        made.begin_at(made.capacity - layout.RECORD_ALIGN)
        made.write(b"m" * 100, buffers=[bytes(4975)] * 4)
        made.words.store64(layout.RING_PUBLISHED, made.capacity)
        if looks:
            assert made.read() is None
        made.writer = made.attach_writer()
        made.write(b"s" * size)
        assert made.read() == (b"s" * size, [])
        assert made.read() is None


class Interrupted:
    """One end's extension; a signal comes while it moves records, and its handler raises after."""

    def __init__(self, end: Any) -> None:
        self.__dict__["end"] = end

    def __getattr__(self, name: str) -> Any:
        return getattr(self.end, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.end, name, value)

    def write_parts(self, *arguments: Any) -> None:
        self.end.write_parts(*arguments)
        raise KeyboardInterrupt

    def read_parts(self, *arguments: Any) -> None:
        self.end.read_parts(*arguments)
        raise KeyboardInterrupt


@pytest.mark.parametrize("size", [30_000, 300_000])
def test_a_writer_that_is_interrupted_cancels_only_what_is_not_out(size: int) -> None:
    with ring() as made:
        whole, fits = made.writer._fast, size < made.capacity
        made.writer._fast = cast("Any", Interrupted(whole))
        withdrawn: list[bool] = []
        with pytest.raises(KeyboardInterrupt):
            made.writer.write(
                CODEC, [b"m" * size], [], pytest.fail, withdraw=lambda: withdrawn.append(True)
            )
        assert withdrawn == [True] * (not fits)
        made.writer._fast = whole
        if fits:
            assert made.read() == (b"m" * size, [])
        assert made.read() is None
        made.write(b"next")
        assert made.read() == (b"next", [])


@pytest.mark.parametrize("last", [3, 5])
def test_a_python_writer_that_is_interrupted_cancels_only_what_is_not_out(last: int) -> None:
    """The message has 5 records."""
    with ring() as made:
        writer: Any = made.writer
        rings, writer._fast = writer._notify_readers, None
        records: list[None] = []
        withdrawn: list[bool] = []

        def interrupted() -> None:
            records.append(None)
            if len(records) == last:
                raise KeyboardInterrupt

        writer._notify_readers = interrupted
        with pytest.raises(KeyboardInterrupt):
            writer.write(
                CODEC, [b"m" * 40_000], [], pytest.fail, withdraw=lambda: withdrawn.append(True)
            )
        writer._notify_readers = rings
        assert withdrawn == [True] * (last < 5)
        assert made.read() == ((b"m" * 40_000, []) if last == 5 else None)
        made.write(b"next")
        assert made.read() == (b"next", [])


@pytest.mark.parametrize("size", [30_000, 100_000])
def test_a_reader_that_is_interrupted_loses_nothing(size: int) -> None:
    with ring() as made:
        reader = made.readers[0]
        whole = reader._fast
        refused = 0

        def read_some(need: int) -> None:
            nonlocal refused
            refused += 1
            reader._fast = cast("Any", Interrupted(whole))
            with pytest.raises(KeyboardInterrupt):
                made.read()
            reader._fast = whole

        made.writer.write(CODEC, [b"m" * size], [], read_some)
        read_some(0)
        assert refused >= 1
        assert made.read() == (b"m" * size, [])


def test_what_an_interrupted_reader_has_is_acquired_first() -> None:
    with ends() as made:
        reader: Any = made.reader._end
        whole = reader._ring._fast
        made.writer.enqueue(b"m" * 30_000)
        made.writer.enqueue("next")
        reader._ring._fast = Interrupted(whole)
        with pytest.raises(KeyboardInterrupt):
            made.reader.dequeue(LIMIT)
        reader._ring._fast = whole
        with made.reader.acquire_read(LIMIT) as view:
            assert pickle.loads(view) == b"m" * 30_000
        assert made.reader.dequeue(LIMIT) == "next"


@pytest.mark.parametrize(
    "wrong",
    [(1, LARGEST, [b""], 0), (1, LARGEST, (b"", 3), 0), (-1, LARGEST, PARTS, 0), (1,)],
    ids=["no tuple", "no buffer", "no codec", "too few"],
)
def test_wrong_arguments_of_writing_are_refused(wrong: tuple[Any, ...]) -> None:
    with ring() as made:
        writer = fast(made.writer)
        with pytest.raises((TypeError, OverflowError)):
            writer.write_parts(*wrong)
        writer.moved = TOTAL + 1
        with pytest.raises(ValueError, match="behind the end"):
            writer.write_parts(1, LARGEST, PARTS, 0)
        assert made.published == 0


def test_wrong_arguments_of_reading_are_refused() -> None:
    with ring() as made:
        made.write(b"m" * 1000)
        for wrong in [([bytearray(1000)], 0), ((bytearray(1000), 3), 0), ((),)]:
            with pytest.raises(TypeError):
                fast(made.readers[0]).read_parts(*wrong)
        with pytest.raises(BufferError):
            fast(made.readers[0]).read_parts((bytes(1000),), 0)
        assert made.consumed() == 0


@pytest.mark.parametrize(
    ("slot", "own_line"),
    [(-128, 192), (layout.member_slot(1), -16), (layout.member_slot(1), -64)],
)
def test_a_negative_offset_is_refused(slot: int, own_line: int) -> None:
    with ring() as made:
        board, data = made.boards[1], layout.data_offset(1)
        words, bells = (made.words, board.words), (board.eventcount_offset(0),)
        with pytest.raises(ValueError, match="negative"):
            FastReader(*words, data, slot, 0, bells, False, own_line)
