"""The control channel: framed JSON messages over one end of a Unix socket pair.

A frame is its length (u32, big-endian) and that many bytes. Either end may send from several
threads; one thread at a time receives. The other end's death reads as `ChannelClosedError`.
"""

from __future__ import annotations

import select
import struct
import threading
from typing import TYPE_CHECKING, Any

import msgspec

from shm_broadcast import NEVER, CoordinatorError, Deadline, GroupTimeoutError

if TYPE_CHECKING:
    import socket

_LENGTH = struct.Struct(">I")
_CHUNK = 1 << 16


class ChannelClosedError(CoordinatorError, ConnectionError):
    """The other end of a control channel is gone."""


class Channel:
    """One end of a control channel.

    Args:
        connection: this end; the channel owns it.
        receives: the type of the messages that come in.
    """

    def __init__(self, connection: socket.socket, receives: Any) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._decoder = msgspec.json.Decoder(receives)
        self._received = bytearray()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """The socket's descriptor: readable when a message, or the end, is there."""
        return self._connection.fileno()

    def send(self, message: Any, deadline: Deadline = NEVER) -> None:
        """Send one message.

        Raises:
            ChannelClosedError: the other end is gone.
            GroupTimeoutError: it took nothing in before the deadline.
        """
        body = msgspec.json.encode(message)
        left = memoryview(_LENGTH.pack(len(body)) + body)
        with self._sending:
            while left:
                try:
                    left = left[self._connection.send(left) :]
                except BlockingIOError:
                    self._wait(select.POLLOUT, deadline, "send")
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise ChannelClosedError("the control channel is closed") from error

    def receive(self, deadline: Deadline = NEVER) -> Any:
        """The next message.

        Raises:
            ChannelClosedError: the other end is gone, and all it sent was received.
            GroupTimeoutError: none came before the deadline.
        """
        while (message := self.take()) is None:
            self._wait(select.POLLIN, deadline, "receive")
        return message

    def take(self) -> Any | None:
        """The next message if it is there; ``None`` if it is not. Raises what `receive` raises."""
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
        return self._decoder.decode(body)

    def close(self) -> None:
        """Close this end; idempotent."""
        self._connection.close()

    def _next_body(self) -> bytes | None:
        if len(self._received) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        if len(self._received) < end:
            return None
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        return body

    def _wait(self, events: int, deadline: Deadline, operation: str) -> None:
        poll = select.poll()
        poll.register(self._connection, events)
        remaining = deadline.remaining()
        if not poll.poll(None if deadline is NEVER else remaining * 1000):
            raise GroupTimeoutError(f"control channel {operation}", deadline.timeout)
