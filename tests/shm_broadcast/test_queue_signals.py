"""Signal handlers that raise in the middle of a queue's calls, and those that call the queue."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shm_broadcast
from shm_broadcast.errors import GroupClosedError
from shm_broadcast.queue.reader import LocalReader
from shm_broadcast.ring.buffers import PLACED_BYTES, BlockWriter, PlacedBuffer
from shm_broadcast.state import board as board_module
from shm_broadcast.state.board import Board
from tests.interruptions import Interruption, interruptions
from tests.patience import PATIENCE_SECONDS
from tests.shm_broadcast.queues import LIMIT, Ends, Running, ends

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


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


def interrupted(call: Callable[[], object], times: int) -> None:
    """Interrupt ``call``, made again and again, so often, each time somewhere else."""
    inside = False

    def interrupt() -> None:
        if inside:
            raise Interruption

    with on_signal(interrupt):
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.00037)
        while times:
            try:
                inside = True
                call()
                inside = False
            except Interruption:
                inside = False
                times -= 1


def test_interrupts_leave_nobody_the_turn() -> None:
    with ends() as made:

        def pass_on() -> None:
            made.writer.enqueue(1, LIMIT)
            made.reader.dequeue(LIMIT)

        interrupted(pass_on, 300)
        made.writer.enqueue("last", LIMIT)
        while made.reader.dequeue(LIMIT) != "last":
            pass


class Passing:
    """Sends ``message``, reads it, and sees what comes after it."""

    def __init__(self, made: Ends, message: Any) -> None:
        self._made = made
        self._message = message
        self._number = 0

    def send(self) -> None:
        self._made.writer.enqueue(self._message, LIMIT)

    def read(self) -> None:
        self._made.reader.dequeue(LIMIT)

    def look(self) -> None:
        with self._made.reader.acquire_read(LIMIT):
            pass

    def goes_on(self) -> None:
        """What is enqueued next arrives, behind whole messages only."""
        self._number += 1
        self._made.writer.enqueue(f"number {self._number}", LIMIT)
        while True:
            came = self._made.reader.dequeue(LIMIT)
            if isinstance(came, str):
                assert came == f"number {self._number}"
                return
            assert np.array_equal(came, self._message)


MESSAGES = {
    "small": (1, False),
    "of several records": (b"x" * 20_000, False),
    "of several buffers": ([np.ones(17_000, np.uint8)] * 2, False),
    "in blocks": ([np.ones(PLACED_BYTES, np.uint8)] * 2, True),
}


@pytest.mark.parametrize(("message", "zero_copy"), MESSAGES.values(), ids=MESSAGES)
def test_a_call_that_is_interrupted_anywhere_does_no_harm(message: Any, zero_copy: bool) -> None:
    with ends(zero_copy=zero_copy) as made:
        passing = Passing(made, message)
        places = 0
        for _ in interruptions(passing.send, shm_broadcast):
            passing.goes_on()
            places += 1
        for reading in (passing.read, passing.look):
            passing.goes_on()
            for _ in interruptions(reading, shm_broadcast):
                passing.goes_on()
                passing.send()
        writer = made.writer._writer
        assert writer is not None and places > 5
        if writer._blocks is not None:
            assert all(map(writer._blocks._is_free, writer._blocks._blocks))


def test_an_interrupt_while_a_message_is_looked_for_leaves_it_in_the_ring() -> None:
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


class Reentrant:
    """Calls ``call`` while it is pickled."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __reduce__(self) -> Any:
        self._call()
        return str, ("pickled",)


def test_a_thread_that_is_in_the_queue_is_refused_and_does_not_wait_for_itself() -> None:
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
def test_a_handler_may_shut_down_the_queue_whose_call_it_interrupts(zero_copy: bool) -> None:
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


def test_a_block_that_shows_a_message_may_end_in_another_thread() -> None:
    with ends() as made:
        made.writer.enqueue(1, LIMIT)
        showing = made.reader.acquire_read(LIMIT)
        showing.__enter__()
        Running(showing.__exit__, None, None, None).result()
        made.writer.enqueue(2, LIMIT)
        assert made.reader.dequeue(LIMIT) == 2


def test_an_interrupt_on_joining_a_board_leaves_the_slot_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> None:
        raise Interruption

    with Board.create(2, 0) as board:
        with monkeypatch.context() as changed:
            changed.setattr(board_module, "forget_totals", interrupt)
            with pytest.raises(Interruption):
                Board.attach(board.handle(), 1)
        with Board.attach(board.handle(), 1):
            assert board.status()[1].state == "idle"
            with pytest.raises(ValueError, match="has joined already, as pid"):
                Board.attach(board.handle(), 1)


def test_a_handler_may_ask_for_the_status_of_all() -> None:
    with Board.create(2, 0) as board, Board.attach(board.handle(), 1):
        seen: list[str] = []
        with on_signal(lambda: seen.append(board.status()[1].state)):
            signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.00037)
            while len(seen) < 300:
                board.status()
        assert set(seen) == {"idle"}


def test_an_interrupt_while_blocks_are_filled_leaves_them_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = BlockWriter.place
    placed = 0

    def interrupted(self: BlockWriter, buffer: memoryview) -> PlacedBuffer | None:
        nonlocal placed
        placed += 1
        if placed == 2:
            raise Interruption
        return place(self, buffer)

    large = bytearray(PLACED_BYTES)
    with ends(zero_copy=True) as made:
        with monkeypatch.context() as patch:
            patch.setattr(BlockWriter, "place", interrupted)
            with pytest.raises(Interruption):
                made.writer.enqueue([np.frombuffer(large, np.uint8), np.ones(PLACED_BYTES)])
        writer = made.writer._writer
        assert writer is not None and writer._blocks is not None
        assert [writer._blocks._is_free(block) for block in writer._blocks._blocks] == [True]


def test_what_came_while_a_reader_was_away_is_free_once_it_is_back() -> None:
    with ends(2, zero_copy=True) as made:
        made.readers[1].shutdown()
        made.writer.enqueue(np.ones(PLACED_BYTES, np.uint8), LIMIT)
        made.reader.dequeue(LIMIT)
        made.readers[1] = made.attach(made.boards[2])
        writer = made.writer._writer
        assert writer is not None and writer._blocks is not None
        (block,) = writer._blocks._blocks
        assert writer._blocks._is_free(block)
        made.writer.enqueue(np.ones(PLACED_BYTES, np.uint8), LIMIT)
        assert not writer._blocks._is_free(block)
        assert [reader.dequeue(LIMIT).sum() for reader in made.readers] == [PLACED_BYTES] * 2


def test_a_dequeue_that_is_interrupted_at_its_first_look_has_ended() -> None:
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
