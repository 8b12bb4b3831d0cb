"""Deadlines: they hold, name who is behind, and lose nothing."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shm_broadcast import layout
from shm_broadcast.deadline import NEVER, Deadline
from shm_broadcast.errors import GroupTimeoutError
from tests.patience import until
from tests.shm_broadcast.queues import CAPACITY, LIMIT, Ends, Running, ends, sleeps

if TYPE_CHECKING:
    from shm_broadcast.ring.writer import RingWriter


LARGE = b"large " * CAPACITY
"""Six rings."""


@pytest.mark.parametrize("timeout", [0, 0.02, 0.2])
def test_an_empty_queue_times_out(timeout: float) -> None:
    with ends() as made:
        made.boards[0].record_begin("load_weights")
        began = time.monotonic()
        with pytest.raises(GroupTimeoutError, match=f"dequeue: timed out after {timeout:g}") as e:
            made.reader.dequeue(timeout)
        assert timeout <= time.monotonic() - began < timeout + 5
        (writer,) = e.value.waiting_for
        assert (writer.rank, writer.operation) == (0, "load_weights")


def test_what_is_no_time_is_refused() -> None:
    bad = float("nan")
    with ends() as made:
        with pytest.raises(ValueError, match="timeout"):
            made.reader.dequeue(bad)
        made.fill()
        with pytest.raises(ValueError, match="timeout"):
            made.writer.enqueue(b"x" * 1000, bad)


def test_a_deadline_may_be_given_for_many_calls() -> None:
    with ends() as made:
        deadline = Deadline.after(0.05)
        with pytest.raises(GroupTimeoutError):
            made.reader.dequeue(deadline)
        made.writer.enqueue(1)
        assert made.reader.dequeue(deadline) == 1


def test_a_dequeue_that_timed_out_consumed_nothing() -> None:
    with ends() as made:
        for number in range(20):
            with pytest.raises(GroupTimeoutError):
                made.reader.dequeue(0.001)
            made.writer.enqueue(number)
            made.writer.enqueue(-number)
            assert made.reader.dequeue(LIMIT) == number
            assert made.reader.dequeue(LIMIT) == -number


def test_a_dequeue_that_timed_out_amid_fragments_goes_on_with_them() -> None:
    """Member 2 does not read, so the message stops when the ring is full of it."""
    with ends(2) as made:
        patient, other = made.readers
        writing = Running(made.writer.enqueue, LARGE, LIMIT)
        for _ in range(3):
            with pytest.raises(GroupTimeoutError):
                patient.dequeue(0.05)
        late = Running(other.dequeue, LIMIT)
        assert patient.dequeue(LIMIT) == LARGE
        assert late.result() == LARGE
        writing.result()
        made.writer.enqueue("next")
        assert patient.dequeue(LIMIT) == other.dequeue(LIMIT) == "next"


def test_the_same_with_out_of_band_buffers_and_another_kind_of_read() -> None:
    with ends(2) as made:
        patient, other = made.readers
        message: list[Any] = [np.arange(100_000), "main", np.arange(50_000)]
        for _ in range(2):
            writing = Running(made.writer.enqueue, message, LIMIT)
            with pytest.raises(GroupTimeoutError):
                patient.dequeue(0.05)
            with pytest.raises(GroupTimeoutError), patient.acquire_read(0.05):
                pass
            late = Running(other.dequeue, LIMIT)
            got = patient.dequeue(LIMIT)
            assert np.array_equal(got[0], message[0]) and np.array_equal(got[2], message[2])
            late.result()
            writing.result()


def test_a_writer_that_pauses_between_fragments() -> None:
    """Each pause lasts until the reader has given up once more."""
    with ends() as made:
        pauses = timeouts = 0

        def pause(ring: RingWriter, need: int, deadline: Deadline) -> None:
            nonlocal pauses
            pauses += 1
            before = timeouts
            until(lambda: timeouts > before)
            original(ring, need, deadline)

        end: Any = made.writer._end
        original, end._wait_for_room = end._wait_for_room, pause
        writing = Running(made.writer.enqueue, b"z" * (2 * CAPACITY), LIMIT)
        until(lambda: pauses > 0)
        while True:
            try:
                assert made.reader.dequeue(0.01) == b"z" * (2 * CAPACITY)
                break
            except GroupTimeoutError:
                timeouts += 1
        writing.result()
        assert timeouts >= pauses >= 1


def test_an_enqueue_that_timed_out_names_who_is_behind_and_by_how_much() -> None:
    with ends(3) as made:
        count = made.fill()
        for _ in range(count):
            made.readers[1].dequeue(LIMIT)
        made.readers[0].dequeue(LIMIT)
        made.boards[1].record_begin("all_reduce")
        for _ in range(2):
            made.readers[2].dequeue(LIMIT)
        began = time.monotonic()
        with pytest.raises(GroupTimeoutError) as caught:
            made.writer.enqueue(b"x" * 8000, timeout=0.1)
        assert 0.1 <= time.monotonic() - began < 5
        late = {status.rank: status.operation for status in caught.value.waiting_for}
        assert late == {1: "all_reduce", 3: "dequeue"}
        text = str(caught.value)
        assert f"rank 1 is {count - 1} messages behind" in text
        assert f"rank 3 is {count - 2} messages behind" in text
        assert "rank 2 is" not in text


def test_an_enqueue_that_timed_out_delivers_nothing() -> None:
    with ends(2) as made:
        count = made.fill()
        for size in (10_000, 30_000, 10 * CAPACITY):
            with pytest.raises(GroupTimeoutError):
                made.writer.enqueue(b"y" * size, timeout=0.01)
        for reader in made.readers:
            assert [reader.dequeue(LIMIT) for _ in range(count)] == [b"x" * 1000] * count
            with pytest.raises(GroupTimeoutError):
                reader.dequeue(0.01)
        made.writer.enqueue("next")
        assert [reader.dequeue(LIMIT) for reader in made.readers] == ["next"] * 2


def test_an_enqueue_that_timed_out_amid_fragments_delivers_nothing() -> None:
    """One reader has most of the message when the writer gives up."""
    with ends(2) as made:
        eager, idle = made.readers
        for turn in range(3):
            reading = Running(eager.dequeue, LIMIT)
            with pytest.raises(GroupTimeoutError, match="rank 2"):
                made.writer.enqueue(LARGE, timeout=0.1)
            until(lambda: made.writer.behind() == {1: 0, 2: 1})
            assert not reading.ended(0.05)
            next_one = Running(idle.dequeue, LIMIT)
            made.writer.enqueue(turn, LIMIT)
            assert reading.result() == next_one.result() == turn


def test_timeouts_of_large_messages_never_use_up_the_ring() -> None:
    with ends(1) as made:
        for _ in range(200):
            with pytest.raises(GroupTimeoutError):
                made.writer.enqueue(LARGE, timeout=0)
            with pytest.raises(GroupTimeoutError):
                made.reader.dequeue(0)
        made.writer.enqueue("next", timeout=0)
        assert made.reader.dequeue(LIMIT) == "next"


def test_back_pressure_lets_go_as_soon_as_the_slowest_reader_reads() -> None:
    with ends(2) as made:
        count = made.fill()
        waiting = Running(made.writer.enqueue, b"x" * 8000, LIMIT)
        fast, slow = made.readers
        assert [fast.dequeue(LIMIT) for _ in range(count)]
        assert not waiting.ended(0.05)
        for _ in range(count):
            slow.dequeue(LIMIT)
        waiting.result()
        assert fast.dequeue(LIMIT) == slow.dequeue(LIMIT) == b"x" * 8000


def test_acquire_read_keeps_one_deadline() -> None:
    """Records that are no whole message come all the time, far beyond the deadline."""
    with ends() as made:
        ring = made.writer._end._ring
        assert ring is not None
        over = threading.Event()

        def cancel_again_and_again() -> None:
            for _ in range(200):
                if over.wait(0.1):
                    return
                ring._cancel()

        cancelling = Running(cancel_again_and_again)
        began = time.monotonic()
        with pytest.raises(GroupTimeoutError), made.reader.acquire_read(1.0):
            pass
        assert time.monotonic() - began < 10
        over.set()
        cancelling.result()


def held(made: Ends) -> tuple[threading.Event, Running]:
    """A thread that reads in an ``acquire_read`` block until the event is set."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with made.reader.acquire_read(LIMIT):
            entered.set()
            leave.wait(LIMIT)

    made.writer.enqueue("held")
    running = Running(hold)
    until(entered.is_set)
    return leave, running


def test_a_deadline_holds_while_another_thread_reads() -> None:
    with ends() as made:
        leave, running = held(made)
        made.writer.enqueue("next")
        began = time.monotonic()
        try:
            with pytest.raises(GroupTimeoutError, match="another thread"):
                made.reader.dequeue(0.1)
            with pytest.raises(GroupTimeoutError), made.reader.acquire_read(0.1):
                pass
            assert time.monotonic() - began < 5
        finally:
            leave.set()
        running.result()
        assert made.reader.dequeue(LIMIT) == "next"


def test_a_deadline_holds_while_another_thread_writes() -> None:
    with ends() as made:
        made.fill()
        writing = Running(made.writer.enqueue, b"x" * 20_000, LIMIT)
        until(lambda: sleeps(made.boards[0]))
        with pytest.raises(GroupTimeoutError, match="another thread"):
            made.writer.enqueue("second", timeout=0.1)
        made.reader.shutdown()
        with pytest.raises(Exception, match="closed the queue"):
            writing.result()


def test_threads_that_read_one_end_share_its_messages() -> None:
    with ends() as made:
        readings = [Running(made.reader.dequeue, LIMIT) for _ in range(4)]
        for number in range(4):
            made.writer.enqueue(number)
        assert sorted(reading.result() for reading in readings) == [0, 1, 2, 3]


def test_threads_that_write_one_end_keep_messages_whole() -> None:
    with ends() as made:

        def write(mark: int) -> None:
            for turn in range(30):
                made.writer.enqueue(bytes([mark]) * (turn * 700), LIMIT)

        writings = [Running(write, mark) for mark in range(3)]
        seen: list[list[int]] = [[], [], []]
        for _ in range(90):
            got = made.reader.dequeue(LIMIT)
            if got:
                assert got == got[:1] * len(got)
                seen[got[0]].append(len(got))
        for writing in writings:
            writing.result()
        assert seen == [[turn * 700 for turn in range(1, 30)]] * 3


def test_the_predicate_sees_a_writer_s_sequence_in_its_segment() -> None:
    with ends() as made:
        words = made.writer._ring.words
        for number in range(1, 4):
            made.writer.enqueue(number)
            assert words.load64(layout.RING_SEQUENCE) == number


def test_a_message_is_noted_after_its_encoding_and_before_any_reader_gets_it() -> None:
    with ends() as made:
        noted: list[bool] = []

        def note() -> None:
            noted.append(made.reader.readable())

        def fail() -> None:
            raise KeyError

        with pytest.raises(TypeError, match="cannot send"):
            made.writer.enqueue_noted(lambda: None, NEVER, note)
        assert noted == []
        with pytest.raises(KeyError):
            made.writer.enqueue_noted("dropped", NEVER, fail)
        made.writer.enqueue_noted("message", NEVER, note)
        assert noted == [False]
        assert made.reader.dequeue(LIMIT) == "message"
