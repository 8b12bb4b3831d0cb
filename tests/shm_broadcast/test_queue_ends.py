"""How a queue ends: shut down from any thread, abandoned, replaced; and what is left of it."""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import numpy as np
import pytest
import torch

from shm_broadcast import layout, segment
from shm_broadcast.errors import (
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    PeerLostError,
    SharedMemoryError,
)
from shm_broadcast.queue.message_queue import MessageQueue
from shm_broadcast.segment import Segment
from shm_broadcast.state.board import Board
from tests.forked import in_a_child
from tests.patience import until
from tests.shm_broadcast.leaks import open_descriptors
from tests.shm_broadcast.queues import CAPACITY, LIMIT, Ends, Running, ends, sleeps
from tests.shm_broadcast.remote_peers import SECRET
from tests.shm_broadcast.test_board import bury

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def view(made: Ends) -> None:
    with made.reader.acquire_read(LIMIT):
        pass


def fill_and_enqueue(made: Ends) -> None:
    made.fill()
    made.writer.enqueue(b"x" * 20_000, LIMIT)


WAITS: dict[str, tuple[Callable[[Ends], Any], Callable[[Ends], Any]]] = {
    "dequeue": (lambda made: made.reader.dequeue(LIMIT), lambda made: made.reader),
    "acquire_read": (view, lambda made: made.reader),
    "enqueue": (fill_and_enqueue, lambda made: made.writer),
    "enqueue amid fragments": (
        lambda made: made.writer.enqueue(b"x" * (5 * CAPACITY), LIMIT),
        lambda made: made.writer,
    ),
}


def asleep_in(name: str, made: Ends) -> Running:
    """A thread that sleeps in one of the `WAITS`."""
    wait, end = WAITS[name]
    board = made.boards[0 if end(made).is_writer else 1]
    waiting = Running(wait, made)
    until(lambda: sleeps(board))
    return waiting


@pytest.mark.parametrize("name", WAITS)
def test_one_thread_shuts_down_while_another_waits(name: str) -> None:
    _, end = WAITS[name]
    with ends() as made:
        waiting = asleep_in(name, made)
        closing = Running(end(made).shutdown)
        with pytest.raises(GroupClosedError, match="shut down in this process"):
            waiting.result()
        closing.result()


@pytest.mark.parametrize("name", WAITS)
def test_an_abort_ends_every_wait(name: str) -> None:
    with ends() as made:
        waiting = asleep_in(name, made)
        made.boards[1].abort("stop")
        with pytest.raises(GroupAbortedError, match="stop"):
            waiting.result()


@contextmanager
def pair_beside(board: Board, n_local: int) -> Iterator[tuple[MessageQueue, MessageQueue]]:
    """A writer and a reader, over a ring or over a socket, that watch a board besides their own."""
    writer = MessageQueue(
        1, n_local, connect_ip="127.0.0.1", secret=SECRET, watch=board.check, writer_rank=5
    )
    reader = MessageQueue.create_from_handle(
        writer.export_handle(), 0, secret=SECRET, watch=board.check
    )
    try:
        ready = Running(reader.wait_until_ready, LIMIT)
        writer.wait_until_ready(LIMIT)
        ready.result()
        yield writer, reader
    finally:
        reader.shutdown()
        writer.shutdown()


def fill(queue: MessageQueue) -> None:
    while True:
        queue.enqueue(b"x" * 100_000, LIMIT)


@pytest.mark.parametrize("n_local", [1, 0], ids=["ring", "socket"])
@pytest.mark.parametrize("waits", ["reader", "writer"])
def test_an_abort_of_a_board_that_is_watched_ends_a_wait(waits: str, n_local: int) -> None:
    with Board.create(1, member=0, name="tp:0") as board, pair_beside(board, n_local) as pair:
        writer, reader = pair
        waiting = Running(reader.dequeue) if waits == "reader" else Running(fill, writer)
        assert not waiting.ended(within=0.2)
        board.abort("it broke")
        with pytest.raises(GroupAbortedError, match="it broke"):
            waiting.result()


def test_a_distant_writer_is_called_what_the_caller_calls_it() -> None:
    with Board.create(1, member=0) as board, pair_beside(board, n_local=0) as (writer, reader):
        writer.shutdown()
        with pytest.raises(GroupClosedError, match="rank 5"):
            reader.dequeue(LIMIT)


@pytest.mark.parametrize("name", WAITS)
def test_closing_the_board_ends_every_wait(name: str) -> None:
    _, end = WAITS[name]
    with ends() as made:
        waiting = asleep_in(name, made)
        made.boards[0 if end(made) is made.writer else 1].close()
        with pytest.raises(GroupClosedError, match=r"test .*has been closed"):
            waiting.result()


@pytest.mark.parametrize("name", WAITS)
def test_a_dead_peer_ends_every_wait(name: str) -> None:
    _, end = WAITS[name]
    with ends() as made:
        waiting = asleep_in(name, made)
        peer = 1 if end(made) is made.writer else 0
        made.boards[peer].record_begin("all_reduce")
        bury(made.boards[0], peer)
        with pytest.raises(
            PeerLostError, match=r"last seen in all_reduce #\d+, \d+\.\d s ago"
        ) as e:
            waiting.result()
        assert e.value.rank == peer


def test_nothing_more_is_done_after_shutdown() -> None:
    with ends() as made:
        made.writer.enqueue("unread")
        made.reader.shutdown()
        made.reader.shutdown()
        for call in (made.reader.dequeue, lambda: view(made)):
            with pytest.raises(GroupClosedError, match="in this process"):
                call()
        made.writer.shutdown()
        for message in ("small", b"x" * 100_000):
            with pytest.raises(GroupClosedError, match="in this process"):
                made.writer.enqueue(message)


def test_readers_get_what_a_closed_writer_left() -> None:
    with ends() as made:
        for number in range(3):
            made.writer.enqueue(number)
        made.writer.shutdown()
        assert [made.reader.dequeue(LIMIT) for _ in range(3)] == [0, 1, 2]
        for _ in range(2):
            with pytest.raises(GroupClosedError, match="the writer has shut the queue down"):
                made.reader.dequeue(LIMIT)


def test_readers_get_what_a_dead_writer_left() -> None:
    with ends() as made:
        made.writer.enqueue(1)
        made.writer.enqueue(b"x" * 30_000)
        bury(made.boards[0], 0)
        assert made.reader.dequeue(LIMIT) == 1
        assert made.reader.dequeue(LIMIT) == b"x" * 30_000
        with pytest.raises(PeerLostError, match="lost rank 0"):
            made.reader.dequeue(LIMIT)


def test_a_message_that_a_dead_writer_did_not_finish_is_not_handed_out() -> None:
    with ends() as made:
        ring: Any = made.writer._end._ring
        ring._cancel = lambda: None  # as if it had been killed
        with pytest.raises(GroupTimeoutError):
            made.writer.enqueue(b"x" * (3 * CAPACITY), timeout=0.01)
        bury(made.boards[0], 0)
        with pytest.raises(PeerLostError):
            made.reader.dequeue(LIMIT)


def test_a_reader_that_left_is_waited_for_no_more() -> None:
    with ends(2) as made:
        count = made.fill()
        waiting = Running(made.writer.enqueue, b"x" * 8000, LIMIT)
        for _ in range(count):
            made.readers[0].dequeue(LIMIT)
        assert not waiting.ended(0.05)
        made.readers[1].shutdown()
        waiting.result()
        assert made.readers[0].dequeue(LIMIT) == b"x" * 8000


def test_when_all_readers_have_left() -> None:
    with ends(2) as made:
        for reader in made.readers:
            reader.shutdown()
        with pytest.raises(GroupClosedError, match="every reader has closed the queue"):
            made.fill()


def test_shutdown_inside_a_block_of_acquire_read() -> None:
    with ends() as made:
        made.writer.enqueue("seen")
        made.writer.enqueue("not seen")

        def stop() -> None:
            with made.reader.acquire_read(LIMIT) as seen:
                assert len(seen)
                made.reader.shutdown()

        Running(stop).result()
        assert made.writer.behind() == {}  # it gates nobody


def test_shutdown_again_does_not_disturb_a_successor() -> None:
    with ends() as made:
        made.reader.shutdown()
        made.boards[1].close()
        with Board.attach(made.boards[0].handle(), 1) as board:
            successor = made.attach(board)
            made.writer.enqueue("for the successor")
            made.reader.shutdown()
            assert successor.dequeue(LIMIT) == "for the successor"
            successor.shutdown()


def test_a_late_reader_gets_everything() -> None:
    with Board.create(3, member=0) as board:
        writer = MessageQueue.on_board(board, 0, [1, 2], CAPACITY)
        for number in range(5):
            writer.enqueue(number)
        with pytest.raises(GroupTimeoutError, match="never joined"):
            writer.wait_until_ready(0.05)
        for member in (1, 2):
            with Board.attach(board.handle(), member) as late:
                reader = MessageQueue.attach(writer.export_handle(), late)
                assert [reader.dequeue(LIMIT) for _ in range(5)] == [0, 1, 2, 3, 4]
                reader.shutdown()
        writer.shutdown()


def test_a_successor_of_a_dead_reader_goes_on_where_it_stopped() -> None:
    with ends(2) as made:
        for number in range(4):
            made.writer.enqueue(number)
        assert made.readers[0].dequeue(LIMIT) == 0
        bury(made.boards[0], 1)
        with Board.attach(made.boards[0].handle(), 1) as board:
            successor = made.attach(board)
            assert [successor.dequeue(LIMIT) for _ in range(3)] == [1, 2, 3]
            assert [made.readers[1].dequeue(LIMIT) for _ in range(4)] == [0, 1, 2, 3]
            successor.shutdown()


def test_a_successor_of_a_writer() -> None:
    with ends() as made:
        made.writer.enqueue(1)
        bury(made.boards[0], 0)
        with Board.attach(made.boards[0].handle(), 0) as board:
            successor = made.attach(board)
            assert successor.is_writer
            successor.enqueue(2)
            assert [made.reader.dequeue(LIMIT) for _ in range(2)] == [1, 2]
            successor.shutdown()


def test_a_successor_of_a_writer_that_shut_down() -> None:
    with ends() as made:
        made.writer.enqueue(1)
        handle = made.writer.export_handle()
        kept = segment.Segment.attach(handle.ring)
        made.writer._end.close()
        made.boards[0].close()
        # The ring's creator still has it open; only the writing end has gone.
        with Board.attach(made.boards[1].handle(), 0) as board:
            successor = made.attach(board)
            successor.enqueue(2)
            assert [made.reader.dequeue(LIMIT) for _ in range(2)] == [1, 2]
            with pytest.raises(GroupTimeoutError):
                made.reader.dequeue(0.01)
            successor.shutdown()
        kept.close()


def test_a_block_that_went_with_a_writer_ends_the_queue_until_there_is_a_successor() -> None:
    with ends(zero_copy=True) as made:
        made.writer.enqueue([torch.zeros(1 << 20)])
        made.writer.enqueue("behind it")
        writer: Any = made.writer._end
        for block in writer._blocks._blocks:
            block.segment.close()
        bury(made.boards[0], 0)
        for _ in range(2):
            with pytest.raises(PeerLostError, match="lost rank 0"):
                made.reader.dequeue(LIMIT)
        with Board.attach(made.boards[0].handle(), 0) as board:
            successor = made.attach(board)
            successor.enqueue("of the successor")
            began = time.monotonic()
            long = mock.patch("shm_broadcast.ring.reader._ENDING_SECONDS", 2 * LIMIT)
            with long, pytest.raises(SharedMemoryError):  # at once: that writer is not to end
                made.reader.dequeue(LIMIT)
            assert time.monotonic() - began < LIMIT
            assert made.reader.dequeue(LIMIT) == "behind it"
            assert made.reader.dequeue(LIMIT) == "of the successor"
            successor.shutdown()
        made.reader.shutdown()  # so that nothing is kept for it


def test_blocks_that_a_reader_cannot_map_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    with ends(2, zero_copy=True) as made:
        made.writer.enqueue([np.full(1 << 20, mark, np.uint8) for mark in (1, 2)])
        (one, two), writer = made.readers[1].dequeue(LIMIT), cast("Any", made.writer._end)
        with monkeypatch.context() as patch:
            patch.setattr(Segment, "attach", mock.Mock(side_effect=SharedMemoryError("refused")))
            with pytest.raises(SharedMemoryError, match="refused"):
                made.reader.dequeue(LIMIT)
        assert (one[0], two[0]) == (1, 2)
        assert not any(map(writer._blocks._is_free, writer._blocks._blocks))  # the other reader's
        del one, two
        assert all(map(writer._blocks._is_free, writer._blocks._blocks))
        made.writer.enqueue([np.full(1 << 20, 3, np.uint8)])
        assert not all(map(writer._blocks._is_free, writer._blocks._blocks))
        assert made.reader.dequeue(LIMIT)[0][0] == 3


def to_drop() -> tuple[list[MessageQueue], list[MessageQueue]]:
    """A writer and a reader; to drop one, empty its list."""
    writer = MessageQueue(1, 1, writer_rank=5)
    return [writer], [MessageQueue.create_from_handle(writer.export_handle(), 0)]


def test_a_writer_that_is_dropped_is_lost_to_its_readers() -> None:
    writer, reader = to_drop()
    writer[0].enqueue("before")
    writer.clear()
    gc.collect()
    with reader[0]:
        assert reader[0].dequeue(LIMIT) == "before"
        for _ in range(2):
            with pytest.raises(PeerLostError, match=rf"lost rank 5 \(pid {os.getpid()}\)"):
                reader[0].dequeue(LIMIT)


def test_a_reader_that_is_dropped_is_lost_to_its_writer() -> None:
    writer, reader = to_drop()
    reader.clear()
    gc.collect()
    with writer[0]:
        with pytest.raises(PeerLostError, match=rf"lost rank 0 \(pid {os.getpid()}\)"):
            fill(writer[0])
        writer[0].remove_reader(0)
        with pytest.raises(GroupClosedError, match="every reader has closed the queue"):
            fill(writer[0])


def test_a_reader_that_sleeps_is_told_at_once_that_its_writer_was_dropped() -> None:
    writer, reader = to_drop()
    board: Any = reader[0]._board
    waiting = Running(reader[0].dequeue)
    until(lambda: sleeps(board))
    writer.clear()
    with pytest.raises(PeerLostError, match="lost rank 5"):
        waiting.result()
    reader[0].shutdown()


def test_a_dropped_reader_can_be_replaced() -> None:
    writer, reader = to_drop()
    with writer[0]:
        for number in range(3):
            writer[0].enqueue(number)
        assert reader[0].dequeue(LIMIT) == 0
        reader.clear()
        with MessageQueue.create_from_handle(writer[0].export_handle(), 0) as successor:
            assert [successor.dequeue(LIMIT) for _ in range(2)] == [1, 2]


def test_a_view_keeps_a_reader_that_is_dropped() -> None:
    writer, reader = to_drop()
    with writer[0]:
        writer[0].enqueue_encoded(b"seen")
        taking = reader.pop().acquire_read(LIMIT)
        gc.collect()
        with taking as seen:
            assert bytes(seen) == b"seen"


def test_what_a_forked_child_drops_is_not_lost() -> None:
    writer, reader = to_drop()

    def drop() -> None:
        writer.clear()
        reader.clear()
        gc.collect()

    in_a_child(drop)
    writer[0].enqueue("still here", LIMIT)
    assert reader[0].dequeue(LIMIT) == "still here"
    with pytest.raises(GroupTimeoutError):
        reader[0].dequeue(0.3)
    reader[0].shutdown()
    writer[0].shutdown()


def test_no_descriptor_is_left() -> None:
    before = open_descriptors()
    for zero_copy in (False, True):
        with ends(2, zero_copy=zero_copy) as made:
            writing = Running(made.writer.enqueue, torch.zeros(1 << 20), LIMIT)
            readings = [Running(reader.dequeue, LIMIT) for reader in made.readers]
            assert sum(reading.result().sum() for reading in readings) == 0
            writing.result()
            made.boards[0].lost()
    del made, writing, readings
    assert open_descriptors() == before


def test_a_queue_with_a_board_of_its_own_leaves_no_descriptor() -> None:
    before = open_descriptors()
    with MessageQueue(1, 1) as writer:
        with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            writer.enqueue(1)
            assert reader.dequeue(LIMIT) == 1
        del reader
    del writer
    assert open_descriptors() == before


def test_joining_that_fails_leaves_nothing() -> None:
    with MessageQueue(2, 2) as writer:
        handle = writer.export_handle()
        with MessageQueue.create_from_handle(handle, 0):
            before = open_descriptors()
            with pytest.raises(ValueError, match="has joined already"):
                MessageQueue.create_from_handle(handle, 0)
            with pytest.raises(ValueError, match="no reader"):
                MessageQueue.create_from_handle(handle, 9)
            assert open_descriptors() == before
    with pytest.raises(SharedMemoryError):
        MessageQueue.create_from_handle(handle, 1)


def test_a_type_that_msgspec_does_not_know_leaves_nothing() -> None:
    unknown, over_sockets = open_descriptors, {"connect_ip": "127.0.0.1", "secret": SECRET}
    with (
        MessageQueue(2, 1, **over_sockets) as queue,
        Board.create(2, 0, "group") as board,
        MessageQueue.on_board(board, 1, [0]) as other,
    ):
        handle = queue.export_handle()
        makes: list[Callable[[], Any]] = [
            lambda: MessageQueue(2, 1, type=unknown, **over_sockets),
            lambda: MessageQueue.on_board(
                board, 0, [1], type=unknown, remote_reader_ranks=[2], **over_sockets
            ),
            lambda: MessageQueue.attach(other.export_handle(), board, type=unknown),
            lambda: MessageQueue.create_from_handle(handle, 0, type=unknown),
            lambda: MessageQueue.create_from_handle(handle, 1, type=unknown, secret=SECRET),
        ]
        for make in makes:
            before = open_descriptors(), threads()
            with pytest.raises(TypeError, match="not supported"):
                make()
            assert (open_descriptors(), threads()) == before
        with MessageQueue.create_from_handle(handle, 0):
            pass


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e300])
def test_a_spin_of_no_time_is_refused_where_it_is_given(seconds: float) -> None:
    with (
        MessageQueue(2, 1, connect_ip="127.0.0.1", secret=SECRET) as queue,
        Board.create(2, 0, "group") as board,
        MessageQueue.on_board(board, 1, [0]) as other,
    ):
        joins: list[Callable[[], Any]] = [
            lambda: MessageQueue.on_board(board, 0, [1], spin_seconds=seconds),
            lambda: MessageQueue.attach(other.export_handle(), board, spin_seconds=seconds),
            *(
                lambda rank=rank: MessageQueue.create_from_handle(
                    queue.export_handle(), rank, secret=SECRET, spin_seconds=seconds
                )
                for rank in range(2)
            ),
        ]
        for join in joins:
            with pytest.raises(ValueError, match=r"spin_seconds must be"):
                join()


def test_memory_that_is_short_leaves_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_descriptors(), threads()
    monkeypatch.setattr(segment, "_free_bytes", lambda: 1 << 20)
    with pytest.raises(SharedMemoryError, match="1048576 are free"):
        MessageQueue(2, 1, connect_ip="127.0.0.1", secret=SECRET)
    assert (open_descriptors(), threads()) == before


def threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def test_making_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_descriptors()
    monkeypatch.setattr(segment, "_free_bytes", lambda: 1 << 20)
    with pytest.raises(SharedMemoryError, match="1048576 are free"):
        MessageQueue(1, 1)
    assert open_descriptors() == before
    with Board.create(2, member=None) as board:
        before = open_descriptors()
        with pytest.raises(ValueError, match="neither"):
            MessageQueue.on_board(board, 0, [1], CAPACITY)
        assert open_descriptors() == before


def test_too_little_memory_for_blocks_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with ends(1, zero_copy=True) as made:
        monkeypatch.setattr(segment, "_free_bytes", lambda: 0)
        writing = Running(made.writer.enqueue, torch.ones(1 << 20), LIMIT)
        assert made.reader.dequeue(LIMIT).sum() == 1 << 20
        writing.result()


def test_wait_until_ready_from_both_ends() -> None:
    writer = MessageQueue(1, 1)
    waiting = Running(writer.wait_until_ready, LIMIT)
    assert not waiting.ended(0.05)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    waiting.result()
    reader.wait_until_ready(0)
    reader.shutdown()
    writer.shutdown()


@pytest.mark.parametrize("ranks", [[0, 1], [3, 5], [7, 2]])
def test_errors_call_readers_what_the_caller_calls_them(ranks: list[int]) -> None:
    with MessageQueue(2, 2, ranks, CAPACITY) as writer:
        handle = writer.export_handle()
        readers = [MessageQueue.create_from_handle(handle, rank) for rank in ranks]
        writer.enqueue(1)
        with pytest.raises(GroupTimeoutError) as caught:
            writer.enqueue(b"x" * (5 * CAPACITY), timeout=0)
        assert {status.rank for status in caught.value.waiting_for} == set(ranks)
        assert f"rank {ranks[0]} is 2 messages behind" in str(caught.value)
        assert readers[0].dequeue(0) == 1
        with pytest.raises(GroupTimeoutError, match=f"rank {ranks[0]} is 1 message behind; "):
            writer.enqueue(b"x" * (5 * CAPACITY), timeout=0)
        with pytest.raises(GroupTimeoutError, match="the driver"):
            readers[0].dequeue(0)
        for reader in readers:
            reader.shutdown()


def test_threads_that_shut_down_at_once() -> None:
    for _ in range(20):
        with ends() as made:
            waiting = Running(made.reader.dequeue, LIMIT)
            go = threading.Barrier(3)

            def stop(go: threading.Barrier = go, made: Ends = made) -> None:
                go.wait(LIMIT)
                made.reader.shutdown()

            closings = [Running(stop) for _ in range(3)]
            with pytest.raises(GroupClosedError):
                waiting.result()
            for closing in closings:
                closing.result()
            assert made.boards[0].words.load32(layout.BOARD_ABORT) == 0


def test_who_joins_after_a_shutdown_is_not_thrown_out_by_a_thread_that_was_in_it() -> None:
    with ends() as made:
        for number in range(100):
            before = made.readers[0]
            waiting = Running(before.dequeue, LIMIT)
            before.shutdown()
            made.readers[0] = made.attach(made.boards[1])
            with pytest.raises(GroupClosedError):
                waiting.result()
            made.writer.enqueue(number, LIMIT)
            assert made.reader.dequeue(LIMIT) == number


def test_a_forked_child_that_shuts_its_copy_down_leaves_the_queue_to_its_parent() -> None:
    with ends() as made:
        pid = os.fork()
        if pid == 0:
            made.writer.shutdown()
            made.reader.shutdown()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        made.writer.enqueue(1, LIMIT)
        assert made.reader.dequeue(LIMIT) == 1
