"""The queue: what goes in comes out, once, in order, at every reader."""

from __future__ import annotations

import math
import pickle
import re
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shm_broadcast import layout
from shm_broadcast.errors import GroupClosedError, MessageDecodeError
from shm_broadcast.queue.handle import DEFAULT_CAPACITY, QueueHandle
from shm_broadcast.queue.message_queue import MessageQueue
from shm_broadcast.state.board import Board
from tests.patience import until
from tests.shm_broadcast.queues import CAPACITY, LIMIT, Running, ends
from tests.shm_broadcast.remote_peers import SECRET


def send(writer: MessageQueue, messages: list[Any]) -> None:
    for message in messages:
        writer.enqueue(message, LIMIT)


class Step(msgspec.Struct):
    number: int
    tokens: list[int]


class Other(msgspec.Struct):
    name: str


@pytest.mark.parametrize("n_readers", [1, 3])
@pytest.mark.parametrize(
    "message",
    [None, 0, "text", {"a": [1, 2.5, (b"b", None)]}, b"", re.compile("a"), ValueError],
    ids=repr,
)
def test_any_object_reaches_every_reader(message: Any, n_readers: int) -> None:
    with ends(n_readers) as made:
        made.writer.enqueue(message)
        for reader in made.readers:
            assert reader.dequeue(LIMIT) == message


def test_order_is_kept_whatever_the_size() -> None:
    with ends(2) as made:
        sizes = [1, 9_000, 20_000, 0, 60_000, 200_000, 5, 16_384]
        messages = [{"n": n, "b": np.full(size, n, np.uint8)} for n, size in enumerate(sizes)]
        writing = Running(send, made.writer, messages)
        readings = [
            Running(lambda reader=reader: [reader.dequeue(LIMIT) for _ in sizes])
            for reader in made.readers
        ]
        writing.result()
        for reading in readings:
            for n, got in enumerate(reading.result()):
                assert got["n"] == n
                assert got["b"].tobytes() == bytes([n]) * sizes[n]


@pytest.mark.parametrize("zero_copy", [False, True])
def test_tensors_of_any_size(zero_copy: bool) -> None:
    with ends(2, zero_copy=zero_copy) as made:
        message: dict[str, Any] = {
            "small": torch.arange(7),
            "large": torch.arange(500_000, dtype=torch.float64),
            "bf16": torch.ones(3, 100_000, dtype=torch.bfloat16).t(),
            "array": np.arange(300_000),
        }
        writing = Running(made.writer.enqueue, message, LIMIT)
        for reading in [Running(reader.dequeue, LIMIT) for reader in made.readers]:
            got = reading.result()
            assert list(got) == list(message)
            assert all(bool((got[name] == message[name]).all()) for name in message)
        writing.result()


def test_the_message_may_be_changed_once_enqueue_returns() -> None:
    with ends() as made:
        tensor, array, names = torch.zeros(4000), np.zeros(20_000, np.uint8), ["a"]
        made.writer.enqueue([tensor, array, names])
        tensor.fill_(1)
        array.fill(1)
        names.append("b")
        got = made.reader.dequeue(LIMIT)
        assert got[0].sum() == 0
        assert got[1].sum() == 0
        assert got[2] == ["a"]


@pytest.mark.parametrize("zero_copy", [False, True])
def test_what_arrived_is_not_changed_by_what_comes_later(zero_copy: bool) -> None:
    with ends(1, zero_copy=zero_copy) as made:
        kept = []
        for mark in range(12):
            writing = Running(made.writer.enqueue, torch.full((400_000,), mark), LIMIT)
            got = made.reader.dequeue(LIMIT)
            writing.result()
            if mark % 3 == 0:
                kept.append((mark, got))
        for mark, tensor in kept:
            assert (tensor == mark).all()


def test_zero_copy_readers_share_the_bytes() -> None:
    with ends(2, zero_copy=True) as made:
        made.writer.enqueue(torch.zeros(1 << 20, dtype=torch.uint8))
        first, second = (reader.dequeue(LIMIT) for reader in made.readers)
        first[3] = 7
        assert second[3] == 7


def test_without_zero_copy_each_reader_has_its_own() -> None:
    with ends(2) as made:
        writing = Running(made.writer.enqueue, torch.zeros(1 << 20, dtype=torch.uint8), LIMIT)
        first, second = (
            reading.result()
            for reading in [Running(reader.dequeue, LIMIT) for reader in made.readers]
        )
        writing.result()
        first[3] = 7
        assert second[3] == 0


@pytest.mark.parametrize("count", [10, 512, 2000])
def test_many_buffers(count: int) -> None:
    with ends() as made:
        message = [np.full(20_000, n % 256, np.uint8) for n in range(count)]
        writing = Running(made.writer.enqueue, message, LIMIT)
        got = made.reader.dequeue(LIMIT)
        writing.result()
        assert all(np.array_equal(a, b) for a, b in zip(got, message, strict=True))


def test_an_object_that_cannot_be_pickled_leaves_the_queue_usable() -> None:
    with ends() as made:
        for _ in range(50):
            with pytest.raises(TypeError, match="cannot send a list: Can't "):
                made.writer.enqueue([np.zeros(50_000), lambda: 0])
        assert not made.reader.readable()
        made.writer.enqueue("good")
        assert made.reader.dequeue(LIMIT) == "good"


def test_typed_messages() -> None:
    with ends(2, type=Step) as made:
        made.writer.enqueue(Step(1, [2, 3]))
        for reader in made.readers:
            assert reader.dequeue(LIMIT) == Step(1, [2, 3])


def test_a_typed_message_of_the_wrong_shape_raises_and_wedges_nobody() -> None:
    with ends(2, type=Step) as made:
        for _ in range(2000):  # several rings of them
            made.writer.enqueue(Other("x" * 50), timeout=LIMIT)
            for reader in made.readers:
                with pytest.raises(MessageDecodeError):
                    reader.dequeue(LIMIT)
        assert made.writer.behind() == {1: 0, 2: 0}
        made.writer.enqueue(Step(1, []))
        assert [reader.dequeue(LIMIT) for reader in made.readers] == [Step(1, [])] * 2


def test_one_typed_end_and_one_that_is_not() -> None:
    with ends(1, type=Step) as made:
        other = MessageQueue.attach(made.writer.export_handle(), made.boards[1])
        made.writer.enqueue(Step(1, []))
        with pytest.raises(MessageDecodeError, match="one end was made with type="):
            other.dequeue(LIMIT)


def test_each_end_does_its_part_only() -> None:
    with ends() as made:
        assert made.writer.is_writer and not made.reader.is_writer
        with pytest.raises(TypeError, match="this end of the queue reads"):
            made.reader.enqueue(1)
        with pytest.raises(TypeError, match="reads"):
            made.reader.behind()
        for call in (made.writer.dequeue, made.writer.readable, made.writer.acquire_read):
            with pytest.raises(TypeError, match="this end of the queue writes"):
                call()
        assert "writer" in repr(made.writer) and "reader" in repr(made.reader)


def test_broadcast_object() -> None:
    with ends() as made:
        assert made.writer.broadcast_object({"a": 1}) == {"a": 1}
        assert made.reader.broadcast_object(timeout=LIMIT) == {"a": 1}


def test_readable() -> None:
    with ends() as made:
        assert not made.reader.readable()
        made.writer.enqueue(1)
        assert made.reader.readable()
        made.reader.dequeue(LIMIT)
        assert not made.reader.readable()


def test_acquire_read_shows_the_message_where_it_lies() -> None:
    with ends(1, type=Step) as made:
        made.writer.enqueue(Step(1, [2]))
        with made.reader.acquire_read(LIMIT) as view:
            assert msgspec.msgpack.decode(view, type=Step) == Step(1, [2])
            assert made.writer.behind() == {1: 1}  # its space is not given back yet
        assert made.writer.behind() == {1: 0}
        with pytest.raises(ValueError, match="released"):
            view[0]


def test_acquire_read_gives_the_space_back_when_the_block_raises() -> None:
    with ends() as made:
        for _ in range(500):
            made.writer.enqueue(b"x" * 1000, timeout=LIMIT)
            with pytest.raises(KeyError), made.reader.acquire_read(LIMIT):
                raise KeyError
        made.writer.enqueue("good")
        assert made.reader.dequeue(LIMIT) == "good"


def test_acquire_read_of_messages_that_are_not_in_one_record() -> None:
    with ends() as made:
        for message in (b"y" * (3 * CAPACITY), [np.zeros(20_000, np.uint8), 1]):
            writing = Running(made.writer.enqueue, message, LIMIT)
            with made.reader.acquire_read(LIMIT) as view:
                assert len(view) > 10
            writing.result()
        made.writer.enqueue("next")
        assert made.reader.dequeue(LIMIT) == "next"


def test_who_creates_the_queue_need_not_write_it() -> None:
    with Board.create(3, member=0) as first, Board.attach(first.handle(), 1) as second:
        third = Board.attach(first.handle(), 2)
        reader = MessageQueue.on_board(first, writer=2, readers=[0, 1])
        other = MessageQueue.attach(reader.export_handle(), second)
        writer = MessageQueue.attach(reader.export_handle(), third)
        assert writer.is_writer
        writer.enqueue("from member 2")
        assert reader.dequeue(LIMIT) == other.dequeue(LIMIT) == "from member 2"
        for queue in (writer, reader, other, third):
            queue.close()


@pytest.mark.parametrize(
    ("writer", "readers"), [(0, []), (0, [0]), (0, [1, 1]), (5, [0]), (1, [0, -1]), (-1, [0])]
)
def test_members_that_make_no_queue(writer: int, readers: list[int]) -> None:
    with Board.create(2, member=0) as board, pytest.raises(ValueError, match=r"member|reader"):
        MessageQueue.on_board(board, writer, readers)


def test_one_that_takes_no_part_cannot_join() -> None:
    with ends(1) as made, Board.attach(made.boards[0].handle(), None) as onlooker:
        with pytest.raises(ValueError, match="neither writes nor reads"):
            MessageQueue.attach(made.writer.export_handle(), onlooker)
        with pytest.raises(ValueError, match="neither writes nor reads"):
            MessageQueue.on_board(onlooker, 0, [1])


def test_a_handle_is_plain_data() -> None:
    with ends() as made:
        handle = made.writer.export_handle()
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=QueueHandle) == handle


@pytest.mark.parametrize(
    ("arguments", "capacity"),
    [
        ({}, DEFAULT_CAPACITY),
        ({"max_chunk_bytes": 10 << 20, "max_chunks": 10}, DEFAULT_CAPACITY),
        ({"max_chunk_bytes": 1 << 16, "max_chunks": 4}, 4 << 16),
        ({"max_chunk_bytes": 1, "max_chunks": 1}, 64 << 10),
        ({"max_chunk_bytes": (1 << 20) + 1, "max_chunks": 1}, (1 << 20) + (64 << 10)),
    ],
)
def test_the_footprint_is_a_function_of_the_arguments(
    arguments: dict[str, int], capacity: int
) -> None:
    with MessageQueue(2, 2, **arguments) as queue:
        handle = queue.export_handle()
        assert handle.ring is not None
        assert handle.ring.size == capacity + 4096  # 192 + 2 * 64, rounded up to a page
        board = layout.board_size(3)
        assert handle.board.segment.size == layout.align(board, 4096)  # 148 KiB a member


@pytest.mark.parametrize(
    "arguments",
    [
        (0, 1), (1, 2), (2, 1), (1, 1, [1, 2]), (2, 2, [1, 1]), (-1, -1),
    ],
)  # fmt: skip
def test_numbers_of_readers_that_do_not_fit(arguments: Any) -> None:
    with pytest.raises(ValueError, match="reader"):
        MessageQueue(*arguments)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"max_chunk_bytes": 0}, ValueError, "max_chunk_bytes must be 1 or more; got 0"),
        ({"max_chunks": 0}, ValueError, "max_chunks must be 1 or more; got 0"),
        ({"max_chunk_bytes": "x"}, TypeError, "max_chunk_bytes must be a whole number; got 'x'"),
        ({"n_reader": "1"}, TypeError, "n_reader must be a whole number; got '1'"),
        ({"n_reader": 100_000}, ValueError, "n_reader must be 0 to 4096; got 100000"),
        ({"local_reader_ranks": 0}, TypeError, "local_reader_ranks must be a sequence of whole n"),
        ({"local_reader_ranks": ["0"]}, TypeError, r"local_reader_ranks\[0\] must be a whole num"),
        ({"local_reader_ranks": [-2]}, ValueError, r"local_reader_ranks\[0\] must be -1 or more"),
        ({"remote_reader_ranks": "1"}, TypeError, "remote_reader_ranks must be a sequence of"),
        ({"n_local_reader": None}, TypeError, "n_local_reader must be a whole number; got None"),
        (
            {"n_reader": 2, "n_local_reader": 2, "local_reader_ranks": [4, 4]},
            ValueError,
            r"reader 4 occurs twice: \(4, 4\) on this host",
        ),
    ],
)
def test_an_argument_that_is_wrong_is_named(
    given: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        MessageQueue(**{"n_reader": 1, "n_local_reader": 1, **given})


def test_how_a_queue_is_joined_wrongly() -> None:
    joined: Any = MessageQueue.create_from_handle
    with MessageQueue(1, 1) as queue, joined(queue.export_handle(), 0) as reader:
        with pytest.raises(
            TypeError, match=r"handle must be what export_handle\(\) returns; got byt"
        ):
            joined(b"x", 0)
        with pytest.raises(TypeError, match="rank must be a whole number; got '0'"):
            joined(queue.export_handle(), "0")
        with pytest.raises(ValueError, match=r"rank 0 of queue has joined already, as pid \d"):
            joined(queue.export_handle(), 0)
        with pytest.raises(TypeError, match=r"cannot be pickled: send export_handle"):
            pickle.dumps(queue)
        for timeout, said in [
            ("x", "timeout must be a number"),
            (math.nan, "timeout must be 0 or"),
        ]:
            with pytest.raises((TypeError, ValueError), match=said):
                reader.dequeue(timeout)


def test_vllm_s_constructor_and_names() -> None:
    writer = MessageQueue(2, 2, [4, 7], 1 << 20, 10, None)
    handle = writer.export_handle()
    readers = [MessageQueue.create_from_handle(handle, rank) for rank in (4, 7)]
    for queue in (writer, *readers):
        queue.wait_until_ready()
    writer.enqueue({"a": 1}, timeout=None)
    assert [reader.dequeue(timeout=0.001, indefinite=True) for reader in readers] == [{"a": 1}] * 2
    with pytest.raises(ValueError, match="rank 5 is no reader"):
        MessageQueue.create_from_handle(handle, 5)
    for queue in (writer, *readers):
        queue.shutdown()


@pytest.mark.parametrize("n_local", [1, 0], ids=["ring", "socket"])
def test_indefinite_is_no_deadline(n_local: int) -> None:
    """vLLM's argument is about its log."""
    with (
        MessageQueue(1, n_local, connect_ip="127.0.0.1", secret=SECRET) as writer,
        MessageQueue.create_from_handle(writer.export_handle(), 0, secret=SECRET) as reader,
    ):

        def acquire() -> None:
            with reader.acquire_read(timeout=0.05, indefinite=True):
                pass

        waits = (lambda: reader.dequeue(timeout=0.05, indefinite=True), acquire)
        for wait in waits:
            with pytest.raises(TimeoutError, match=r"0\.05 s"):
                Running(wait).result()


@pytest.mark.parametrize("n_local", [1, 0], ids=["ring", "socket"])
def test_of_a_time_that_has_passed_nothing_is_left(n_local: int) -> None:
    """Callers pass on what is left until a deadline of theirs, which may be less than nothing."""
    with (
        MessageQueue(1, n_local, connect_ip="127.0.0.1", secret=SECRET) as writer,
        MessageQueue.create_from_handle(writer.export_handle(), 0, secret=SECRET) as reader,
    ):
        ready = Running(reader.wait_until_ready, LIMIT)
        writer.wait_until_ready(LIMIT)
        ready.result()
        with pytest.raises(TimeoutError, match="after 0 s"):
            reader.dequeue(-1.5)
        with pytest.raises(TimeoutError), reader.acquire_read(-1.5):
            pass
        writer.enqueue("there is room", timeout=-1.5)
        until(reader.readable)
        assert reader.dequeue(-1.5) == "there is room"
        writer.enqueue_encoded(b"there is room", timeout=-1.5)
        until(reader.readable)
        with reader.acquire_read(-1.5) as view:
            assert bytes(view) == b"there is room"
        if not n_local:  # one message may exceed the credits of a reader
            writer.enqueue(b"x" * (20 << 20), timeout=-1.5)
        with pytest.raises(TimeoutError):
            writer.enqueue(b"x" * (20 << 20), timeout=-1.5)
        with pytest.raises(TimeoutError):
            writer.enqueue_encoded(b"x" * (20 << 20), timeout=-1.5)
        with pytest.raises(ValueError, match="timeout"):
            reader.dequeue(float("nan"))


def test_a_queue_without_readers() -> None:
    """That of a group of one: in vLLM it takes whatever it is given."""
    with MessageQueue(0, 0) as queue:
        queue.wait_until_ready(LIMIT)
        for message in ("small", b"x" * (20 << 20), np.zeros(1 << 20)):
            queue.enqueue(message)
            assert queue.broadcast_object(message) is message
        assert queue.behind() == {}
        with pytest.raises(ValueError, match="rank 0 is no reader"):
            MessageQueue.create_from_handle(queue.export_handle(), 0)
        with pytest.raises(TypeError, match="cannot send"):
            queue.enqueue(lambda: None)
    with pytest.raises(GroupClosedError):
        queue.enqueue("after it was shut down")


def test_the_queue_of_a_group_of_one() -> None:
    class Alone:
        rank, world_size = 0, 1

        def broadcast_obj(self, obj: Any | None, src: int) -> Any:  # noqa: ARG002
            return obj

        def all_gather_obj(self, obj: Any) -> list[Any]:
            return [obj]

    with MessageQueue.create_from_process_group(Alone()) as queue:
        assert queue.is_writer
        assert queue.broadcast_object({"a": 1}) == {"a": 1}
    queue, (handle,) = MessageQueue.create_from_process_group_single_reader(Alone())
    with queue, MessageQueue.create_from_handle(handle, 0) as reader:
        queue.enqueue("to myself")
        assert reader.dequeue(LIMIT) == "to myself"


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("size", [10, 3 * CAPACITY])
def test_every_operation_is_counted_once(size: int, waits: bool) -> None:
    """Ranks compare how many operations they began: chance must not count."""
    with ends() as made:
        counts = [made.boards[member].member_status(member).sequence for member in (0, 1)]
        for turn in range(1, 4):
            if waits:
                reading = Running(made.reader.dequeue, LIMIT)
                assert not reading.ended(0.05)
                made.writer.enqueue(b"x" * size, LIMIT)
            else:
                writing = Running(made.writer.enqueue, b"x" * size, LIMIT)
                writing.ended(0.05)
                reading = Running(made.reader.dequeue, LIMIT)
                writing.result()
            assert len(reading.result()) == size
            for member, name in ((0, "enqueue"), (1, "dequeue")):
                status = made.boards[0].member_status(member)
                assert (status.operation, status.sequence) == (name, counts[member] + turn)
