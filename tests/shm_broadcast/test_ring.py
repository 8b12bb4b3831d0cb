"""The ring by hand: where records lie, who gates whom, and what each reader sees."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest

from shm_broadcast import layout
from shm_broadcast._native import FastReader
from shm_broadcast.codec import MAX_BUFFERS
from shm_broadcast.errors import MessageDecodeError
from shm_broadcast.ring import reader as ring_reader
from tests.forked import in_a_child
from tests.shm_broadcast.rings import CAPACITY, CODEC, NoRoomError, Ring, ring

if TYPE_CHECKING:
    from collections.abc import Callable

    from shm_broadcast._native import Words


LARGEST_SMALL = CAPACITY // 4 - layout.RECORD_HEADER
"""The largest body that goes in one record by the short path."""


def body(size: int, seed: int = 0) -> bytes:
    return bytes((seed + index) % 251 for index in range(size))


def header(ring: Ring, position: int) -> tuple[int, ...]:
    start = layout.data_offset(ring.n_readers) + position % ring.capacity
    return struct.unpack_from(layout.RECORD_FORMAT, ring.segment.memory, start)


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 96, 97, 4096, LARGEST_SMALL])
def test_a_small_message(size: int) -> None:
    with ring(2) as made:
        assert made.writer.try_write(CODEC, body(size))
        assert made.published == layout.record_stride(size)
        assert header(made, 0) == (size, layout.KIND_MESSAGE, CODEC, 0, size, 1, 0)
        for reader in range(2):
            assert made.read(reader) == (body(size), [])
            assert made.read(reader) is None
            assert made.consumed(reader) == made.published


def test_one_that_is_not_small_is_refused_whole() -> None:
    with ring() as made:
        assert not made.writer.try_write(CODEC, body(LARGEST_SMALL + 1))
        assert made.published == 0
        assert made.writer.sequence == 0


def test_nothing_is_written_or_read_after_an_abort() -> None:
    with ring() as made:
        assert made.writer.try_write(CODEC, b"before")
        made.boards[1].abort("stop")
        assert not made.writer.try_write(CODEC, b"after")
        assert made.read() is None
        assert made.consumed() == 0


def test_both_paths_write_the_same_record() -> None:
    with ring() as one, ring() as other:
        assert one.writer.try_write(CODEC, body(1000))
        other.write(body(300), body(700, 300), b"")
        start = layout.data_offset(1)
        end = start + one.published
        assert one.published == other.published
        assert one.segment.memory[start:end] == other.segment.memory[start:end]


def test_a_full_ring_refuses_and_keeps_what_is_unread() -> None:
    with ring(2) as made:
        sent: list[bytes] = []
        while made.writer.try_write(CODEC, body(5000, len(sent))):
            sent.append(body(5000, len(sent)))
        before = bytes(made.segment.memory)
        for _ in range(3):
            assert not made.writer.try_write(CODEC, body(5000))
        assert bytes(made.segment.memory) == before
        assert made.published <= made.capacity - layout.RECORD_ALIGN  # room for a CANCEL
        # One reader alone makes no room.
        assert made.read(0) == (sent[0], [])
        assert not made.writer.try_write(CODEC, body(5000))
        assert made.read(1) == (sent[0], [])
        assert made.writer.try_write(CODEC, b"more")
        for reader in range(2):
            assert [made.read(reader) for _ in sent] == [
                (each, []) for each in [*sent[1:], b"more"]
            ]


@pytest.mark.parametrize("to_end", [64, 128, 4096])
@pytest.mark.parametrize("rounds", [1, 2**40 // CAPACITY])
def test_a_record_that_does_not_fit_before_the_end_is_padded(to_end: int, rounds: int) -> None:
    with ring() as made:
        begin = rounds * made.capacity - to_end
        made.begin_at(begin)
        assert made.writer.try_write(CODEC, body(to_end))
        assert header(made, begin)[:2] == (to_end - layout.RECORD_HEADER, layout.KIND_PADDING)
        assert header(made, rounds * made.capacity)[:2] == (to_end, layout.KIND_MESSAGE)
        assert made.read() == (body(to_end), [])
        assert made.consumed() == made.published == begin + to_end + layout.record_stride(to_end)


def test_a_record_that_fits_exactly_is_not_padded() -> None:
    with ring() as made:
        made.begin_at(made.capacity - 128)
        assert made.writer.try_write(CODEC, body(128 - layout.RECORD_HEADER))
        assert made.published == made.capacity
        assert made.read() == (body(96), [])


@pytest.mark.parametrize("free", [8192 - 64, 8192, 8192 + 64])
def test_padding_and_a_cancel_need_room_too(free: int) -> None:
    """4096 bytes before the end, a record of 4096 + 64 after it, and 64 to cancel."""
    with ring() as made:
        made.begin_at(2 * made.capacity - 4096)
        unread = made.published + free + 64 - made.capacity
        made.words.store64(layout.reader_line(0) + layout.READER_CONSUMED, unread)
        made.words.store64(layout.RING_GATE, unread)
        assert made.writer.try_write(CODEC, body(4096)) == (free >= 8192 + 64)
        assert made.published - unread <= made.capacity - 64


def test_out_of_band_buffers_come_back_apart() -> None:
    with ring(2) as made:
        made.write(b"main", buffers=[body(10), b"", body(3000)])
        for reader in range(2):
            assert made.read(reader) == (b"main", [body(10), b"", body(3000)])


def drained_write(made: Ring, seen: list[object], *main: bytes, buffers: list[bytes]) -> int:
    """Write a message of any size while the readers drain; how often it had to wait."""
    waits = 0

    def drain(need: int) -> None:
        nonlocal waits
        waits += 1
        for reader in range(made.n_readers):
            message = made.read(reader)
            if message is not None:
                seen.append((reader, message))
        assert made.writer.has_room(need)

    views = [memoryview(each) for each in buffers]
    made.writer.write(CODEC, main, views, drain)
    return waits


@pytest.mark.parametrize("start", [0, CAPACITY - 64, CAPACITY - 128, CAPACITY - 8000])
@pytest.mark.parametrize("size", [CAPACITY // 8, CAPACITY, 5 * CAPACITY + 77])
def test_a_message_of_any_size_streams_through(start: int, size: int) -> None:
    with ring(2) as made:
        made.begin_at(start)
        seen: list[object] = []
        parts = [body(size // 2, 1), body(size // 3, 2), body(7, 3)]
        waits = drained_write(made, seen, b"ma", b"in", buffers=parts)
        if size > made.capacity:
            assert waits
        assert seen == []
        for reader in range(2):
            assert made.read(reader) == (b"main", parts)
            assert made.read(reader) is None


def test_fragments_are_kept_between_calls() -> None:
    with ring() as made:
        reads = []

        def wait(need: int) -> None:
            while (record := made.readers[0].peek()) is not None:
                reads.append(record.kind)
                assert made.read() is None

        made.writer.write(CODEC, [body(3 * CAPACITY)], [], wait)
        assert reads[0] == layout.KIND_MESSAGE
        assert set(reads[1:]) == {layout.KIND_FRAGMENT}
        assert made.read() == (body(3 * CAPACITY), [])


def test_a_message_cut_short_is_not_handed_out() -> None:
    with ring(2) as made:
        assert made.read(0) is None
        with pytest.raises(NoRoomError):
            made.write(body(2 * CAPACITY))
        assert made.published <= made.capacity
        for reader in range(2):
            assert made.read(reader) is None
            assert made.consumed(reader) == made.published
        made.write(b"next")
        for reader in range(2):
            assert made.read(reader) == (b"next", [])


def test_there_is_always_room_to_cancel() -> None:
    large = body(2 * CAPACITY)
    with ring() as made:
        for turn in range(300):
            with pytest.raises(NoRoomError):
                made.write(large)
            assert made.published - made.consumed() <= made.capacity
            if turn % 3:
                assert made.read() is None
                assert made.published == made.consumed()
        assert made.read() is None
        made.write(b"next")
        assert made.read() == (b"next", [])


def test_a_small_message_that_finds_no_room_leaves_no_trace() -> None:
    with ring() as made:
        while made.writer.try_write(CODEC, body(1000)):
            pass
        before = (made.published, made.writer.sequence)
        with pytest.raises(NoRoomError):
            made.write(body(1000))
        assert (made.published, made.writer.sequence) == before


def fail() -> None:
    raise KeyError("not delivered elsewhere")


@pytest.mark.parametrize("size", [10, 20_000])
def test_what_fails_before_the_last_record_cancels(size: int) -> None:
    with ring() as made:
        with pytest.raises(KeyError):
            made.writer.write(CODEC, [body(size)], [], lambda _: None, before_last=fail)
        assert made.read() is None
        made.write(b"next")
        assert made.read() == (b"next", [])


def test_an_interrupt_before_the_first_record_cancels() -> None:
    withdrawn: list[bool] = []
    with ring() as made:
        begin = made.writer._begin_message

        def interrupted() -> None:
            begin()
            raise KeyboardInterrupt

        made.writer._begin_message = interrupted
        with pytest.raises(KeyboardInterrupt):
            made.writer.write(
                CODEC,
                [body(20_000)],
                [],
                lambda _: None,
                before_last=lambda: None,
                withdraw=lambda: withdrawn.append(True),
            )
        made.writer._begin_message = begin
        assert withdrawn == [True]
        assert made.read() is None
        assert made.writer.behind() == {1: 0}
        made.write(b"next")
        assert made.read() == (b"next", [])


def test_a_writer_that_died_amid_fragments_is_succeeded() -> None:
    with ring() as made:

        def die(need: int) -> None:
            made.read()
            raise SystemExit

        cancel: Callable[[], None] = made.writer._cancel
        made.writer._cancel = lambda: None
        with pytest.raises(SystemExit):
            made.writer.write(CODEC, [body(2 * CAPACITY)], [], die)
        made.writer._cancel = cancel
        assert made.read() is None
        made.writer = made.attach_writer()
        assert made.writer.try_write(CODEC, b"by the successor")
        assert made.read() == (b"by the successor", [])
        made.write(body(10_000))
        assert made.read() == (body(10_000), [])


def test_a_respawned_reader_goes_on_where_the_dead_one_stopped() -> None:
    with ring(2) as made:
        for text in (b"one", b"two", b"three"):
            made.write(text)
        assert made.read(0) == (b"one", [])
        made.readers[0] = made.attach_reader(0)
        assert made.read(0) == (b"two", [])
        assert made.read(1) == (b"one", [])


def test_a_reader_that_comes_amid_fragments_skips_to_the_next_message() -> None:
    with ring() as made:

        def respawn(need: int) -> None:
            made.read()
            made.readers[0] = made.attach_reader(0)
            made.read()

        made.writer.write(CODEC, [body(2 * CAPACITY)], [], respawn)
        made.write(b"next")
        assert made.read() == (b"next", [])
        assert made.read() is None


def test_a_reader_that_left_gates_nobody() -> None:
    with ring(2) as made:
        made.readers[0].detach()
        assert made.writer.has_left(0)
        assert not made.writer.has_no_readers()
        for turn in range(100):
            made.write(body(3000, turn))
            assert made.read(1) == (body(3000, turn), [])
        assert made.writer.behind() == {2: 0}


def test_a_ring_that_all_have_left() -> None:
    with ring(2) as made:
        for reader in made.readers:
            reader.detach()
        assert made.writer.has_no_readers()
        assert made.writer.behind() == {}
        made.begin_at(0)
        for reader in made.readers:
            reader.detach()
        while made.writer.try_write(CODEC, body(3000)):
            pass
        assert not made.writer.has_room(layout.RECORD_ALIGN * 200)
        assert made.writer.slow_readers(made.capacity) == []


def test_a_reader_that_joins_again_begins_with_the_next_message() -> None:
    with ring(2) as made:
        made.write(b"one")
        made.readers[0].detach()
        for _ in range(40):
            made.write(body(3000))
            made.read(1)
        made.readers[0] = made.attach_reader(0)
        assert not made.readers[0].readable
        made.write(b"next")
        assert made.read(0) == (b"next", [])
        assert made.writer.behind()[1] == 0


def test_a_reader_that_joins_again_is_behind_by_nothing() -> None:
    with ring(2) as made:
        made.readers[0].detach()
        for _ in range(10):
            made.write(b"missed")
        made.readers[0] = made.attach_reader(0)
        assert made.writer.behind() == {1: 0, 2: 10}


class Racing:
    """Words in which much happens right after the first look at one of them."""

    def __init__(self, words: Words, offset: int, meanwhile: Callable[[], None]) -> None:
        self._words = words
        self._offset = offset
        self._meanwhile: Callable[[], None] | None = meanwhile

    def __getattr__(self, name: str) -> object:
        return getattr(self._words, name)

    def load64(self, offset: int) -> int:
        value = self._words.load64(offset)
        if offset == self._offset and self._meanwhile is not None:
            meanwhile, self._meanwhile = self._meanwhile, None
            meanwhile()
        return value


def test_a_writer_that_goes_on_while_a_reader_joins_again_overwrites_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Between the reader's look at ``published`` and its claim, whole rings go by."""

    def go_on() -> None:
        for turn in range(60):
            made.write(body(3000, turn))
            assert made.read(1) == (body(3000, turn), [])

    with ring(2) as made:
        made.readers[0].detach()
        racing = Racing(made.words, layout.RING_PUBLISHED, go_on)
        real = FastReader
        monkeypatch.setattr(ring_reader, "FastReader", lambda _, *others: real(made.words, *others))
        monkeypatch.setattr(made.segment, "words", racing)
        made.readers[0] = made.attach_reader(0)
        assert made.published > 2 * made.capacity
        assert made.published - made.consumed(0) <= made.capacity
        made.write(b"next")
        assert made.read(0) == (b"next", [])


def test_a_reader_that_joins_again_while_the_writer_looks_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It joins after the writer has found it gone, before the writer acts on that."""

    def join() -> None:
        made.readers[0] = made.attach_reader(0)

    with ring(2) as made:
        made.readers[0].detach()
        while made.writer.try_write(CODEC, body(3000)):
            pass
        while made.read(1) is not None:
            pass
        line = layout.reader_line(0) + layout.READER_CONSUMED
        monkeypatch.setattr(made.writer, "_words", Racing(made.words, line, join))
        begun = made.published
        assert made.writer.has_room(3000)
        assert made.consumed(0) == begun
        assert made.words.load64(layout.RING_GATE) == begun


def test_behind_counts_messages_not_records() -> None:
    with ring(2) as made:
        made.write(body(20_000))
        made.write(b"small")
        assert made.writer.behind() == {1: 2, 2: 2}
        assert made.read(0) == (body(20_000), [])
        assert made.writer.behind() == {1: 1, 2: 2}
        with pytest.raises(NoRoomError):
            made.write(body(CAPACITY))
        while made.read(0) is not None:
            pass
        assert made.writer.behind() == {1: 0, 2: 3}


def test_laggards_are_those_that_keep_room_from_being_free() -> None:
    with ring(2) as made:
        while made.writer.try_write(CODEC, body(1000)):
            pass
        assert made.writer.slow_readers(2048) == [1, 2]
        while made.read(1) is not None:
            pass
        assert made.writer.slow_readers(2048) == [1]
        assert made.writer.slow_readers(0) == []


def test_closing_lets_readers_finish() -> None:
    with ring() as made:
        made.write(b"last")
        made.writer.close()
        assert made.readers[0].writer_closed
        assert made.readers[0].readable
        assert made.read() == (b"last", [])
        assert not made.readers[0].readable


def test_peek_view_and_advance() -> None:
    with ring() as made:
        made.begin_at(made.capacity - 64)
        made.write(body(500))
        reader = made.readers[0]
        record = reader.peek()
        assert record is not None and record == reader.peek()
        assert record.is_whole_message
        assert reader.view(record) == body(500)
        reader.advance(record)
        assert reader.peek() is None
        assert made.consumed() == made.published


def test_most_buffers_fit_the_smallest_ring() -> None:
    with ring() as made:
        made.write(b"main", buffers=[b"x"] * MAX_BUFFERS)
        assert made.read() == (b"main", [b"x"] * MAX_BUFFERS)
        with pytest.raises(ValueError, match="too many"):
            made.write(b"main", buffers=[b""] * 5000)
        made.write(b"next")
        assert made.read() == (b"next", [])


def test_every_record_rings_the_readers_and_every_read_the_writer() -> None:
    with ring(2) as made:
        board = made.boards[0]
        bells = [board.eventcount_offset(member) for member in range(3)]
        for bell in bells:
            board.words.add32(bell + layout.EVENTCOUNT_WAITERS, 1)

        def rung() -> list[int]:
            return [board.words.load32(bell) for bell in bells]

        assert made.writer.try_write(CODEC, b"small")
        assert rung() == [0, 1, 1]
        made.write(b"general")
        assert rung() == [0, 2, 2]
        made.read(0)
        assert rung() == [1, 2, 2]
        made.readers[1].detach()
        assert rung() == [2, 2, 2]
        made.writer.close()
        assert rung() == [2, 3, 3]
        for bell in bells:
            board.words.add32(bell + layout.EVENTCOUNT_WAITERS, -1)


def test_reading_and_writing_is_progress() -> None:
    with ring() as made:
        board = made.boards[0]
        at = [board.slot_offset(member) + layout.MEMBER_PROGRESS for member in (0, 1)]
        for offset in at:
            board.words.store64(offset, 1)
        made.writer.try_write(CODEC, b"small")
        assert board.words.load64(at[0]) > 1
        assert board.words.load64(at[1]) == 1
        made.read()
        assert board.words.load64(at[1]) > 1


def test_small_messages_are_seen_as_operations() -> None:
    """A slow reader is named with what it did last, also if it never had to wait."""
    with ring() as made:
        made.boards[1].record_begin("all_reduce")
        made.writer.try_write(CODEC, b"small")
        made.readers[0].try_read(0, begins=True)
        made.readers[0].try_read(0)
        writer, reader = made.boards[0].status()
        assert (writer.operation, writer.sequence) == ("enqueue", 1)
        assert (reader.operation, reader.sequence) == ("dequeue", 2)


@pytest.mark.parametrize("total", [0, 1 << 62, 1 << 63])
def test_a_record_of_a_size_that_cannot_be_is_skipped(total: int) -> None:
    with ring() as made:
        made.write(b"damaged", buffers=[b"x"])
        record = layout.data_offset(1)
        made.words.store64(record + layout.RECORD_TOTAL, total)
        made.write(b"whole")
        with pytest.raises(MessageDecodeError, match="message 1 of rank 0"):
            made.read()
        assert made.read() == (b"whole", [])


def reads_a_record_that_ends_behind_the_ring(buffers: list[bytes]) -> None:
    with ring() as made:
        made.write(b"damaged", buffers=buffers)
        record, size = layout.data_offset(1), 4 * CAPACITY
        made.words.write(record + layout.RECORD_SIZE, struct.pack("<I", size))
        made.words.store64(record + layout.RECORD_TOTAL, size)
        with pytest.raises(MessageDecodeError, match="message 1 of rank 0"):
            made.read()


@pytest.mark.parametrize("buffers", [[], [b"x"]])
def test_a_record_that_ends_behind_the_ring_is_not_read(buffers: list[bytes]) -> None:
    in_a_child(lambda: reads_a_record_that_ends_behind_the_ring(buffers))
