"""Peers on other hosts that die, fall silent, never answer or break the protocol are named."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import ExitStack, contextmanager
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from shm_broadcast import (
    GroupTimeoutError,
    MessageQueue,
    PeerLostError,
    PeerProtocolError,
)
from tests.netns import Host, two_hosts
from tests.patience import NAMED_WITHIN, STALL_SECONDS, quickest, until
from tests.ranks import run_ranks
from tests.shm_broadcast.queues import Running
from tests.shm_broadcast.remote_peers import (
    CREDIT,
    LIMIT,
    SECRET,
    SILENCE,
    assert_after_silence,
    fill,
    get,
    make_reader,
    make_writer,
    put,
)
from tests.shm_broadcast.remote_taps import listening
from tests.shm_broadcast.test_queue_mixed_readers import expect_the_end

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
"""How ZMTP 3.1 begins; the mechanism's name, in 20 bytes, and 32 more bytes follow."""


# --- peers that die or fall silent -----------------------------------------------------------


def kill_the_writer(rank: int, _n: int, folder: str, signal_number: int, silence: float) -> Any:
    if rank == 0:
        with make_writer(folder, [1], credit_bytes=CREDIT, silence=silence) as writer:
            put(folder, "pid", os.getpid())
            writer.wait_ready(LIMIT)
            for number in range(2):
                writer.send([bytes([number])], LIMIT)
            with pytest.raises(PeerLostError):
                until(writer.poll)
        return None
    with make_reader(folder, rank) as reader:
        pid = get(folder, "pid")
        until(reader.readable)  # takes in the first message
        assert reader._zmq.poll(LIMIT * 1000)  # the second has arrived
        struck = time.monotonic()
        os.kill(pid, signal_number)
        assert [bytes(reader.recv(LIMIT)[0]) for _ in range(2)] == [b"\0", b"\1"]
        with pytest.raises(PeerLostError) as caught:
            reader.recv(LIMIT)
        named = time.monotonic() - struck
        with pytest.raises(PeerLostError, match="lost rank 0"):
            reader.recv(LIMIT)
        if signal_number == signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
        return caught.value.rank, caught.value.pid == pid, named


def test_a_killed_writer_is_named_after_all_its_messages(tmp_path: Path) -> None:
    def attempt() -> float:
        folder = mkdtemp(dir=tmp_path)
        _, found = run_ranks(2, kill_the_writer, folder, signal.SIGKILL, 10.0, may_die=[0])
        assert found[:2] == (0, True)
        return float(found[2])

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


def test_a_silent_writer_is_named_within_the_silence(tmp_path: Path) -> None:
    _, found = run_ranks(2, kill_the_writer, str(tmp_path), signal.SIGSTOP, SILENCE)
    assert found[:2] == (0, True)
    assert_after_silence(found[2])


def part(rank: int, _n: int, folder: str, hosts: tuple[Host, Host], silence: float) -> float:
    hosts[rank].enter()
    if rank == 0:
        with make_writer(
            folder, [1], hosts[0].address, credit_bytes=1 << 20, silence=silence
        ) as writer:
            writer.wait_ready(LIMIT)
            writer.send([b"before"], LIMIT)
            get(folder, "read")
            unplugged = time.monotonic()
            for host in hosts:
                host.unplug()
            put(folder, "unplugged", unplugged)
            lost_reader = rf"lost rank 1 \(pid \d+ on {hosts[1].address}\)"
            with pytest.raises(PeerLostError, match=lost_reader):
                fill(writer)
            return time.monotonic() - unplugged
    with make_reader(folder, rank) as reader:
        assert bytes(reader.recv(LIMIT)[0]) == b"before"
        put(folder, "read", True)
        lost_writer = rf"lost rank 0 \(pid \d+ on {hosts[0].address}:\d+\)"
        with pytest.raises(PeerLostError, match=lost_writer):
            reader.recv(LIMIT)
        lost = time.monotonic()
        return lost - float(get(folder, "unplugged"))


@pytest.mark.namespaces
def test_a_silent_partition_is_noticed_on_both_sides(tmp_path: Path) -> None:
    with two_hosts("IPv4") as hosts:
        for noticed in run_ranks(2, part, str(tmp_path), hosts, SILENCE):
            assert_after_silence(noticed)


# --- addresses that lead elsewhere -----------------------------------------------------------


def stay_silent(connection: socket.socket) -> None:
    connection.recv(1)  # until the other side has had enough
    while connection.recv(1 << 16):
        pass


def talk_nonsense(connection: socket.socket) -> None:
    connection.sendall(b"\x00" + os.urandom(4096))
    stay_silent(connection)


def serve_http(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")


def hang_up(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def fall_silent_amid_the_handshake(connection: socket.socket) -> None:
    connection.sendall(GREETING + b"CURVE".ljust(20, b"\0") + b"\1" + bytes(31))
    stay_silent(connection)


def ask_for_no_key(connection: socket.socket) -> None:
    connection.sendall(GREETING + b"NULL".ljust(20, b"\0") + bytes(32))
    stay_silent(connection)


LATE = {
    stay_silent: "the listener at .* sends nothing",
    fall_silent_amid_the_handshake: "the listener at .* sends nothing",
    hang_up: "handshakes failed: is the secret the same",
    None: "nothing answers at tcp",
}

WRONG = (talk_nonsense, serve_http, ask_for_no_key)


@contextmanager
def led_to(behaviour: Any) -> Iterator[MessageQueue]:
    """A reader whose handle leads to a listener that behaves so; None: to no listener."""
    with MessageQueue(1, 0, connect_ip="127.0.0.1", secret=SECRET, writer_rank=3) as writer:
        handle = writer.export_handle()
    assert handle.remote is not None
    with ExitStack() as stack:
        if behaviour is None:
            with listening(hang_up) as address:
                pass
        else:
            address = stack.enter_context(listening(behaviour))
        remote = msgspec.structs.replace(handle.remote, address=address)
        misled = msgspec.structs.replace(handle, remote=remote)
        yield stack.enter_context(MessageQueue.create_from_handle(misled, 0, secret=SECRET))


@pytest.mark.parametrize("behaviour", LATE)
def test_an_address_without_answer_is_waited_for_until_the_deadline(behaviour: Any) -> None:
    with led_to(behaviour) as reader:
        for wait in (reader.wait_until_ready, reader.dequeue):
            began = time.monotonic()
            with pytest.raises(GroupTimeoutError, match=r"rank 3 \(never joined\)") as caught:
                wait(0.5)
            assert 0.5 <= time.monotonic() - began < 0.5 + STALL_SECONDS
        caught.match(LATE[behaviour])
        caught.match(r"at tcp://127\.0\.0\.1:\d+")


@pytest.mark.parametrize("behaviour", WRONG)
def test_an_answer_that_breaks_the_protocol_is_not_waited_for(behaviour: Any) -> None:
    with led_to(behaviour) as reader:
        for wait in (reader.wait_until_ready, reader.dequeue):
            with pytest.raises(PeerProtocolError, match=r"at tcp://127.* breaks the protocol"):
                wait(LIMIT)
        assert reader.readable()  # a call has an error to raise


def test_a_reader_that_is_not_admitted_times_out_and_may_leave() -> None:
    with MessageQueue(2, 0, connect_ip="127.0.0.1", secret=SECRET) as writer:
        handle = writer.export_handle()
        with MessageQueue.create_from_handle(handle, 0, secret=SECRET) as stays:
            with (
                MessageQueue.create_from_handle(handle, 1, secret=SECRET) as leaves,
                pytest.raises(GroupTimeoutError, match="it is connected, but has not admitted"),
            ):
                leaves.wait_until_ready(1.0)
            ready = Running(stays.wait_until_ready, LIMIT)
            writer.wait_until_ready(LIMIT)
            ready.result()
        expect_the_end(writer)
