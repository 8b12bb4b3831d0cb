"""The reading end of a queue whose writer is on another host.

One DEALER socket that connects to the writer's address.

Guarantees
- Messages arrive whole and in order, each once. A `RemoteReader.recv` that raises has consumed
  nothing; the next one returns the message.
- A waiting call raises at once when the writer's process or host has closed the connection, and
  after the handle's ``silence`` seconds when nothing is heard from the writer. Messages that had
  arrived are delivered first.

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
    MemberStatus,
    PeerLostError,
    PeerProtocolError,
    name_of,
)
from shm_broadcast.net.endpoint import Connection, RemoteEnd
from shm_broadcast.net.keys import reader_key, writer_key
from shm_broadcast.net.protocol import (
    Assembler,
    Cancel,
    Closed,
    Credit,
    CreditAccount,
    Fragment,
    FrameError,
    ReaderHello,
    Refused,
    RemoteHandle,
    Welcome,
    cost,
    decode_from_writer,
    encode,
    fragment_limit,
)

_RECONNECT_MS: Final = 100
_RECONNECT_MAX_MS: Final = 2000


class RemoteReader(RemoteEnd):
    """The reading end. Make it from the writer's handle, `wait_ready`, `recv`, `close`.

    Attributes:
        rank: this reader's rank.
    """

    def __init__(self, handle: RemoteHandle, rank: int, secret: bytes) -> None:
        """Begin to connect; `wait_ready` waits for the connection.

        Collective: no.

        Args:
            handle: the writer's `RemoteWriter.handle`.
            rank: this reader's rank, one of ``handle.readers``.
            secret: the launcher's secret, the same as at the writer.

        Raises:
            ValueError: ``rank`` may not read from this writer, or the secret is too short.
        """
        if rank not in handle.readers:
            raise ValueError(f"rank must be one of {handle.readers}; got {rank}")
        self.rank = rank
        self._writer = handle.writer
        self._writer_at = handle.address.removeprefix("tcp://")
        self._writer_pid = 0
        self._heard_at: float | None = None
        self._state = "absent"
        self._fault = ""
        self._assembler = Assembler()
        self._ledger = CreditAccount(handle.credit_bytes)
        self._message: list[memoryview] | None = None
        server = writer_key(secret, handle.nonce).public
        super().__init__(
            zmq.DEALER,
            reader_key(secret, handle.nonce, rank),
            silence=handle.silence,
            frame_bytes=fragment_limit(handle.credit_bytes),
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

        Collective: yes, the writer and every reader.

        Args:
            deadline: when to give up.
            check: called between slices of waiting; what it raises ends the wait.

        Raises:
            GroupTimeoutError: the writer could not be reached, or has another secret.
            PeerLostError, PeerProtocolError, GroupClosedError: as for `recv`.
        """
        operation, until = "wait_until_ready", Deadline.after(deadline)
        with self._use(operation, until):
            self._wait(lambda: self._state == "busy", operation, until, check)

    def recv(
        self, deadline: Deadline | float | None, check: Callable[[], None] | None = None
    ) -> list[memoryview]:
        """Wait for the next message; return its parts as they were sent.

        Collective: no.

        Args:
            deadline: when to give up; 0 takes a message only if it is there.
            check: called every `SLICE_SECONDS` of waiting; what it raises ends the wait.

        Returns:
            Writable views that belong to the caller; they stay valid after `close`.

        Raises:
            GroupTimeoutError: no whole message yet; nothing is consumed.
            PeerLostError: the connection with the writer has ended; every later call raises it too.
            PeerProtocolError: the writer sent what the protocol does not allow, or refused this
                reader; every later call raises it too.
            GroupClosedError: this end was closed, or the writer closed its own.
        """
        operation, until = "dequeue", Deadline.after(deadline)
        with self._use(operation, until):
            self._wait(lambda: self._message is not None, operation, until, check)
            message, self._message = self._message, None
            return message or []

    def readable(self) -> bool:
        """Whether a message, or a part of one, has arrived, or `recv` has an error to raise.

        Never waits; False while another thread is in `recv`.
        """
        with suppress(GroupTimeoutError), self._use("readable", Deadline.after(0)):
            self._take_in()
            return (
                self._message is not None
                or self._assembler.partial
                or self._state not in ("absent", "busy")
            )
        return False

    def _connect(self, server_key: bytes) -> None:
        self._zmq.curve_serverkey = server_key
        self._zmq.reconnect_ivl = _RECONNECT_MS
        self._zmq.reconnect_ivl_max = _RECONNECT_MAX_MS
        self._poller.register(self._connection.events, zmq.POLLIN)
        self._connection.begin()
        self._tell(ReaderHello(os.getpid()))

    def _wait(
        self,
        ready: Callable[[], bool],
        operation: str,
        deadline: Deadline,
        check: Callable[[], None] | None,
    ) -> None:
        while True:
            self._take_in()
            if ready():
                return
            self._require_writer(operation)
            if deadline.expired:
                why = self._connection.problem() if self._state == "absent" else ""
                raise GroupTimeoutError(operation, deadline.timeout, (self._status(),), why)
            self._pause(operation, deadline, check)

    def _take_in(self) -> None:
        """Handle the frames that have arrived, up to the end of one message."""
        # Look at the events first, then at the frames: zmq delivers all frames of a connection
        # before it reports its end, so what is read after the report is complete.
        with self._unbroken():
            self._note_events()
            while self._message is None and self._state not in ("closed", "faulty"):
                received = self._receive()
                if received is None:
                    return
                self._heard_at = time.monotonic()
                try:
                    self._handle([frame.buffer for frame in received])
                except (*UNDECODABLE, FrameError) as error:
                    self._state, self._fault = "faulty", str(error)

    def _handle(self, frames: Sequence[memoryview]) -> None:
        frame = decode_from_writer(frames[0])
        if isinstance(frame, Fragment):
            self._message = self._assembler.add(frame, frames[1:])
            credit = self._ledger.consume(cost(frames), completes=self._message is not None)
            if credit is not None:
                self._tell(credit)
        elif len(frames) != 1:
            raise FrameError(f"{len(frames)} frames where 1 was due")
        elif isinstance(frame, Welcome):
            self._state, self._writer_pid = "busy", frame.pid
        elif isinstance(frame, Cancel):
            self._assembler.cancel()
        elif isinstance(frame, Closed):
            self._state = "closed"
        elif isinstance(frame, Refused):
            self._state, self._fault = "faulty", f"it refused this reader: {frame.reason}"

    def _note_events(self) -> None:
        """Take in the connection's events."""
        connection = self._connection
        connection.poll()
        if self._state in ("absent", "busy"):
            if connection.fault:
                self._state, self._fault = "faulty", connection.fault
            elif connection.lost:
                self._state = "lost"

    def _require_writer(self, operation: str) -> None:
        if self._state == "lost":
            raise PeerLostError(operation, self._status())
        if self._state == "faulty":
            raise PeerProtocolError(operation, self._writer, self._fault)
        if self._state == "closed":
            raise GroupClosedError(
                f"{operation}: the writer, {name_of(self._writer)}, closed its end of the queue"
            )

    def _status(self) -> MemberStatus:
        age = None if self._heard_at is None else time.monotonic() - self._heard_at
        operation = "enqueue" if self._ledger.messages else ""
        messages = self._ledger.messages
        return MemberStatus(
            *(self._writer, self._writer_pid, self._state, operation, messages, age),
            self._writer_at,
        )

    def _tell(self, frame: ReaderHello | Credit | Closed) -> None:
        with suppress(zmq.Again):  # there is no connection any more: its events say why
            self._zmq.send(encode(frame), zmq.NOBLOCK)

    def _send_closed(self) -> None:
        self._note_events()
        # Not welcomed yet, but connected: the writer may have this reader's hello, or will read it.
        if self._state == "busy" or (self._state == "absent" and self._connection.made):
            self._tell(Closed())
        else:
            self._zmq.linger = 0

    def _release(self) -> None:
        self._connection.close()
