"""Between a queue's ends on other hosts: a listener, a recorder that also replays, raw sockets."""

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
    from collections.abc import Callable, Iterator

PAYLOAD = b"what no intruder should read" * 40
"""A message of both ends; a tap takes only larger chunks for messages."""

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


def read_to_end(connection: socket.socket, text: bytes | None = None) -> bytes:
    """Receive until the other side closes, or has sent ``text``."""
    received = b""
    with suppress(ConnectionResetError):
        while chunk := connection.recv(1 << 16):
            received += chunk
            if text is not None and text in received:
                return received
    assert text is None, f"the connection ended before {text!r}"
    return received


@contextmanager
def listening(behaviour: Callable[[socket.socket], object]) -> Iterator[str]:
    """Inside, each connection to the address is passed to ``behaviour``."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):  # the listener is shut down
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    behaviour(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(LIMIT)


class Tap:
    """Stands between a reader and its writer, records what both send, and repeats it.

    Attributes:
        handle: the writer's handle with this tap's address.
        target: the writer's host and port.
    """

    def __init__(self, handle: RemoteHandle) -> None:
        self.handle, self.target = handle, port_of(handle)
        self.from_reader = self.from_writer = self._last_large = b""
        self.sockets: list[socket.socket] = []

    def repeat_to_reader(self) -> None:
        """Send the writer's last large chunk again."""
        assert self._last_large
        self.sockets[0].sendall(self._last_large)

    def repeat_to_writer(self) -> None:
        """Send all that the reader has sent since the handshake again."""
        self.sockets[1].sendall(b"".join(zmtp_frames(self.from_reader)[3:]))

    def forward(self, reader: socket.socket) -> None:
        with socket.create_connection(self.target, LIMIT) as writer:
            writer.settimeout(None)
            self.sockets += [reader, writer]
            back = threading.Thread(target=self._forward, args=(writer, reader))
            back.start()
            self._forward(reader, writer)
            back.join(LIMIT)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(1 << 20):
                if source is self.sockets[0]:
                    self.from_reader += chunk
                else:
                    self.from_writer += chunk
                    if len(chunk) > len(PAYLOAD):
                        self._last_large = chunk
                sink.sendall(chunk)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def tapped(handle: RemoteHandle) -> Iterator[Tap]:
    tap = Tap(handle)
    with listening(tap.forward) as address:
        tap.handle = msgspec.structs.replace(handle, address=address)
        try:
            yield tap
        finally:
            for each in tap.sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)


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
