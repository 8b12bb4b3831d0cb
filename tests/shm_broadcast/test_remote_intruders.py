"""Intruders: wrong keys, replays, floods and malformed frames neither reach nor delay a queue."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from shm_broadcast import GroupTimeoutError, PeerLostError, PeerProtocolError
from shm_broadcast.net.keys import reader_key
from shm_broadcast.net.protocol import FRAME_BYTES, Credit, ReaderHello, Welcome, encode
from shm_broadcast.net.reader import RemoteReader
from shm_broadcast.net.writer import RemoteWriter
from tests.patience import until
from tests.shm_broadcast.remote_peers import CREDIT, LIMIT, SECRET, SILENCE, STALL, fill
from tests.shm_broadcast.remote_taps import (
    PAYLOAD,
    listening,
    port_of,
    raw_reader,
    raw_writer,
    read_to_end,
    tapped,
    zmtp_frames,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def writer() -> Iterator[RemoteWriter]:
    """A writer that admits readers 1 and 2."""
    with RemoteWriter(0, [1, 2], "127.0.0.1", SECRET, credit_bytes=CREDIT) as writer:
        yield writer


@pytest.fixture
def reader(writer: RemoteWriter) -> Iterator[RemoteReader]:
    with RemoteReader(writer.handle, 1, SECRET) as reader:
        until(lambda: state(writer, 1) == "busy")
        reader.wait_ready(LIMIT)
        yield reader


# --- without a right key ---------------------------------------------------------------------


def test_a_wrong_secret_is_not_admitted(writer: RemoteWriter, reader: RemoteReader) -> None:
    with RemoteReader(writer.handle, 2, secrets.token_bytes(32)) as intruder:

        def says() -> str:
            with pytest.raises(GroupTimeoutError) as caught:
                intruder.wait_ready(0)
            return str(caught.value)

        until(lambda: "handshakes failed: is the secret the same" in says())
    assert state(writer, 2) == "absent"
    with RemoteReader(writer.handle, 2, SECRET) as honest:
        exchange(writer, reader, honest)


def test_a_key_that_is_not_on_the_list_is_refused(
    writer: RemoteWriter, reader: RemoteReader
) -> None:
    forged = msgspec.structs.replace(writer.handle, readers=(1, 2, 3))
    with (
        RemoteReader(forged, 3, SECRET) as intruder,
        pytest.raises(PeerProtocolError, match="does not admit this reader's key"),
    ):
        intruder.wait_ready(LIMIT)
    with RemoteReader(writer.handle, 2, SECRET) as honest:
        exchange(writer, reader, honest)


def test_a_second_reader_of_a_rank_is_refused(writer: RemoteWriter, reader: RemoteReader) -> None:
    with RemoteReader(writer.handle, 2, SECRET) as honest:
        until(lambda: state(writer, 2) == "busy")
        with RemoteReader(writer.handle, 2, SECRET) as second:
            until(lambda: state(writer, 2) == "busy" and second.readable())
            with pytest.raises(PeerProtocolError, match="rank 2 used another connection"):
                second.wait_ready(LIMIT)
        exchange(writer, reader, honest)


def test_a_second_reader_that_closes_at_once_does_not_close_the_first(
    writer: RemoteWriter, reader: RemoteReader
) -> None:
    with writer._zmq.get_monitor_socket(zmq.EVENT_DISCONNECTED) as events:
        with raw_reader(writer.handle, 1) as second:
            second.linger = int(LIMIT * 1000)
            second.send(encode(ReaderHello(1)))
        assert writer._zmq.poll(LIMIT * 1000)
        assert events.poll(LIMIT * 1000)
        writer._zmq.disable_monitor()
    assert state(writer, 1) == "busy"
    with RemoteReader(writer.handle, 2, SECRET) as honest:
        exchange(writer, reader, honest)


def test_a_flood_of_nonsense_delays_nothing(writer: RemoteWriter, reader: RemoteReader) -> None:
    with RemoteReader(writer.handle, 2, SECRET) as honest, flood(writer) as connections:
        exchange(writer, reader, honest, count=300)
        until(lambda: connections() > 100)


def test_handle_and_wire_carry_no_secret(writer: RemoteWriter) -> None:
    with tapped(writer.handle) as tap, RemoteReader(tap.handle, 1, SECRET) as reader:
        until(lambda: state(writer, 1) == "busy")
        with RemoteReader(writer.handle, 2, SECRET) as other:
            exchange(writer, reader, other)
        recorded = tap.from_reader + tap.from_writer
        assert len(recorded) > 10 * len(PAYLOAD)
        for clear in (SECRET, PAYLOAD, reader_key(SECRET, writer.handle.nonce, 1).secret):
            assert clear not in recorded
            assert clear not in msgspec.msgpack.encode(writer.handle)


# --- replays ---------------------------------------------------------------------------------


def test_a_recorded_reader_is_not_admitted(writer: RemoteWriter, reader: RemoteReader) -> None:
    with tapped(writer.handle) as tap, RemoteReader(tap.handle, 2, SECRET) as honest:
        exchange(writer, reader, honest)
        with socket.create_connection(tap.target, LIMIT) as replay:
            greeting, hello, initiate, *traffic = zmtp_frames(tap.from_reader)
            assert b"INITIATE" in initiate
            assert traffic
            replay.sendall(greeting + hello)
            read_to_end(replay, b"WELCOME")
            # The answer to a good INITIATE is READY; this one holds another session's cookie.
            replay.sendall(initiate + b"".join(traffic))
            assert b"READY" not in read_to_end(replay)
        exchange(writer, reader, honest)


def test_a_recorded_writer_breaks_the_protocol(writer: RemoteWriter, reader: RemoteReader) -> None:
    with tapped(writer.handle) as tap, RemoteReader(tap.handle, 2, SECRET) as honest:
        exchange(writer, reader, honest)
        recorded = tap.from_writer
    played = threading.Event()

    def play(connection: socket.socket) -> None:
        connection.settimeout(LIMIT)
        connection.sendall(recorded)
        with suppress(TimeoutError):
            read_to_end(connection)
        played.set()

    with listening(play) as address:
        handle = msgspec.structs.replace(writer.handle, address=address)
        with RemoteReader(handle, 2, SECRET) as victim:
            assert played.wait(LIMIT)
            with pytest.raises(PeerProtocolError, match="breaks the protocol"):
                victim.recv(LIMIT)


def test_a_frame_repeated_within_its_connection_costs_the_connection(
    writer: RemoteWriter, reader: RemoteReader
) -> None:
    with tapped(writer.handle) as tap, RemoteReader(tap.handle, 2, SECRET) as honest:
        exchange(writer, reader, honest, count=3)
        tap.repeat_to_reader()
        with pytest.raises(PeerLostError):
            honest.recv(LIMIT)
    with (
        RemoteWriter(0, [1], "127.0.0.1", SECRET, silence=SILENCE) as repeated,
        tapped(repeated.handle) as tap,
        RemoteReader(tap.handle, 1, SECRET) as honest,
    ):
        exchange(repeated, honest, count=3)
        tap.repeat_to_writer()
        struck = time.monotonic()
        with pytest.raises(PeerLostError, match="lost rank 1"):
            fill(repeated)
        assert time.monotonic() - struck < SILENCE + STALL


# --- a right key, and wrong frames -----------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "detail"),
    [
        ([b"nonsense"], "Expected `array`"),
        ([b"\xc1"], "MessagePack"),
        ([b""], "truncated"),
        ([encode(Welcome(1))], "Invalid value 'welcome'"),
        ([encode(ReaderHello(2))], "second hello"),
        ([encode(("credit", -1, 0))], ">= 0"),
        ([encode(Credit(1 << 40, 0))], f"credit for {1 << 40} bytes of 0 sent"),
        ([encode(ReaderHello(1)), b"and more"], "2 frames"),
        ([bytes(4096)], None),  # oversized: it costs the connection
    ],
)
def test_malformed_frames_from_a_reader_name_it(
    writer: RemoteWriter, frames: list[bytes], detail: str | None
) -> None:
    def state_after_errors() -> str:
        with suppress(PeerLostError, PeerProtocolError):
            writer.poll()
        return writer._links[2].state

    with raw_reader(writer.handle, 2) as raw:
        raw.send_multipart([encode(ReaderHello(1))])
        until(lambda: state(writer, 2) == "busy")
        raw.send_multipart(frames)
        until(lambda: state_after_errors() == ("faulty" if detail else "lost"))
        with pytest.raises(PeerProtocolError if detail else PeerLostError, match=detail) as caught:
            writer.send([b"x"], LIMIT)
        error: Any = caught.value
        assert error.rank == 2


@pytest.mark.parametrize(
    ("frames", "detail"),
    [
        ([b"nonsense"], "Expected `array`"),
        ([encode(("message",)), bytes(FRAME_BYTES)], "a part without an end"),
        ([encode(("closed",)), b"and more"], "2 frames"),
    ],
)
def test_malformed_frames_from_the_writer_name_it(frames: list[bytes], detail: str) -> None:
    with raw_writer() as (raw, handle), RemoteReader(handle, 1, SECRET) as reader:
        identity, hello = raw.recv_multipart()
        assert msgspec.msgpack.decode(hello) == ["hello", os.getpid()]
        raw.send_multipart([identity, *frames])
        for _ in range(2):
            with pytest.raises(PeerProtocolError, match=detail) as caught:
                reader.recv(LIMIT)
            assert caught.value.rank == 0


def exchange(writer: RemoteWriter, *readers: RemoteReader, count: int = 20) -> None:
    """Send messages, which all readers receive in time and order."""
    for number in range(count):
        writer.send([number.to_bytes(4, "little"), PAYLOAD], LIMIT)
        if number % 10 == 9 or number == count - 1:
            for reader in readers:
                for expected in range(number - number % 10, number + 1):
                    head, payload = reader.recv(LIMIT)
                    assert int.from_bytes(head, "little") == expected
                    assert bytes(payload) == PAYLOAD


def state(writer: RemoteWriter, rank: int) -> str:
    writer.poll()
    return writer._links[rank].state


@contextmanager
def flood(writer: RemoteWriter) -> Iterator[Callable[[], int]]:
    """Make connections that send nonsense; yield a function that returns how many so far."""
    target = port_of(writer.handle)
    over = threading.Event()
    counts = [0, 0]
    # A greeting of ZMTP 3.1 with CURVE, then a frame that claims to have 2**62 bytes.
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
    nonsense = [b"", os.urandom(1000), greeting, greeting + b"\x06" + struct.pack(">Q", 1 << 62)]

    def attack(index: int) -> None:
        while not over.is_set():
            connection = socket.create_connection(target, LIMIT)
            with connection, suppress(ConnectionError):
                connection.sendall(nonsense[counts[index] % len(nonsense)])
            counts[index] += 1

    attackers = [threading.Thread(target=attack, args=(index,)) for index in range(len(counts))]
    for attacker in attackers:
        attacker.start()
    try:
        yield lambda: sum(counts)
    finally:
        over.set()
        for attacker in attackers:
            attacker.join(LIMIT)
