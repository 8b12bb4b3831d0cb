"""Carry framed JSON messages over a socket pair, and serve a pool's rendezvous store over such
pairs.

A frame is a length (u32, big-endian) and that many bytes. Several threads may send, but only one at
a time may receive. When the other end's process has ended, `Channel.receive` raises
`ChannelClosedError`.

Each worker inherits one end of a socket pair (its seat), so nobody else can ask or answer: there is
no address to connect to, and no file.
"""

from __future__ import annotations

import errno
import select
import socket
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec

from coordinator.key_values import InMemoryStore, StoreRequest
from shm_broadcast import NEVER, CoordinatorError, Deadline, GroupTimeoutError, MessageDecodeError
from shm_broadcast.codec import UNDECODABLE
from shm_broadcast.deadline import milliseconds
from shm_broadcast.eventcount import WakeFd

_LENGTH = struct.Struct(">I")
_CHUNK = 1 << 16
_CLOSED = (errno.EPIPE, errno.ECONNRESET, errno.EBADF)
"""Errors of an end that is gone: the other one, or, closed by another thread, this one."""
_LONGEST = 1 << 29
"""Bytes of one message. A length beyond it is none: text that was written there reads as one."""


class ChannelClosedError(CoordinatorError, ConnectionError):
    """The other end of a control channel is gone."""


class Channel:
    """One end of a control channel.

    Args:
        connection: this end of the socket pair; the channel closes it.
        receives: the type of the messages that arrive, for msgspec.
    """

    def __init__(self, connection: socket.socket, receives: Any) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._decoder = msgspec.json.Decoder(receives)
        self._received = bytearray()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """The socket's descriptor: readable when a message has come, or the other end is gone."""
        return self._connection.fileno()

    def send(self, message: Any, deadline: Deadline = NEVER) -> None:
        """Send one message; waits while the socket's buffer is full.

        Raises:
            ChannelClosedError: the other end is gone, or this one was closed.
            GroupTimeoutError: the other end did not read in time; the channel is unusable, as a
                part of the frame may have been sent.
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
            ChannelClosedError: the other end is gone, and all that it sent was received.
            MessageDecodeError: something that is no message was written there. Nothing that comes
                after it can be told apart, so the channel is of no more use.
            GroupTimeoutError: no message before the deadline.
        """
        while (message := self.take()) is None:
            self._wait(select.POLLIN, deadline, "receive")
        return message

    def take(self) -> Any | None:
        """The next message if it has arrived, else ``None``. Raises `ChannelClosedError`."""
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
            raise MessageDecodeError(
                f"the control channel has brought no message: {error}"
            ) from error

    def close(self) -> None:
        """Close this end; idempotent."""
        self._connection.close()

    def _next_body(self) -> bytes | None:
        if len(self._received) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if length > _LONGEST:
            began = bytes(self._received[:80])
            raise MessageDecodeError(f"the control channel brought no message: {began!r}")
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


_ANSWER_SECONDS = 1.0
"""How long to wait until a worker takes an answer.

An answer fits into the socket's buffer, so only a worker that asks and asks without reading answers
makes this wait; it gets no more answers.
"""


class RendezvousServer:
    """The driver's end: answers the workers in a thread of its own. Close it."""

    def __init__(self) -> None:
        """Nobody is invited yet; see `open_round`."""
        self._channels: dict[int, Channel] = {}
        self._end = WakeFd()
        self._closed = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def open_round(self, newcomers: Iterable[int]) -> Iterator[dict[int, socket.socket]]:
        """Empty the store for another meeting, and make a seat for each newcomer.

        The seats of the other ranks, who have left the meeting before, stay theirs. Inside, the
        newcomers' processes can inherit their seats; at the end they are closed in this process.

        Args:
            newcomers: the ranks whose processes are new.

        Yields:
            Their seats, by rank.
        """
        self._close_round()
        self._values = InMemoryStore()
        with ExitStack() as seats:
            made = {}
            for rank in newcomers:
                ours, theirs = socket.socketpair()
                made[rank] = seats.enter_context(theirs)
                if rank in self._channels:
                    self._channels[rank].close()
                self._channels[rank] = Channel(ours, StoreRequest)
            self._thread = threading.Thread(target=self._serve, name="pool-meeting", daemon=True)
            self._thread.start()
            yield made

    def close(self) -> None:
        """End the thread and close everything; idempotent."""
        if not self._closed:
            self._closed = True
            self._close_round()
            for channel in self._channels.values():
                channel.close()
            self._end.close()

    def _close_round(self) -> None:
        if self._thread is not None:
            self._end.notify()
            if self._thread.is_alive():  # it may not have been started
                self._thread.join()
            self._thread = None
            self._end.clear()

    def _serve(self) -> None:
        channels = {channel.fileno(): channel for channel in self._channels.values()}
        asking = select.poll()
        for fd in (self._end.fileno(), *channels):
            asking.register(fd, select.POLLIN)
        while True:
            for fd, _ in asking.poll():
                if fd == self._end.fileno():
                    return
                if not self._answers(channels[fd]):
                    asking.unregister(fd)

    def _answers(self, channel: Channel) -> bool:
        """Answer a worker's questions that have arrived; False if it is gone or misbehaves."""
        try:
            while (question := channel.take()) is not None:
                channel.send(self._values.answer(question), Deadline.after(_ANSWER_SECONDS))
        except (ChannelClosedError, GroupTimeoutError, MessageDecodeError):
            return False
        return True
