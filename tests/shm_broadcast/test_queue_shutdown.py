"""How a queue ends and goes on: shutdown, abort, loss, successors; and nothing is left open."""

from __future__ import annotations

import gc
import os
import time
from contextlib import contextmanager
from operator import le
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import numpy as np
import pytest
import torch

from shm_broadcast import (
    Board,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    MessageQueue,
    PeerLostError,
    Segment,
    SharedMemoryError,
    segment,
)
from shm_broadcast.process import IN_FORKED_CHILD
from tests.forked import in_a_child
from tests.patience import until
from tests.shm_broadcast.leaks import open_descriptors
from tests.shm_broadcast.queues import CAPACITY, LIMIT, Ends, Running, ends, sleeps
from tests.shm_broadcast.remote_peers import SECRET
from tests.shm_broadcast.test_board import bury

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OVER_SOCKETS: dict[str, Any] = {"connect_ip": "127.0.0.1", "secret": SECRET}


def fill_and_enqueue(made: Ends) -> None:
    made.fill()
    made.writer.enqueue(b"x" * 20_000, LIMIT)


def view(made: Ends) -> None:
    with made.reader.acquire_read(LIMIT):
        pass


WAITS: dict[str, tuple[int, Callable[[Ends], Any]]] = {
    "dequeue": (1, lambda made: made.reader.dequeue(LIMIT)),
    "acquire_read": (1, view),
    "enqueue": (0, fill_and_enqueue),
    "enqueue amid fragments": (0, lambda made: made.writer.enqueue(b"x" * 5 * CAPACITY, LIMIT)),
}
"""The member that waits, and its call."""


def shut_down(made: Ends, mine: int) -> None:
    (made.reader if mine else made.writer).shutdown()


def lose_the_peer(made: Ends, mine: int) -> None:
    made.boards[1 - mine].record_begin("all_reduce")
    bury(made.boards[0], 1 - mine)


ENDINGS: dict[str, tuple[Callable[[Ends, int], None], type[Exception], str]] = {
    "shutdown": (shut_down, GroupClosedError, "shut down in this process"),
    "board closed": (
        lambda made, mine: made.boards[mine].close(),
        GroupClosedError,
        r"test .*has been closed",
    ),
    "abort": (lambda made, _: made.boards[1].abort("stop"), GroupAbortedError, "stop"),
    "peer lost": (lose_the_peer, PeerLostError, r"last seen in all_reduce #\d+, \d+\.\d s ago"),
}


# --- every wait ends -------------------------------------------------------------------------


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_every_wait_ends(name: str, ending: str) -> None:
    (mine, wait), (end, error, says) = WAITS[name], ENDINGS[ending]
    with ends() as made:
        waiting = Running(wait, made)
        until(lambda: sleeps(made.boards[mine]))
        ended = Running(end, made, mine)
        with pytest.raises(error, match=says) as caught:
            waiting.result()
        if isinstance(caught.value, PeerLostError):
            assert caught.value.rank == 1 - mine
        ended.result()


def fill(queue: MessageQueue) -> None:
    while True:
        queue.enqueue(b"x" * 100_000, LIMIT)


@pytest.mark.parametrize("n_local", [1, 0], ids=["ring", "socket"])
@pytest.mark.parametrize("waits", ["reader", "writer"])
def test_an_abort_of_a_watched_board_ends_a_wait(waits: str, n_local: int) -> None:
    with (
        Board.create(1, member=0, name="tp:0") as board,
        MessageQueue(1, n_local, **OVER_SOCKETS, watch=board.check) as writer,
        MessageQueue.create_from_handle(
            writer.export_handle(), 0, secret=SECRET, watch=board.check
        ) as reader,
    ):
        ready = Running(reader.wait_until_ready, LIMIT)
        writer.wait_until_ready(LIMIT)
        ready.result()
        waiting = Running(reader.dequeue) if waits == "reader" else Running(fill, writer)
        assert not waiting.ended(within=0.2)
        board.abort("it broke")
        with pytest.raises(GroupAbortedError, match="it broke"):
            waiting.result()


# --- what is left to do after an end ---------------------------------------------------------


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


@pytest.mark.parametrize("dies", [False, True], ids=["closed", "dead"])
def test_readers_get_what_a_closed_or_dead_writer_left(dies: bool) -> None:
    with ends() as made:
        messages = [1, b"x" * 30_000, 2]
        for message in messages:
            made.writer.enqueue(message)
        if dies:
            bury(made.boards[0], 0)
        else:
            made.writer.shutdown()
        assert [made.reader.dequeue(LIMIT) for _ in messages] == messages
        says = "lost rank 0" if dies else "the writer has shut the queue down"
        for _ in range(2):
            with pytest.raises(PeerLostError if dies else GroupClosedError, match=says):
                made.reader.dequeue(LIMIT)


def test_readers_that_left_hold_no_writer_up() -> None:
    with ends(2) as made:
        waiting = Running(fill_and_enqueue, made)
        until(lambda: sleeps(made.boards[0]))
        made.readers[1].shutdown()
        assert not waiting.ended(0.05)
        made.readers[0].shutdown()
        for call in (waiting.result, made.fill):
            with pytest.raises(GroupClosedError, match="every reader has closed the queue"):
                call()


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


def test_a_successor_is_not_shut_down_by_a_thread_of_its_predecessor() -> None:
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


# --- late readers and successors -------------------------------------------------------------


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


def test_a_successor_of_a_dead_reader_continues_where_it_stopped() -> None:
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


@pytest.mark.parametrize("dies", [True, False], ids=["dead", "closed"])
def test_a_successor_of_a_writer_goes_on(dies: bool) -> None:
    with ends() as made:
        made.writer.enqueue(1)
        kept = Segment.attach(made.writer.export_handle().ring)
        if dies:
            bury(made.boards[0], 0)
        else:
            made.writer._end.close()
            made.boards[0].close()
        with Board.attach(made.boards[1].handle(), 0) as board:
            successor = made.attach(board)
            assert successor.is_writer
            successor.enqueue(2)
            assert [made.reader.dequeue(LIMIT) for _ in range(2)] == [1, 2]
            with pytest.raises(GroupTimeoutError):
                made.reader.dequeue(0.01)
            successor.shutdown()
        kept.close()


def test_a_block_of_a_dead_writer_ends_the_queue_until_there_is_a_successor() -> None:
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
            with long, pytest.raises(SharedMemoryError):  # at once
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


# --- ends that are dropped without a shutdown ------------------------------------------------


def to_drop() -> tuple[list[MessageQueue], list[MessageQueue]]:
    """A writer and a reader; to drop one, empty its list."""
    writer = MessageQueue(1, 1, writer_rank=5)
    return [writer], [MessageQueue.create_from_handle(writer.export_handle(), 0)]


def test_a_dropped_writer_is_lost_to_its_readers() -> None:
    writer, reader = to_drop()
    writer[0].enqueue("before")
    assert reader[0].dequeue(LIMIT) == "before"
    board: Any = reader[0]._board
    waiting = Running(reader[0].dequeue)
    until(lambda: sleeps(board))
    writer.clear()
    gc.collect()
    with reader[0]:
        for call in (waiting.result, reader[0].dequeue):
            with pytest.raises(PeerLostError, match=rf"lost rank 5 \(pid {os.getpid()}\)"):
                call()


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


def test_a_dropped_reader_can_be_replaced() -> None:
    writer, reader = to_drop()
    with writer[0]:
        for number in range(3):
            writer[0].enqueue(number)
        assert reader[0].dequeue(LIMIT) == 0
        reader.clear()
        with MessageQueue.create_from_handle(writer[0].export_handle(), 0) as successor:
            assert [successor.dequeue(LIMIT) for _ in range(2)] == [1, 2]


def test_a_forked_child_has_no_part_and_drops_nothing() -> None:
    writer, reader = to_drop()
    writer[0].enqueue("before", LIMIT)

    def body() -> None:
        for call in (
            lambda: writer[0].enqueue("a child's"),
            lambda: writer[0].wait_until_ready(0),
            lambda: writer[0].behind(),
            lambda: reader[0].dequeue(0),
            lambda: reader[0].broadcast_object(timeout=0),
        ):
            with pytest.raises(GroupClosedError, match=IN_FORKED_CHILD):
                call()
        reader[0].shutdown()
        writer[0].shutdown()
        writer.clear()
        reader.clear()
        gc.collect()

    in_a_child(body)
    writer[0].enqueue("after", LIMIT)
    assert [reader[0].dequeue(LIMIT) for _ in range(2)] == ["before", "after"]
    with pytest.raises(GroupTimeoutError):
        reader[0].dequeue(0.3)
    reader[0].shutdown()
    writer[0].shutdown()


# --- nothing is left -------------------------------------------------------------------------


@contextmanager
def nothing_left() -> Iterator[None]:
    """After the block, no descriptor or thread of it is left."""

    def held() -> tuple[int, int]:
        return open_descriptors(), len(os.listdir("/proc/self/task"))  # noqa: PTH208

    before = held()
    yield
    until(lambda: all(map(le, held(), before)))


@pytest.mark.parametrize("zero_copy", [False, True])
def test_no_descriptor_is_left(zero_copy: bool) -> None:
    before = open_descriptors()
    with ends(2, zero_copy=zero_copy) as made:
        writing = Running(made.writer.enqueue, torch.zeros(1 << 20), LIMIT)
        readings = [Running(reader.dequeue, LIMIT) for reader in made.readers]
        assert sum(reading.result().sum() for reading in readings) == 0
        writing.result()
        made.boards[0].lost()
    with MessageQueue(1, 1) as writer:
        with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            writer.enqueue(1)
            assert reader.dequeue(LIMIT) == 1
        del reader
    del made, writing, readings, writer
    assert open_descriptors() == before


def test_a_queue_that_is_not_made_or_joined_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unknown: dict[str, Any] = {"type": open_descriptors}  # a type that msgspec does not support
    with (
        MessageQueue(2, 1, **OVER_SOCKETS) as queue,
        Board.create(2, 0, "group") as board,
        Board.attach(board.handle(), None) as onlooker,
        MessageQueue.on_board(board, 1, [0]) as other,
    ):
        handle = queue.export_handle()
        wrong: list[Callable[[], Any]] = [
            lambda: MessageQueue(2, 1, **unknown, **OVER_SOCKETS),
            lambda: MessageQueue.on_board(
                board, 0, [1], **unknown, remote_reader_ranks=[2], **OVER_SOCKETS
            ),
            lambda: MessageQueue.attach(other.export_handle(), board, **unknown),
            lambda: MessageQueue.create_from_handle(handle, 0, **unknown),
            lambda: MessageQueue.create_from_handle(handle, 1, **unknown, secret=SECRET),
            lambda: MessageQueue.on_board(onlooker, 0, [1], CAPACITY),
            lambda: MessageQueue.create_from_handle(handle, 9),
        ]
        for make in wrong:
            with (
                nothing_left(),
                pytest.raises((TypeError, ValueError), match=r"not supported|neither|no reader"),
            ):
                make()
        with (
            MessageQueue.create_from_handle(handle, 0),
            nothing_left(),
            pytest.raises(ValueError, match="has joined already"),
        ):
            MessageQueue.create_from_handle(handle, 0)
        with nothing_left(), monkeypatch.context() as patch:
            patch.setattr(segment, "_free_bytes", lambda: 1 << 20)
            for more in ({"n_local_reader": 2}, {"n_local_reader": 1, **OVER_SOCKETS}):
                with pytest.raises(SharedMemoryError, match="1048576 are free"):
                    MessageQueue(2, **more)
    with pytest.raises(SharedMemoryError):
        MessageQueue.create_from_handle(handle, 0)


def test_too_little_memory_for_blocks_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with ends(1, zero_copy=True) as made:
        monkeypatch.setattr(segment, "_free_bytes", lambda: 0)
        writing = Running(made.writer.enqueue, torch.ones(1 << 20), LIMIT)
        assert made.reader.dequeue(LIMIT).sum() == 1 << 20
        writing.result()


@pytest.mark.parametrize("ranks", [[0, 1], [3, 5], [7, 2]])
def test_errors_have_the_ranks_that_the_caller_gave(ranks: list[int]) -> None:
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
