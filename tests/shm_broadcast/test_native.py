"""The extension must have been built: without it everything works, and nothing is fast."""

from __future__ import annotations

from typing import Any

import pytest

from shm_broadcast import atomics, layout
from tests.shm_broadcast.rings import CODEC, Ring, ring

PARTS = (b"", b"m" * 100, memoryview(b"b" * 30_000))
TOTAL = 30_100
LARGEST = 8192 - layout.RECORD_HEADER


def fast(end: Any) -> Any:
    return end._fast


def content(made: Ring) -> bytes:
    start = layout.data_offset(made.n_readers)
    return bytes(made.segment.memory[start : start + made.published])


def test_the_extension_was_built() -> None:
    assert atomics.native is not None, "shm_broadcast._native is missing: pip install -e . again"


def test_words_are_the_extension_s() -> None:
    assert type(atomics.make_words(bytearray(64))) is not atomics.PythonWords


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
        write = fast(made.writer).write_parts
        made.write(body := b"f" * (made.capacity - 20_000))
        some = write(CODEC, LARGEST, PARTS, 0, 0)
        assert 0 < some < TOTAL and some % LARGEST == 0
        assert write(CODEC, LARGEST, PARTS, some, 1000) == some
        assert made.read() == (body, [])
        assert write(CODEC, LARGEST, PARTS, some, 0) == TOTAL
        assert made.read() == (b"m" * 100 + b"b" * 30_000, [])


def test_no_record_of_a_long_message_is_written_after_an_abort() -> None:
    with ring() as made:
        made.boards[1].abort("stop")
        assert fast(made.writer).write_parts(CODEC, LARGEST, PARTS, 0, 1000) == 0
        assert made.published == 0


def test_a_record_that_is_too_large_for_what_is_awaited_is_refused() -> None:
    with ring() as made:
        made.write(b"m" * 1000)
        read = fast(made.readers[0]).read_parts
        with pytest.raises(ValueError, match="another message"):
            read((bytearray(500), bytearray(499)), 0, 0)
        assert made.consumed() == 0
        assert read((bytearray(500), bytearray(500)), 0, 0) == 1000


@pytest.mark.parametrize(
    "wrong",
    [(1, LARGEST, [b""], 0, 0), (1, LARGEST, (b"", 3), 0, 0), (-1, LARGEST, PARTS, 0, 0), (1,)],
    ids=["no tuple", "no buffer", "no codec", "too few"],
)
def test_wrong_arguments_of_writing_are_refused(wrong: tuple[Any, ...]) -> None:
    with ring() as made:
        with pytest.raises((TypeError, OverflowError)):
            fast(made.writer).write_parts(*wrong)
        with pytest.raises(ValueError, match="behind the end"):
            fast(made.writer).write_parts(1, LARGEST, PARTS, TOTAL + 1, 0)
        assert made.published == 0


def test_wrong_arguments_of_reading_are_refused() -> None:
    with ring() as made:
        made.write(b"m" * 1000)
        for wrong in [([bytearray(1000)], 0, 0), ((bytearray(1000), 3), 0, 0), ((), 0)]:
            with pytest.raises(TypeError):
                fast(made.readers[0]).read_parts(*wrong)
        with pytest.raises(BufferError):
            fast(made.readers[0]).read_parts((bytes(1000),), 0, 0)
        assert made.consumed() == 0
