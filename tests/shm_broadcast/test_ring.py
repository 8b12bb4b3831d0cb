"""The ring by hand: where records lie, which reader bounds the writer, what each reader gets."""

from __future__ import annotations

import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shm_broadcast import MessageDecodeError, layout
from shm_broadcast._native import FastReader
from shm_broadcast.ring import reader as ring_reader
from tests.forked import in_a_child
from tests.patience import until
from tests.shm_broadcast.rings import CAPACITY, CODEC, NoRoomError, Ring, ring

if TYPE_CHECKING:
    from collections.abc import Callable

    from shm_broadcast._native import Words

SIZES = st.one_of(
    st.integers(0, 200),
    st.sampled_from([CAPACITY // 8 - 32, CAPACITY // 8 - 31, CAPACITY // 4 - 32]),
    st.integers(0, CAPACITY + 100),
)

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("small"), SIZES),
        st.tuples(st.just("write"), SIZES, st.lists(SIZES, max_size=3)),
        st.tuples(st.just("read"), st.integers(0, 1)),
        st.tuples(st.just("respawn"), st.integers(0, 1)),
        st.tuples(st.just("leave"), st.integers(0, 1)),
    ),
    max_size=40,
)

LARGEST_SMALL = CAPACITY // 4 - layout.RECORD_HEADER
"""The largest body that goes in one record by the short path."""


def body(size: int, seed: int = 0) -> bytes:
    return bytes((seed + index) % 251 for index in range(size))


def header(ring: Ring, position: int) -> tuple[int, ...]:
    start = layout.data_offset(ring.n_readers) + position % ring.capacity
    return struct.unpack_from(layout.RECORD_FORMAT, ring.segment.memory, start)


# --- random histories against a list ---------------------------------------------------------


class History:
    """A ring beside what it should hold."""

    def __init__(self, made: Ring) -> None:
        self.ring = made
        self.finished: list[tuple[bytes, list[bytes]]] = []
        self.next = [0, 0]

    def content(self, size: int) -> bytes:
        return bytes([len(self.finished) % 256]) * size

    def small(self, size: int) -> None:
        if self.ring.writer.try_write(CODEC, self.content(size)):
            self.finished.append((self.content(size), []))

    def write(self, size: int, buffers: list[int]) -> None:
        message = self.content(size), [self.content(each) for each in buffers]
        try:
            self.ring.write(message[0], buffers=message[1])
        except NoRoomError:
            return
        self.finished.append(message)

    def read(self, reader: int) -> None:
        if self.ring.writer.has_left(reader):
            return
        message = self.ring.read(reader)
        if message is None:
            assert self.next[reader] == len(self.finished)
        else:
            assert message == self.finished[self.next[reader]]
            self.next[reader] += 1

    def respawn(self, reader: int) -> None:
        if self.ring.writer.has_left(reader):
            self.next[reader] = len(self.finished)
        self.ring.readers[reader] = self.ring.attach_reader(reader)

    def leave(self, reader: int) -> None:
        self.ring.readers[reader].detach()

    def check(self) -> None:
        for reader in range(2):
            if not self.ring.writer.has_left(reader):
                assert 0 <= self.ring.published - self.ring.consumed(reader) <= self.ring.capacity
        assert self.ring.published % layout.RECORD_ALIGN == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, CAPACITY // 64 - 1) | st.integers(0, 1 << 40), STEPS)
def test_each_reader_gets_every_finished_message_in_order(
    start: int, steps: list[tuple[str, int]]
) -> None:
    with ring(2) as made:
        made.begin_at(64 * start)
        history = History(made)
        for step, *arguments in steps:
            getattr(history, step)(*arguments)
            history.check()
        for reader in range(2):
            while made.readers[reader].readable and not made.writer.has_left(reader):
                history.read(reader)
            if not made.writer.has_left(reader):
                assert history.next[reader] == len(history.finished)


# --- records ---------------------------------------------------------------------------------


def test_a_small_message_is_one_record_and_others_are_refused_whole() -> None:
    with ring() as made:
        assert not made.writer.try_write(CODEC, body(LARGEST_SMALL + 1))
        assert (made.published, made.writer.sequence) == (0, 0)
        assert made.writer.try_write(CODEC, body(33))
        assert header(made, 0) == (33, layout.KIND_MESSAGE, CODEC, 0, 33, 1, 0)
        made.boards[1].abort("stop")
        assert not made.writer.try_write(CODEC, b"after")
        assert made.read() is None
        assert (made.published, made.consumed()) == (layout.record_stride(33), 0)


@pytest.mark.parametrize(
    ("main", "buffers"),
    [
        ((body(300), body(700, 300), b""), []),
        ((b"main" * 20, b"", b"part"), [b"x" * 9000, b"", b"y" * 20_000]),
    ],
    ids=["small", "long"],
)
def test_c_and_python_write_the_same_records(main: Any, buffers: list[bytes]) -> None:
    with ring(2) as one, ring(2) as other:
        for made in (one, other):
            made.begin_at(64 * 900)  # the ring ends within the long message's second record
        other.writer._fast = None
        if buffers:
            one.write(*main, buffers=buffers)
        else:
            assert one.writer.try_write(CODEC, b"".join(main))
        other.write(*main, buffers=buffers)
        assert one.published == other.published
        start = layout.data_offset(2)
        assert one.segment.memory[start:] == other.segment.memory[start:]


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


# --- messages that are cut short -------------------------------------------------------------


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


# --- readers that leave and join -------------------------------------------------------------


def test_a_reader_that_joins_amid_fragments_begins_with_the_next_message() -> None:
    with ring() as made:

        def respawn(need: int) -> None:
            made.read()
            made.readers[0] = made.attach_reader(0)
            made.read()

        made.writer.write(CODEC, [body(2 * CAPACITY)], [], respawn)
        made.write(b"next")
        assert made.read() == (b"next", [])
        assert made.read() is None


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


def test_a_writer_overwrites_nothing_while_a_reader_joins_again(
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


def test_a_writer_sees_a_reader_that_joins_while_it_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:

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


# --- what others see -------------------------------------------------------------------------


def test_every_record_notifies_the_readers_and_every_read_the_writer() -> None:
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


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_a_message_wakes_all_readers_that_sleep(n: int) -> None:
    def sleep(bell: int) -> None:
        words.add32(bell + layout.EVENTCOUNT_WAITERS, 1)
        while words.load32(bell) == 0:
            words.sleep_on(bell, 0, 30.0)

    with ring(n) as made:
        words = made.boards[0].words
        bells = [made.boards[0].eventcount_offset(1 + reader) for reader in range(n)]
        assert [words.load32(bell) for bell in bells] == [0] * n
        threads = [threading.Thread(target=sleep, args=(bell,)) for bell in bells]
        for thread in threads:
            thread.start()
        until(lambda: all(words.load32(bell + layout.EVENTCOUNT_WAITERS) for bell in bells))
        began = time.monotonic()
        assert made.writer.try_write(CODEC, b"small")
        for thread in threads:
            thread.join()
        assert time.monotonic() - began < 10


def test_a_small_message_is_progress_and_an_operation() -> None:
    """A slow reader is named with its last operation, also if it never waited."""
    with ring() as made:
        board = made.boards[0]
        at = [board.slot_offset(member) + layout.MEMBER_PROGRESS for member in (0, 1)]
        made.boards[1].record_begin("all_reduce")
        for offset in at:
            board.words.store64(offset, 1)
        made.writer.try_write(CODEC, b"small")
        assert board.words.load64(at[0]) > 1
        assert board.words.load64(at[1]) == 1
        made.readers[0].try_read(0, begins=True)
        assert board.words.load64(at[1]) > 1
        made.readers[0].try_read(0)
        writer, reader = board.status()
        assert (writer.operation, writer.sequence) == ("enqueue", 1)
        assert (reader.operation, reader.sequence) == ("dequeue", 2)


# --- damage ----------------------------------------------------------------------------------


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
