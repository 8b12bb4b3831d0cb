"""Framed JSON messages over a socket pair.

A frame is a length (u32, big-endian) and that many bytes. Several threads may send; one at a time
may receive. After the end of the other process, `Channel.receive` raises `ChannelClosedError`.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import threading
from typing import Any

import msgspec

from shm_broadcast import NEVER, CoordinatorError, Deadline, GroupTimeoutError, MessageDecodeError
from shm_broadcast.codec import UNDECODABLE
from shm_broadcast.deadline import milliseconds

_LENGTH = struct.Struct(">I")
_CHUNK = 1 << 16
_CLOSED = (errno.EPIPE, errno.ECONNRESET, errno.EBADF)
"""Errors after the close of either end."""
_LONGEST = 1 << 29
"""Most bytes of one message. Text written to the descriptor reads as a larger length."""


class ChannelClosedError(CoordinatorError, ConnectionError):
    """The other end of a control channel is closed."""


class Channel:
    """One end of a control channel, for messages of type ``receives``; owns ``connection``."""

    def __init__(self, connection: socket.socket, receives: Any) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._decoder = msgspec.json.Decoder(receives)
        self._received = bytearray()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Return the socket's descriptor: readable at a message or the end of the other process."""
        return self._connection.fileno()

    def send(self, message: Any, deadline: Deadline = NEVER) -> None:
        """Send one message; block while the socket's buffer is full.

        Raises:
            ChannelClosedError: either end was closed.
            GroupTimeoutError: the other end did not read in time; part of the frame may be sent, so
                the channel is unusable.
        """
        body = msgspec.json.encode(message)
        left = memoryview(_LENGTH.pack(len(body)) + body)
        with self._sending:
            while left:
                try:
                    left = left[self._connection.send(left, socket.MSG_NOSIGNAL) :]
                except BlockingIOError:
                    self._wait(select.POLLOUT, deadline, "send")
                except OSError as error:
                    if error.errno not in _CLOSED:
                        raise
                    raise ChannelClosedError("the control channel is closed") from error

    def receive(self, deadline: Deadline = NEVER) -> Any:
        """Wait for the next message.

        Raises:
            ChannelClosedError: the other end is closed, and all its messages were received.
            MessageDecodeError: the bytes are no message; the channel is unusable.
            GroupTimeoutError: no message before the deadline.
        """
        while (message := self.take()) is None:
            self._wait(select.POLLIN, deadline, "receive")
        return message

    def take(self) -> Any | None:
        """Return the next message if it has arrived, else ``None``. Raises `ChannelClosedError`."""
        while (body := self._next_body()) is None:
            try:
                data = self._connection.recv(_CHUNK)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                data = b""
            if not data:
                raise ChannelClosedError("the control channel is closed")
            self._received += data
        try:
            return self._decoder.decode(body)
        except UNDECODABLE as error:
            raise MessageDecodeError(f"the control channel received no message: {error}") from error

    def close(self) -> None:
        """Close this end; idempotent."""
        self._connection.close()

    def _next_body(self) -> bytes | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > _LONGEST:
            first_bytes = bytes(self._received[:80])
            raise MessageDecodeError(f"the control channel received no message: {first_bytes!r}")
        end = _LENGTH.size + length
        if len(self._received) < end:
            return None
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return body

    def _wait(self, events: int, deadline: Deadline, operation: str) -> None:
        poll = select.poll()
        poll.register(self._connection, events)
        if not poll.poll(milliseconds(deadline.remaining())):
            raise GroupTimeoutError(f"control channel {operation}", deadline.timeout)
