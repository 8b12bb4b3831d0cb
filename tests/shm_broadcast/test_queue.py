"""The queue: a message reaches every reader once, unchanged and in order."""

from __future__ import annotations

import math
import multiprocessing
import pickle
import re
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.soak_messages import stress
from shm_broadcast import (
    DEFAULT_CAPACITY,
    NEVER,
    Board,
    GroupClosedError,
    GroupTimeoutError,
    MessageDecodeError,
    MessageQueue,
    QueueHandle,
    layout,
)
from tests.patience import until
from tests.ranks import run_ranks
from tests.shm_broadcast.members import joined
from tests.shm_broadcast.queues import CAPACITY, LIMIT, Running, ends
from tests.shm_broadcast.remote_peers import SECRET, get, put

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext


class Step(msgspec.Struct):
    number: int
    tokens: list[int]


class Other(msgspec.Struct):
    name: str


class Bad:
    """Unpickled, it raises; each 500th has a buffer in fragments."""

    def __init__(self, number: int) -> None:
        self.load = np.zeros(20_000, np.uint8) if number % 500 == 0 else None

    def __reduce__(self) -> Any:
        return explode, (self.load,)


def explode(_: object) -> None:
    raise RuntimeError("wanted")


# --- what is delivered -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [None, 0, "text", {"a": [1, 2.5, (b"b", None)]}, b"", re.compile("a"), ValueError],
    ids=repr,
)
def test_any_object_reaches_every_reader(message: Any) -> None:
    with ends(3) as made:
        made.writer.enqueue(message)
        for reader in made.readers:
            assert reader.dequeue(LIMIT) == message


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


@pytest.mark.parametrize("zero_copy", [False, True])
def test_only_zero_copy_readers_share_a_buffer(zero_copy: bool) -> None:
    with ends(2, zero_copy=zero_copy) as made:
        writing = Running(made.writer.enqueue, torch.zeros(1 << 20, dtype=torch.uint8), LIMIT)
        readings = [Running(reader.dequeue, LIMIT) for reader in made.readers]
        first, second = (reading.result() for reading in readings)
        writing.result()
        first[3] = 7
        assert second[3] == (7 if zero_copy else 0)


def test_a_message_may_be_changed_once_enqueue_returns() -> None:
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
def test_a_received_message_is_not_changed_by_later_ones(zero_copy: bool) -> None:
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


def test_a_message_of_more_buffers_than_a_record_holds() -> None:
    with ends() as made:
        message = [np.full(20_000, n % 256, np.uint8) for n in range(600)]
        writing = Running(made.writer.enqueue, message, LIMIT)
        got = made.reader.dequeue(LIMIT)
        writing.result()
        assert all(np.array_equal(a, b) for a, b in zip(got, message, strict=True))


def test_an_unpicklable_object_leaves_the_queue_usable() -> None:
    with ends() as made:
        for _ in range(50):
            with pytest.raises(TypeError, match="cannot send a list: Can't "):
                made.writer.enqueue([np.zeros(50_000), lambda: 0])
        assert not made.reader.readable()
        made.writer.enqueue("good")
        assert made.reader.dequeue(LIMIT) == "good"


def test_a_typed_message_of_the_wrong_shape_is_an_error_and_no_more() -> None:
    with ends(2, type=Step) as made:
        for _ in range(1200):  # more than two rings of them
            made.writer.enqueue(Other("x" * 50), timeout=LIMIT)
            for reader in made.readers:
                with pytest.raises(MessageDecodeError):
                    reader.dequeue(LIMIT)
        assert made.writer.behind() == {1: 0, 2: 0}
        made.writer.enqueue(Step(1, [2, 3]))
        assert [reader.dequeue(LIMIT) for reader in made.readers] == [Step(1, [2, 3])] * 2
        untyped = MessageQueue.attach(made.writer.export_handle(), made.boards[1])
        made.writer.enqueue(Step(1, []))
        with pytest.raises(MessageDecodeError, match="one end was made with type="):
            untyped.dequeue(LIMIT)


def fail_to_decode(rank: int, n: int, folder: str, count: int) -> None:
    with joined(rank, n, folder) as (_, queue):
        if rank == 0:
            for number in range(count):
                queue.enqueue(Bad(number), LIMIT)
            until(lambda: queue.behind() == {1: 0, 2: 0})
            room = 0
            while True:
                try:
                    queue.enqueue(b"x" * 1000, 0)
                except GroupTimeoutError:
                    break
                room += 1
            assert room > CAPACITY // 1200  # all of the ring is there again
            put(folder, "room", room)
            queue.enqueue("good", LIMIT)
        else:
            for _ in range(count):
                with pytest.raises(MessageDecodeError):
                    queue.dequeue(LIMIT)
            for _ in range(get(folder, "room")):
                assert queue.dequeue(LIMIT) == b"x" * 1000
            assert queue.dequeue(LIMIT) == "good"


def test_thousands_of_undecodable_messages_leave_the_capacity_unchanged(tmp_path: Path) -> None:
    run_ranks(3, fail_to_decode, str(tmp_path), 2_000)


def read_without_room(rank: int, n: int, folder: str) -> tuple[str, str] | None:
    with joined(rank, n, folder, writer=1) as (_, queue):
        if rank == 1:
            queue.enqueue(b"x" * (256 << 20), timeout=LIMIT)
            queue.enqueue("next", timeout=LIMIT)
            return None
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20), hard))
        with pytest.raises(MessageDecodeError) as caught:
            queue.dequeue(timeout=LIMIT)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        return str(caught.value), queue.dequeue(timeout=LIMIT)


def test_a_reader_without_memory_for_a_message_reads_the_next(tmp_path: Path) -> None:
    told, then = run_ranks(2, read_without_room, str(tmp_path))[0]
    assert "message 1 of rank 1: MemoryError" in told
    assert then == "next"


# --- the verbs -------------------------------------------------------------------------------


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


def test_readable_and_broadcast_object() -> None:
    with ends() as made:
        assert not made.reader.readable()
        assert made.writer.broadcast_object({"a": 1}) == {"a": 1}
        assert made.reader.readable()
        assert made.reader.broadcast_object(timeout=LIMIT) == {"a": 1}
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


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("size", [10, 3 * CAPACITY])
def test_every_operation_is_counted_once(size: int, waits: bool) -> None:
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


# --- making and joining ----------------------------------------------------------------------


def test_members_that_make_no_queue() -> None:
    with ends(1) as made, Board.attach(made.boards[0].handle(), None) as onlooker:
        for writer, readers in [(0, []), (0, [0]), (0, [1, 1]), (5, [0]), (1, [0, -1]), (-1, [0])]:
            with pytest.raises(ValueError, match=r"member|reader"):
                MessageQueue.on_board(made.boards[0], writer, readers)
        with pytest.raises(ValueError, match="neither writes nor reads"):
            MessageQueue.attach(made.writer.export_handle(), onlooker)
        with pytest.raises(ValueError, match="neither writes nor reads"):
            MessageQueue.on_board(onlooker, 0, [1])


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
    ("given", "error", "said"),
    [
        ({"n_reader": 0}, ValueError, "reader"),
        ({"n_local_reader": 2}, ValueError, "reader"),
        ({"local_reader_ranks": [1, 2]}, ValueError, "reader"),
        ({"n_reader": -1, "n_local_reader": -1}, ValueError, "reader"),
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
def test_a_wrong_argument_is_named(
    given: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        MessageQueue(**{"n_reader": 1, "n_local_reader": 1, **given})


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e300])
def test_a_wrong_spin_time_is_named(seconds: float) -> None:
    with (
        MessageQueue(2, 1, connect_ip="127.0.0.1", secret=SECRET) as queue,
        Board.create(2, 0, "group") as board,
        MessageQueue.on_board(board, 1, [0]) as other,
    ):
        handle, spin = queue.export_handle(), {"spin_seconds": seconds}
        for join in (
            lambda: MessageQueue.on_board(board, 0, [1], **spin),
            lambda: MessageQueue.attach(other.export_handle(), board, **spin),
            lambda: MessageQueue.create_from_handle(handle, 0, secret=SECRET, **spin),
            lambda: MessageQueue.create_from_handle(handle, 1, secret=SECRET, **spin),
        ):
            with pytest.raises(ValueError, match=r"spin_seconds must be"):
                join()


def test_a_queue_is_joined_once_by_its_handle() -> None:
    joined: Any = MessageQueue.create_from_handle
    with MessageQueue(1, 1) as queue:
        handle = queue.export_handle()
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=QueueHandle) == handle
        with joined(handle, 0) as reader:
            for arguments, error, said in [
                ((b"x", 0), TypeError, r"handle must be what export_handle\(\) returns; got byt"),
                ((handle, "0"), TypeError, "rank must be a whole number; got '0'"),
                ((handle, 0), ValueError, r"rank 0 of queue has joined already, as pid \d"),
                ((handle, 5), ValueError, "rank 5 is no reader"),
            ]:
                with pytest.raises(error, match=said):
                    joined(*arguments)
            with pytest.raises(TypeError, match=r"cannot be pickled: send export_handle"):
                pickle.dumps(queue)
            with pytest.raises(TypeError, match="timeout must be a number"):
                reader.dequeue("x")
            with pytest.raises(ValueError, match="timeout must be 0 or"):
                reader.dequeue(math.nan)


def test_vllm_s_constructor_and_names() -> None:
    writer = MessageQueue(2, 2, [4, 7], 1 << 20, 10, None)
    readers = [MessageQueue.create_from_handle(writer.export_handle(), rank) for rank in (4, 7)]
    for queue in (writer, *readers):
        queue.wait_until_ready()
    writer.enqueue({"a": 1}, timeout=None)
    assert [reader.dequeue(timeout=0.001, indefinite=True) for reader in readers] == [{"a": 1}] * 2
    for queue in (writer, *readers):
        queue.shutdown()


@pytest.mark.parametrize("n_local", [1, 0], ids=["ring", "socket"])
def test_a_negative_timeout_is_0_and_indefinite_is_no_deadline(n_local: int) -> None:
    """The rest of a caller's deadline may be negative; vLLM's argument is for its log."""
    with (
        MessageQueue(1, n_local, connect_ip="127.0.0.1", secret=SECRET) as writer,
        MessageQueue.create_from_handle(writer.export_handle(), 0, secret=SECRET) as reader,
    ):

        def acquire(timeout: float, **more: bool) -> None:
            with reader.acquire_read(timeout, **more):
                pass

        ready = Running(reader.wait_until_ready, LIMIT)
        writer.wait_until_ready(LIMIT)
        ready.result()
        for read in (reader.dequeue, acquire):
            with pytest.raises(TimeoutError, match=r"after 0 s"):
                read(-1.5)
            with pytest.raises(TimeoutError, match=r"0\.05 s"):
                read(0.05, indefinite=True)
        writer.enqueue("there is room", timeout=-1.5)
        until(reader.readable)
        assert reader.dequeue(-1.5) == "there is room"
        writer.enqueue_encoded(b"there is room", timeout=-1.5)
        until(reader.readable)
        with reader.acquire_read(-1.5) as view:
            assert bytes(view) == b"there is room"
        if not n_local:  # one message may exceed the credits of a reader
            writer.enqueue(b"x" * (20 << 20), timeout=-1.5)
        for write in (writer.enqueue, writer.enqueue_encoded):
            with pytest.raises(TimeoutError):
                write(b"x" * (20 << 20), timeout=-1.5)


def test_a_queue_without_readers() -> None:
    """A group of one has such a queue, which vLLM lets take any message."""
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


# --- stress ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    return multiprocessing.get_context("forkserver")


@pytest.mark.stress
@pytest.mark.parametrize(("readers", "messages"), [(1, 20_000), (3, 10_000)])
def test_checksummed_messages(context: ForkServerContext, readers: int, messages: int) -> None:
    shown = stress(context, readers, messages, readers, lambda _: None)
    assert shown.messages == messages
    assert shown.payload_bytes > messages
