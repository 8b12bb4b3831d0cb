"""The reading end of a queue whose writer is on another host: a DEALER socket.

- Messages arrive whole and in order, each once. A `RemoteReader.recv` that raises has consumed
  nothing; the next one returns the message.
- A waiting call raises at once when the writer's process or host has closed the connection, and
  after the handle's ``silence`` seconds without a frame or heartbeat from the writer. Messages that
  had arrived are delivered first.

Assumes: one reader per rank; a second one with the same rank is refused.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import zmq

from shm_broadcast.codec import UNDECODABLE
from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import (
    GroupClosedError,
    GroupTimeoutError,
    name_of,
)
from shm_broadcast.net.endpoint import Connection, RemoteEnd
from shm_broadcast.net.keys import reader_key, writer_key
from shm_broadcast.net.protocol import (
    FRAME_BYTES,
    Closed,
    Credit,
    FrameError,
    MessageHeader,
    Peer,
    ReaderHello,
    Refused,
    RemoteHandle,
    Welcome,
    cost,
    decode_from_writer,
    encode,
    join_parts,
)

_RECONNECT_MS: Final = 100
_RECONNECT_MAX_MS: Final = 2000


class RemoteReader(RemoteEnd):
    """The reading end: make it from the writer's handle, then `wait_ready`, `recv`, `close`."""

    def __init__(self, handle: RemoteHandle, rank: int, secret: bytes) -> None:
        """Begin to connect as ``rank``; `wait_ready` waits for the connection.

        Raises ValueError if ``rank`` may not read from this writer, or the secret is too short.
        """
        if rank not in handle.readers:
            raise ValueError(f"rank must be one of {handle.readers}; got {rank}")
        self.rank = rank
        self._writer = Peer(handle.writer, handle.address.removeprefix("tcp://"))
        self._report_bytes = handle.credit_bytes // 4
        self._consumed = self._reported = 0
        self._message: list[memoryview] | None = None
        server = writer_key(secret, handle.nonce).public
        super().__init__(
            zmq.DEALER,
            reader_key(secret, handle.nonce, rank),
            silence=handle.silence,
            frame_bytes=FRAME_BYTES,
            ipv6="[" in handle.address,
        )
        denied = "it does not admit this reader's key"
        self._connection = Connection(self._context, self._zmq, handle.address, denied)
        try:
            self._connect(server)
        except BaseException:
            self.close()
            raise

    def wait_ready(
        self, deadline: Deadline | float | None, check: Callable[[], None] | None = None
    ) -> None:
        """Wait until the writer has admitted this reader.

        Collective: yes, the writer and every reader. Errors as in `recv`.
        """
        operation, until = "wait_until_ready", Deadline.after(deadline)
        with self._use(operation, until):
            self._wait(lambda: self._writer.state == "busy", operation, until, check)

    def recv(
        self, deadline: Deadline | float | None, check: Callable[[], None] | None = None
    ) -> list[memoryview]:
        """Wait for the next message; return its parts as they were sent.

        The parts are writable views that belong to the caller and stay valid after `close`.

        Args:
            deadline: 0 receives a message only if it has arrived.
            check: called every `SLICE_SECONDS` of waiting; its exceptions end the wait.

        Raises:
            GroupTimeoutError: no whole message yet; nothing is consumed.
            PeerLostError: the connection with the writer has ended; every later call raises it too.
            PeerProtocolError: the writer violated the protocol, or refused this reader; every later
                call raises it too.
            GroupClosedError: this end was closed, or the writer closed its own.
        """
        operation, until = "dequeue", Deadline.after(deadline)
        with self._use(operation, until):
            self._wait(lambda: self._message is not None, operation, until, check)
            message, self._message = self._message, None
            return message or []

    def readable(self) -> bool:
        """Return whether a message has arrived, or `recv` has an error to raise.

        Never waits; False while another thread is in `recv`.
        """
        with suppress(GroupTimeoutError), self._use("readable", Deadline.after(0)):
            self._receive_all()
            return self._message is not None or self._writer.state not in ("absent", "busy")
        return False

    def _connect(self, server_key: bytes) -> None:
        self._zmq.curve_serverkey = server_key
        self._zmq.reconnect_ivl = _RECONNECT_MS
        self._zmq.reconnect_ivl_max = _RECONNECT_MAX_MS
        self._poller.register(self._connection.events, zmq.POLLIN)
        self._connection.begin()
        self._post(ReaderHello(os.getpid()))

    def _wait(
        self,
        ready: Callable[[], bool],
        operation: str,
        deadline: Deadline,
        check: Callable[[], None] | None,
    ) -> None:
        writer = self._writer
        while True:
            self._receive_all()
            if ready():
                return
            writer.require(operation)
            if writer.state == "closed":
                raise GroupClosedError(
                    f"{operation}: the writer, {name_of(writer.rank)}, closed its end of the queue"
                )
            if deadline.expired:
                why = self._connection.problem() if writer.state == "absent" else ""
                raise GroupTimeoutError(operation, deadline.timeout, (writer.status(),), why)
            self._pause(operation, deadline, check)

    def _receive_all(self) -> None:
        """Handle the frames that have arrived, up to one message."""
        # Events first, then frames: zmq delivers all frames of a connection before it reports its
        # end, so no frame is missing after the report.
        self._poll_events()
        while self._message is None and self._writer.state not in ("closed", "faulty"):
            received = self._receive()
            if received is None:
                return
            self._writer.received_at = time.monotonic()
            try:
                self._handle([frame.buffer for frame in received])
            except (*UNDECODABLE, FrameError) as error:
                self._writer.mark_faulty(str(error))

    def _handle(self, frames: Sequence[memoryview]) -> None:
        frame = decode_from_writer(frames[0])
        if isinstance(frame, MessageHeader):
            self._message = join_parts(frames[1:])
            self._writer.operation = "enqueue"
            self._writer.messages += 1
            self._consumed += cost(frames)
            if self._consumed - self._reported >= self._report_bytes:
                self._reported = self._consumed
                self._post(Credit(self._consumed, self._writer.messages))
        elif len(frames) != 1:
            raise FrameError(f"{len(frames)} frames where 1 was due")
        elif isinstance(frame, Welcome):
            self._writer.state, self._writer.pid = "busy", frame.pid
        elif isinstance(frame, Closed):
            self._writer.state = "closed"
        elif isinstance(frame, Refused):
            self._writer.mark_faulty(f"it refused this reader: {frame.reason}")

    def _poll_events(self) -> None:
        connection, writer = self._connection, self._writer
        connection.poll()
        if writer.state in ("absent", "busy"):
            if connection.fault:
                writer.mark_faulty(connection.fault)
            elif connection.lost:
                writer.state = "lost"

    def _post(self, frame: ReaderHello | Credit | Closed) -> None:
        with suppress(zmq.Again):  # the connection has ended: its events have the reason
            self._zmq.send(encode(frame), zmq.NOBLOCK)

    def _send_closed(self) -> None:
        self._poll_events()
        state = self._writer.state
        # Connected without a `Welcome`: the writer has or will receive this reader's `ReaderHello`.
        if state == "busy" or (state == "absent" and self._connection.made):
            self._post(Closed())
        else:
            self._zmq.linger = 0

    def _release(self) -> None:
        self._connection.close()
