"""What stands between a queue's ends on other hosts: it listens, repeats, and plays back."""

from __future__ import annotations

import secrets
import socket
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec
import zmq

from shm_broadcast.net.keys import reader_key, writer_key
from shm_broadcast.net.protocol import RemoteHandle
from tests.shm_broadcast.remote_peers import CREDIT, LIMIT, SECRET

if TYPE_CHECKING:
    from collections.abc import Iterator

PAYLOAD = b"what nobody else should read" * 40
"""What the ends exchange; a tap takes only what is larger for a message."""

LINGER_MILLISECONDS = 100
"""Not 0, with which libzmq may abort: see `shm_broadcast.net.endpoint.LINGER_SECONDS`."""


def port_of(handle: RemoteHandle) -> tuple[str, int]:
    host, port = handle.address.removeprefix("tcp://").split(":")
    return host, int(port)


def zmtp_frames(stream: bytes) -> list[bytes]:
    """The greeting of ZMTP 3.1, then each frame: flags, size in 1 or 8 bytes, body."""
    frames, at = [stream[:64]], 64
    while at < len(stream):
        long = stream[at] & 2
        size = int.from_bytes(stream[at + 1 : at + (9 if long else 2)], "big")
        end = at + (9 if long else 2) + size
        frames.append(stream[at:end])
        at = end
    return frames


def wait_for(connection: socket.socket, text: bytes) -> None:
    """Read until the other side has said ``text``."""
    heard = b""
    while text not in heard:
        chunk = connection.recv(1 << 16)
        assert chunk, f"the connection ended before {text!r}"
        heard += chunk


def read_to_end(connection: socket.socket) -> bytes:
    """All that the other side sends until it closes."""
    heard = b""
    try:
        while chunk := connection.recv(1 << 16):
            heard += chunk
    except ConnectionResetError:
        pass
    return heard


class Tap:
    """Stands between a reader and its writer, and writes down what both say.

    Attributes:
        handle: the writer's handle with this tap's address.
        target: the writer's host and port.
    """

    def __init__(self, handle: RemoteHandle) -> None:
        self.target = port_of(handle)
        self._listener = socket.create_server(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.handle = msgspec.structs.replace(handle, address=address)
        self.from_reader = b""
        self.from_writer = b""
        self._last_large = b""
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve)]

    def __enter__(self) -> Tap:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._sockets:
            each.close()
        for thread in self._threads:
            thread.join(LIMIT)

    def repeat_to_reader(self) -> None:
        """Say once more the last thing of some size that the writer said."""
        assert self._last_large
        self._sockets[0].sendall(self._last_large)

    def repeat_to_writer(self) -> None:
        """Say once more all that the reader has said since the handshake."""
        self._sockets[1].sendall(b"".join(zmtp_frames(self.from_reader)[3:]))

    def _serve(self) -> None:
        try:
            reader, _ = self._listener.accept()
        except OSError:
            return
        writer = socket.create_connection(self.target, LIMIT)
        writer.settimeout(None)
        self._sockets += [reader, writer]
        answers = threading.Thread(target=self._answer, args=(writer, reader))
        self._threads.append(answers)
        answers.start()
        self._pass_on(reader, writer, from_reader=True)

    def _answer(self, writer: socket.socket, reader: socket.socket) -> None:
        self._pass_on(writer, reader, from_reader=False)

    def _pass_on(self, source: socket.socket, sink: socket.socket, *, from_reader: bool) -> None:
        try:
            while chunk := source.recv(1 << 20):
                if from_reader:
                    self.from_reader += chunk
                else:
                    self.from_writer += chunk
                    if len(chunk) > len(PAYLOAD):
                        self._last_large = chunk
                sink.sendall(chunk)
        except OSError:
            pass
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class Player:
    """Answers every connection with a recorded writer's bytes.

    Attributes:
        handle: the writer's handle with this player's address.
        played: whether somebody has listened, and hung up.
    """

    def __init__(self, handle: RemoteHandle, recorded: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.handle = msgspec.structs.replace(handle, address=address)
        self.played = False
        self._recorded = recorded
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Player:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(LIMIT)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(LIMIT)
                try:
                    connection.sendall(self._recorded)
                    read_to_end(connection)
                except OSError:
                    pass
            self.played = True


@contextmanager
def raw_reader(handle: RemoteHandle, rank: int) -> Iterator[zmq.Socket[bytes]]:
    """A plain socket with a reader's key."""
    key = reader_key(SECRET, handle.nonce, rank)
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = LINGER_MILLISECONDS
        raw.curve_publickey, raw.curve_secretkey = key.public, key.secret
        raw.curve_serverkey = writer_key(SECRET, handle.nonce).public
        raw.connect(handle.address)
        yield raw


@contextmanager
def raw_writer() -> Iterator[tuple[zmq.Socket[bytes], RemoteHandle]]:
    """A plain socket with a writer's key, and the handle that names it."""
    nonce = secrets.token_bytes(32)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as raw:
        raw.linger = LINGER_MILLISECONDS
        raw.rcvtimeo = int(LIMIT * 1000)
        raw.curve_server = True
        raw.curve_secretkey = writer_key(SECRET, nonce).secret
        raw.bind("tcp://127.0.0.1:*")
        address = raw.get_string(zmq.LAST_ENDPOINT)
        yield raw, RemoteHandle(address, nonce, 0, (1,), CREDIT, 10.0)
