"""A reader whose handle leads to something else than its writer: it says in time what is wrong."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec
import pytest

from shm_broadcast import GroupTimeoutError, MessageQueue, PeerProtocolError
from tests.patience import STALL_SECONDS
from tests.shm_broadcast.queues import Running
from tests.shm_broadcast.remote_peers import LIMIT, SECRET
from tests.shm_broadcast.test_queue_audience import expect_the_end

if TYPE_CHECKING:
    from collections.abc import Iterator

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
"""How ZMTP 3.1 begins; the mechanism's name, in 20 bytes, and 32 more bytes follow."""


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
}
WRONG = (talk_nonsense, serve_http, ask_for_no_key)


@contextmanager
def led_to(behaviour: object) -> Iterator[MessageQueue]:
    """A reader whose handle leads to a listener that behaves so; None: to nobody."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                behaviour(connection)  # type: ignore[operator]

    thread = threading.Thread(target=serve)
    address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    if behaviour is None:
        listener.close()
    else:
        thread.start()
    with MessageQueue(1, 0, connect_ip="127.0.0.1", secret=SECRET, writer_rank=3) as writer:
        handle = writer.export_handle()
    assert handle.remote is not None
    remote = msgspec.structs.replace(handle.remote, address=address)
    misled = msgspec.structs.replace(handle, remote=remote)
    try:
        with MessageQueue.create_from_handle(misled, 0, secret=SECRET) as reader:
            yield reader
    finally:
        if behaviour is not None:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
            thread.join(LIMIT)


@pytest.mark.parametrize("behaviour", LATE)
def test_who_does_not_answer_is_waited_for_until_the_deadline(behaviour: object) -> None:
    with led_to(behaviour) as reader:
        for wait in (reader.wait_until_ready, reader.dequeue):
            began = time.monotonic()
            with pytest.raises(GroupTimeoutError, match=r"rank 3 \(never joined\)") as caught:
                wait(0.5)
            assert 0.5 <= time.monotonic() - began < 0.5 + STALL_SECONDS
        caught.match(LATE[behaviour])  # type: ignore[index]
        caught.match(r"at tcp://127\.0\.0\.1:\d+")


def test_where_nobody_listens() -> None:
    with led_to(None) as reader, pytest.raises(GroupTimeoutError, match="nothing answers at tcp"):
        reader.wait_until_ready(0.5)


@pytest.mark.parametrize("behaviour", WRONG)
def test_who_breaks_the_protocol_is_not_waited_for(behaviour: object) -> None:
    with led_to(behaviour) as reader:
        for wait in (reader.wait_until_ready, reader.dequeue):
            with pytest.raises(PeerProtocolError, match=r"at tcp://127.* breaks the protocol"):
                wait(LIMIT)
        assert reader.readable()  # a call has an error to raise


def test_a_writer_that_does_not_attend_to_its_queue() -> None:
    with MessageQueue(1, 0, connect_ip="127.0.0.1", secret=SECRET) as writer:
        handle = writer.export_handle()
        with MessageQueue.create_from_handle(handle, 0, secret=SECRET) as reader:
            with pytest.raises(GroupTimeoutError, match="it is connected, but has not admitted"):
                reader.wait_until_ready(1.0)
            ready = Running(reader.wait_until_ready, LIMIT)
            writer.wait_until_ready(LIMIT)
            ready.result()


def test_a_reader_that_shuts_down_before_it_is_welcomed_has_left() -> None:
    with MessageQueue(1, 0, connect_ip="127.0.0.1", secret=SECRET) as writer:
        handle = writer.export_handle()
        with (
            MessageQueue.create_from_handle(handle, 0, secret=SECRET) as reader,
            pytest.raises(GroupTimeoutError, match="it is connected"),
        ):
            reader.wait_until_ready(1.0)
        writer.wait_until_ready(LIMIT)
        expect_the_end(writer)
