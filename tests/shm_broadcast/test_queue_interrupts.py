"""Ends that are interrupted, aborted or killed amid a message: no message is torn, none is lost."""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import resource
import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

import shm_broadcast
from shm_broadcast import Board, GroupClosedError, MessageDecodeError, layout
from shm_broadcast.queue.reader import LocalReader
from shm_broadcast.ring.buffers import PLACED_BYTES
from tests.interruptions import Interruption, interruptions
from tests.patience import PATIENCE_SECONDS
from tests.shm_broadcast.queues import LIMIT, Ends, Running, ends
from tests.shm_broadcast.rings import CODEC, Ring, ring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

PARTS = (b"", b"m" * 100, memoryview(b"b" * 30_000))
TOTAL = 30_100
LARGEST = 8192 - layout.RECORD_HEADER


def fast(end: Any) -> Any:
    return end._fast


# --- long messages in C ----------------------------------------------------------------------


def test_no_record_of_a_long_message_is_written_after_an_abort() -> None:
    with ring() as made:
        made.boards[1].abort("stop")
        fast(made.writer).write_parts(CODEC, LARGEST, PARTS, 1000)
        assert fast(made.writer).moved == 0
        assert made.published == 0


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


def test_a_message_whose_records_do_not_fit_it_is_skipped() -> None:
    with ring() as made:
        made.write(b"m" * 40_000)
        total = layout.data_offset(1) + layout.RECORD_TOTAL
        made.segment.memory[total] = 0  # 0x9C40 becomes 0x9C00: less than its records bring
        with pytest.raises(MessageDecodeError, match="another message"):
            made.read()
        made.write(b"next")
        assert made.read() == (b"next", [])


# --- a handler raises while records move -----------------------------------------------------


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


def test_acquire_read_returns_the_interrupted_message_first() -> None:
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


# --- a handler raises anywhere ---------------------------------------------------------------


@contextmanager
def on_signal(handle: Callable[[], object]) -> Iterator[None]:
    def handler(_: int, __: FrameType | None) -> None:
        handle()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


MESSAGES = {
    "small": (1, False),
    "of several records": (b"x" * 20_000, False),
    "of several buffers": ([np.ones(17_000, np.uint8)] * 2, False),
    "in blocks": ([np.ones(PLACED_BYTES, np.uint8)] * 2, True),
}


@pytest.mark.parametrize(("message", "zero_copy"), MESSAGES.values(), ids=MESSAGES)
def test_a_call_that_is_interrupted_anywhere_does_no_harm(message: Any, zero_copy: bool) -> None:
    with ends(zero_copy=zero_copy) as made:

        def send() -> None:
            made.writer.enqueue(message, LIMIT)

        def look() -> None:
            with made.reader.acquire_read(LIMIT):
                pass

        def assert_next_arrives(number: int) -> None:
            """Behind whole messages only."""
            made.writer.enqueue(f"number {number}", LIMIT)
            while not isinstance(came := made.reader.dequeue(LIMIT), str):
                assert np.array_equal(came, message)
            assert came == f"number {number}"

        places = 0
        for places, _ in enumerate(interruptions(send, shm_broadcast), 1):
            assert_next_arrives(places)
        for read in (lambda: made.reader.dequeue(LIMIT), look):
            assert_next_arrives(0)
            for number, _ in enumerate(interruptions(read, shm_broadcast)):
                assert_next_arrives(number)
                send()
        writer = made.writer._writer
        assert writer is not None and places > 5
        if writer._blocks is not None:
            assert all(map(writer._blocks._is_free, writer._blocks._blocks))


def test_an_interrupt_of_a_spinning_reader_leaves_the_message() -> None:
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        raise Interruption

    def send(made: Ends, number: int) -> None:
        time.sleep(0.02)  # the reader looks for a second, without Python's lock
        signal.pthread_kill(main, signal.SIGALRM)
        made.writer.enqueue(number, LIMIT)

    with on_signal(interrupt), ends(spin_seconds=1.0) as made:
        for number in range(10):
            sending = Running(send, made, number)
            with pytest.raises(Interruption):
                made.reader.dequeue(LIMIT)
            assert made.reader.dequeue(LIMIT) == number
            sending.result()


def test_a_dequeue_interrupted_at_its_first_look_has_ended() -> None:
    with ends() as made:
        assert isinstance(made.reader._reader, LocalReader)
        ring = made.reader._reader._ring
        look = ring.read_small

        def interrupted(spin_ns: int, begins: bool) -> None:
            assert look(spin_ns, begins) is None
            raise Interruption

        ring.read_small = interrupted
        with pytest.raises(Interruption):
            made.reader.dequeue(LIMIT)
        (past,) = made.boards[1].recorded(1)
        assert (past.verb, past.outcome) == ("dequeue", "failed")


# --- a handler calls the queue ---------------------------------------------------------------


class Reentrant:
    """Calls ``call`` while it is pickled."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        self._call()
        return str, ("pickled",)


def test_a_reentrant_call_is_refused() -> None:
    with ends() as made:
        with pytest.raises(RuntimeError, match="in it already"):
            made.writer.enqueue(Reentrant(lambda: made.writer.enqueue(1)), LIMIT)
        made.writer.enqueue(2, LIMIT)
        with (
            made.reader.acquire_read(LIMIT),
            pytest.raises(RuntimeError, match="in it already"),
        ):
            made.reader.dequeue()
        made.writer.enqueue(3, LIMIT)
        assert made.reader.dequeue(LIMIT) == 3


@pytest.mark.parametrize("zero_copy", [False, True])
def test_a_handler_may_shut_the_interrupted_queue_down(zero_copy: bool) -> None:
    with ends(zero_copy=zero_copy) as made:
        made.fill()
        with on_signal(made.writer.shutdown):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(GroupClosedError):
                made.writer.enqueue(b"x" * 20_000, PATIENCE_SECONDS)
    with ends(zero_copy=zero_copy) as made, on_signal(made.reader.shutdown):
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(GroupClosedError):
            made.reader.dequeue(PATIENCE_SECONDS)
        with pytest.raises(GroupClosedError):
            made.fill()


def test_a_block_of_acquire_read_may_end_in_another_thread() -> None:
    with ends() as made:
        made.writer.enqueue(1, LIMIT)
        showing = made.reader.acquire_read(LIMIT)
        showing.__enter__()
        Running(showing.__exit__, None, None, None).result()
        made.writer.enqueue(2, LIMIT)
        assert made.reader.dequeue(LIMIT) == 2


def test_a_handler_may_ask_for_the_status_of_all() -> None:
    with Board.create(2, 0) as board, Board.attach(board.handle(), 1):
        seen: list[str] = []
        with on_signal(lambda: seen.append(board.status()[1].state)):
            signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.00037)
            while len(seen) < 300:
                board.status()
        assert set(seen) == {"idle"}
