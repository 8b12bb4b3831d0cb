"""Readers on other hosts, over sockets: delivery, back-pressure, waiting, and what is left."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from itertools import count
from operator import le
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from shm_broadcast import GroupClosedError, GroupTimeoutError
from shm_broadcast.net import endpoint as remote_end
from shm_broadcast.net import writer as remote_writer
from shm_broadcast.net.protocol import FRAME_BYTES, Probe, encode
from shm_broadcast.net.reader import RemoteReader
from shm_broadcast.net.writer import RemoteWriter
from tests.netns import two_hosts
from tests.patience import until
from tests.ranks import run_ranks
from tests.shm_broadcast.queues import Running
from tests.shm_broadcast.remote_peers import (
    CREDIT,
    LIMIT,
    SECRET,
    await_readers,
    fill,
    get,
    make_reader,
    make_writer,
    put,
    read_all,
)
from tests.shm_broadcast.remote_taps import port_of

if TYPE_CHECKING:
    from collections.abc import Iterator

WHOLE = [bytes([i % 251]) * size for i, size in enumerate([1, 0, 300, 70_000, CREDIT - 1])]
N_MESSAGES = 208
SMALL_CREDIT = 1 << 16


# --- between processes -----------------------------------------------------------------------


def messages() -> Iterator[list[bytes]]:
    """Yield messages of all shapes, some of several times the credit window."""
    yield [b"hello"]
    yield []
    yield [b""]
    yield [b"", b"x", b""]
    yield WHOLE
    yield [os.urandom(16) for _ in range(3000)]
    yield [b"head", os.urandom(5 * CREDIT + 3), b"tail"]
    yield [os.urandom(2 * FRAME_BYTES), b"", os.urandom(FRAME_BYTES - 1), os.urandom(FRAME_BYTES)]
    for number in range(200):
        yield [number.to_bytes(4, "little"), os.urandom(number * 7)]


def deliver(rank: int, _n: int, folder: str, host: str, hosts: Any) -> list[list[bytes]] | None:
    if hosts is not None:
        hosts[min(rank, 1)].enter()
    if rank == 0:
        with make_writer(folder, [1, 2], host, credit_bytes=CREDIT) as writer:
            writer.wait_ready(LIMIT)
            sent = []
            for message in messages():
                mutable = [bytearray(part) for part in message]
                writer.send(mutable, LIMIT)
                for part in mutable:
                    part[:] = bytes(len(part))
                sent.append(message)
            put(folder, "sent", sent)
            await_readers(folder, [1, 2])
            assert host in writer.handle.address
        assert hosts is None or other_family_fails(host)
        return None
    with make_reader(folder, rank) as reader:
        return read_all(reader, folder, N_MESSAGES)


def other_family_fails(host: str) -> bool:
    """Return whether the other family lacks even a loopback address here."""
    other = (socket.AF_INET, "127.0.0.1") if ":" in host else (socket.AF_INET6, "::1")
    with socket.socket(other[0], socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((other[1], 0))
        except OSError:
            return True
    return False


def assert_delivered(folder: str, host: str, hosts: Any = None) -> None:
    _, first, second = run_ranks(3, deliver, folder, host, hosts)
    sent = get(folder, "sent")
    assert len(sent) == N_MESSAGES
    assert first == second == sent


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_every_reader_gets_every_message_unchanged(tmp_path: Path, host: str) -> None:
    assert_delivered(str(tmp_path), host)


@pytest.mark.namespaces
def test_messages_cross_hosts(tmp_path: Path) -> None:
    with two_hosts("IPv6") as hosts:
        assert_delivered(str(tmp_path), hosts[0].address, hosts)


def fall_behind(rank: int, _n: int, folder: str) -> Any:
    if rank == 0:
        with make_writer(folder, [1, 2], credit_bytes=CREDIT) as writer:
            writer.wait_ready(LIMIT)
            numbers = count()
            with pytest.raises(GroupTimeoutError) as caught:
                send_numbers(writer, numbers)
            sent = next(numbers) - 1
            until(lambda: late(writer) == [2])
            assert f"{sent} messages were sent before" in str(caught.value)
            # What fits the window without waiting, no more: nothing is dropped, memory is bounded.
            assert 0.5 * CREDIT < sent * 1000 <= CREDIT
            with pytest.raises(GroupTimeoutError):
                writer.send([bytes(3 * CREDIT)], 0.2)
            put(folder, "full", sent)
            writer.send([b"last"], LIMIT)
            get(folder, "read 1")
            get(folder, "read 2")
            return sent
    with make_reader(folder, rank) as reader:
        if rank == 2:
            get(folder, "full")
        received = []
        while bytes((message := reader.recv(LIMIT))[0]) != b"last":
            received.append(int.from_bytes(message[0], "little"))
        put(folder, f"read {rank}", True)
        return received


def send_numbers(writer: RemoteWriter, numbers: Iterator[int]) -> NoReturn:
    for number in numbers:
        writer.send([number.to_bytes(4, "little"), bytes(1000)], 0.3)
    raise AssertionError("the numbers ran out")


def late(writer: RemoteWriter) -> list[int]:
    """Return the readers that one more number would wait for."""
    with pytest.raises(GroupTimeoutError) as caught:
        writer.send([bytes(4), bytes(1000)], 0)
    return [status.rank for status in caught.value.waiting_for]


def test_a_slow_reader_holds_the_writer_and_loses_nothing(tmp_path: Path) -> None:
    sent, fast, slow = run_ranks(3, fall_behind, str(tmp_path))
    assert fast == slow == list(range(sent))


def time_out_before_a_long_message(rank: int, _n: int, folder: str) -> Any:
    payload = bytes(range(256)) * (300 * CREDIT // 256)
    if rank == 0:
        with make_writer(folder, [1], credit_bytes=CREDIT) as writer:
            writer.wait_ready(LIMIT)
            get(folder, "timed out empty")
            writer.send([b"a", payload], LIMIT)
            writer.send([b"b"], LIMIT)
            get(folder, "done")
            return None
    with make_reader(folder, rank) as reader:
        assert not reader.readable()
        with pytest.raises(GroupTimeoutError, match="rank 0"):
            reader.recv(0.05)
        put(folder, "timed out empty", True)
        while True:
            try:
                first = reader.recv(0.0005)
                break
            except GroupTimeoutError:
                pass
        assert [bytes(part) for part in first] == [b"a", payload]
        assert [bytes(part) for part in reader.recv(LIMIT)] == [b"b"]
        put(folder, "done", True)
        return None


def test_a_recv_that_timed_out_consumed_nothing(tmp_path: Path) -> None:
    run_ranks(2, time_out_before_a_long_message, str(tmp_path))


# --- waits, in one process -------------------------------------------------------------------


Pair = tuple[RemoteWriter, RemoteReader]


@pytest.fixture
def pair() -> Iterator[Pair]:
    writer = RemoteWriter(0, [1], "127.0.0.1", SECRET, credit_bytes=SMALL_CREDIT)
    with writer, RemoteReader(writer.handle, 1, SECRET) as reader:
        writer.wait_ready(LIMIT)
        reader.wait_ready(LIMIT)
        yield writer, reader


class AbortedError(Exception):
    pass


class Abort:
    """A ``check`` that raises from its n-th call on."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise AbortedError


def test_check_ends_every_wait_and_no_part_of_a_message_arrives(pair: Pair) -> None:
    writer, reader = pair
    with pytest.raises(AbortedError):
        reader.recv(None, Abort(3))
    writer.send([bytes(SMALL_CREDIT // 2)], LIMIT)
    for size in (SMALL_CREDIT, 10 * SMALL_CREDIT):
        with pytest.raises(AbortedError):
            writer.send([bytes(size)], None, Abort(3))
    assert len(reader.recv(LIMIT)[0]) == SMALL_CREDIT // 2
    with pytest.raises(GroupTimeoutError):
        reader.recv(0.05)
    writer.send([b"still intact"], LIMIT)
    assert bytes(reader.recv(LIMIT)[0]) == b"still intact"
    with RemoteWriter(0, [1], "127.0.0.1", SECRET) as waiting:
        with pytest.raises(AbortedError):
            waiting.wait_ready(None, Abort(2))
        with RemoteReader(waiting.handle, 1, SECRET) as late, pytest.raises(AbortedError):
            late.wait_ready(None, Abort(2))


def test_the_writer_waits_until_a_message_larger_than_the_window_is_received(pair: Pair) -> None:
    writer, reader = pair
    waiting = threading.Event()

    def receive() -> int:
        assert waiting.wait(LIMIT)
        return len(reader.recv(LIMIT)[0])

    receiving = Running(receive)
    writer.send([bytes(10 * SMALL_CREDIT)], LIMIT, waiting.set)
    assert writer._links[1].under_way == 0
    assert receiving.result() == 10 * SMALL_CREDIT
    with pytest.raises(AbortedError):  # a handler raises meanwhile: the writer is closed
        writer.send([bytes(10 * SMALL_CREDIT)], LIMIT, Abort(1))
    with pytest.raises(GroupClosedError, match="this end of the queue is closed"):
        writer.send([b""], LIMIT)
    assert len(reader.recv(LIMIT)[0]) == 10 * SMALL_CREDIT
    with pytest.raises(GroupClosedError, match="the writer, rank 0, closed"):
        reader.recv(LIMIT)


@pytest.mark.parametrize("which", [0, 1], ids=["writer", "reader"])
def test_shutdown_from_another_thread_ends_a_wait(pair: Pair, which: int) -> None:
    writer, reader = pair
    closer = threading.Timer(0.2, pair[which].close)
    closer.start()
    with pytest.raises(GroupClosedError, match="this end of the queue is closed"):
        fill(writer) if which == 0 else reader.recv(None)
    closer.join(LIMIT)
    assert not closer.is_alive()


def test_close_in_a_signal_handler_ends_the_wait_it_interrupted() -> None:
    before = holdings()
    writer = RemoteWriter(0, [1], "127.0.0.1", SECRET)
    previous = signal.signal(signal.SIGALRM, lambda *_: writer.close())
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(GroupClosedError, match="this end of the queue is closed"):
            writer.wait_ready(LIMIT)
    finally:
        signal.signal(signal.SIGALRM, previous)
    until(lambda: all(map(le, holdings(), before)), f"more is held than {before}")


def test_readable_never_waits_for_another_thread(pair: Pair) -> None:
    writer, reader = pair
    waiting = threading.Event()
    receiving = Running(lambda: bytes(reader.recv(LIMIT, waiting.set)[0]))
    assert waiting.wait(LIMIT)
    assert not reader.readable()
    writer.send([b"for the other thread"], LIMIT)
    assert receiving.result() == b"for the other thread"


def test_a_message_sent_before_close_arrives_and_closed_ends_raise(pair: Pair) -> None:
    writer, reader = pair
    writer.send([b"last words"], LIMIT)
    for _ in range(2):
        writer.close()
    assert bytes(reader.recv(LIMIT)[0]) == b"last words"
    for _ in range(2):
        with pytest.raises(GroupClosedError, match="the writer, rank 0, closed"):
            reader.recv(LIMIT)
    assert reader.readable()
    reader.close()
    for call in (
        lambda: writer.send([b""], None),
        writer.poll,
        lambda: writer.wait_ready(None),
        lambda: reader.recv(None),
        reader.readable,
        lambda: reader.wait_ready(None),
    ):
        with pytest.raises(GroupClosedError):
            call()


def test_a_reader_that_left_between_two_polls_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_writer, "PROBE_SECONDS", 0.0)
    with (
        RemoteWriter(0, [1, 2], "127.0.0.1", SECRET) as writer,
        RemoteReader(writer.handle, 2, SECRET),
    ):
        with RemoteReader(writer.handle, 1, SECRET) as reader:
            writer.wait_ready(LIMIT)
            reader.wait_ready(LIMIT)
            identity = writer._links[1].identity
        until(lambda: not writer._send_to(identity, [encode(Probe())]))
        assert state(writer, 1) == "closed"


# --- resources and arguments -----------------------------------------------------------------


def test_nothing_is_left_after_close() -> None:
    for attempt in range(3):
        if attempt == 1:  # the first may start what the interpreter keeps
            before = holdings()
        writer = RemoteWriter(0, [1], "127.0.0.1", SECRET)
        reader = RemoteReader(writer.handle, 1, SECRET)
        writer.wait_ready(LIMIT)
        writer.send([bytes(1 << 20)], LIMIT)
        reader.recv(LIMIT)
        reader.close()
        writer.close()
    until(lambda: all(map(le, holdings(), before)), f"more is held than {before}")


def test_close_is_bounded_without_a_listener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_end, "LINGER_SECONDS", 2 * LIMIT)
    writer = RemoteWriter(0, [1], "127.0.0.1", SECRET)
    handle = writer.handle
    writer.close()
    began = time.monotonic()
    with RemoteReader(handle, 1, SECRET) as reader, pytest.raises(GroupTimeoutError):
        reader.wait_ready(0.1)
    assert time.monotonic() - began < LIMIT


def test_a_writer_listens_on_its_one_address_only() -> None:
    with RemoteWriter(0, [1], "127.0.0.1", SECRET) as writer:
        host, port = port_of(writer.handle)
        assert host == "127.0.0.1"
        socket.create_connection((host, port), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 5)


def test_writers_never_collide() -> None:
    writers = [RemoteWriter(0, [1], "127.0.0.1", SECRET) for _ in range(20)]
    addresses = {writer.handle.address for writer in writers}
    for writer in writers:
        writer.close()
    assert len(addresses) == 20


def test_wrong_addresses_and_ranks_are_refused(pair: Pair) -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ValueError, match="one address"):
            RemoteWriter(0, [1], host, SECRET)
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1"):
        RemoteWriter(0, [1], "192.0.2.1", SECRET)
    with pytest.raises(ValueError, match=r"one of \(1,\); got 2"):
        RemoteReader(pair[0].handle, 2, SECRET)


def state(writer: RemoteWriter, rank: int) -> str:
    writer.poll()
    return writer._links[rank].state


def holdings() -> tuple[int, int, int]:
    """Return the Python threads, kernel threads and open files of this process."""
    return (
        threading.active_count(),
        len(list(Path("/proc/self/task").iterdir())),
        len(list(Path("/proc/self/fd").iterdir())),
    )
