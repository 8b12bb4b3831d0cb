"""The reading end of a queue whose writer is on another host.

One DEALER socket that connects to the writer's address.

Guarantees
- Messages arrive whole and in order, each once. A `RemoteReader.recv` that ends with an error
  consumed nothing; the next one goes on where it was.
- A writer whose process or host closed the connection is noticed at once by a call that waits.
  One that went silent is noticed after the handle's ``silence`` seconds. Messages that had
  arrived are delivered first.

Assumes: one reader per rank; a second one with the same rank is refused.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import (
    GroupClosedError,
    GroupTimeoutError,
    MemberStatus,
    PeerLostError,
    PeerProtocolError,
    name_of,
)
from shm_broadcast.remote_end import RemoteEnd
from shm_broadcast.remote_keys import reader_key, writer_key
from shm_broadcast.remote_wire import (
    Assembler,
    Cancel,
    Closed,
    Credit,
    CreditLedger,
    Fragment,
    FrameError,
    Hello,
    Refused,
    RemoteHandle,
    Welcome,
    cost,
    decode_from_writer,
    encode,
    fragment_limit,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_EVENTS_ADDRESS: Final = "inproc://events"
_HANDSHAKE_FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED
_RECONNECT_MS: Final = 100
_RECONNECT_MAX_MS: Final = 2000


class RemoteReader(RemoteEnd):
    """The reading end. Make it from the writer's handle, `wait_ready`, `recv`, `close`.

    Attributes:
        rank: this reader's rank.
    """

    def __init__(self, handle: RemoteHandle, rank: int, secret: bytes) -> None:
        """Begin to connect; `wait_ready` tells whether it worked.

        Collective: no.

        Args:
            handle: the writer's.
            rank: this reader's, one of the handle's.
            secret: the launcher's, the same as the writer's.

        Raises:
            ValueError: ``rank`` may not read from this writer, or the secret is too short.
        """
        if rank not in handle.readers:
            raise ValueError(f"rank must be one of {handle.readers}; got {rank}")
        self.rank = rank
        self._writer = handle.writer
        self._writer_pid = 0
        self._heard_at: float | None = None
        self._state = "absent"
        self._fault = ""
        self._connected = False
        self._failed_handshakes = 0
        self._assembler = Assembler()
        self._ledger = CreditLedger(handle.credit_bytes)
        self._message: list[memoryview] | None = None
        server = writer_key(secret, handle.nonce).public
        super().__init__(
            zmq.DEALER,
            reader_key(secret, handle.nonce, rank),
            silence=handle.silence,
            frame_bytes=fragment_limit(handle.credit_bytes),
            ipv6="[" in handle.address,
        )
        self._events = self._context.socket(zmq.PAIR)
        try:
            self._connect(handle.address, server)
        except BaseException:
            self.close()
            raise

    def wait_ready(
        self, deadline: Deadline | float | None, check: Callable[[], None] | None = None
    ) -> None:
        """Wait until the writer has taken note of this reader.

        Collective: yes, the writer and every reader.

        Args:
            deadline: when to give up.
            check: called between slices of waiting; what it raises ends the wait.

        Raises:
            GroupTimeoutError: the writer could not be reached, or has another secret.
            PeerLostError, PeerProtocolError, GroupClosedError: as for `recv`.
        """
        operation, until = "wait_ready", Deadline.after(deadline)
        with self._use(operation, until):
            self._wait(lambda: self._state == "busy", operation, until, check)

    def recv(
        self, deadline: Deadline | float | None, check: Callable[[], None] | None = None
    ) -> list[memoryview]:
        """The next message's parts, as they were sent.

        Collective: no.

        Args:
            deadline: when to give up; 0 takes a message only if it is there.
            check: called between slices of waiting; what it raises ends the wait.

        Returns:
            Writable buffers that belong to the caller; they stay valid after `close`.

        Raises:
            GroupTimeoutError: no whole message yet; nothing is consumed.
            PeerLostError: the writer is gone; so for every later call.
            PeerProtocolError: the writer sent what it may not, or refused this reader; likewise.
            GroupClosedError: this end was closed, or the writer closed its own.
        """
        operation, until = "recv", Deadline.after(deadline)
        with self._use(operation, until):
            self._wait(lambda: self._message is not None, operation, until, check)
            message, self._message = self._message, None
            return message or []

    def readable(self) -> bool:
        """Whether a message is there, at least in part, or `recv` has an error to raise.

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

    def _connect(self, address: str, server_key: bytes) -> None:
        self._zmq.curve_serverkey = server_key
        self._zmq.reconnect_ivl = _RECONNECT_MS
        self._zmq.reconnect_ivl_max = _RECONNECT_MAX_MS
        self._zmq.monitor(_EVENTS_ADDRESS, _EVENTS)
        self._events.rcvhwm = 0  # a full one would block libzmq's thread
        self._events.connect(_EVENTS_ADDRESS)
        self._poller.register(self._events, zmq.POLLIN)
        self._zmq.connect(address)
        self._tell(Hello(os.getpid()))

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
                raise GroupTimeoutError(
                    operation, deadline.timeout, (self._status(),), self._handshake_trouble()
                )
            self._pause(operation, deadline, check)

    def _take_in(self) -> None:
        """Handle what has arrived, up to the end of one message."""
        # Events first: what a connection delivered precedes the news that it has gone.
        self._note_events()
        while self._message is None and self._state not in ("closed", "faulty"):
            received = self._receive()
            if received is None:
                return
            self._heard_at = time.monotonic()
            try:
                self._handle([frame.buffer for frame in received])
            except (msgspec.MsgspecError, FrameError) as error:
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
        """Take in what zmq says of the connection."""
        while self._events.poll(0):
            event = recv_monitor_message(self._events)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._state, self._fault = "faulty", "it does not admit this reader's key"
            elif self._connected:
                # Gone, or, as zmq calls a forged frame, a failed handshake. It connects again by
                # itself, but credits and sequence died with the connection.
                if self._state in ("absent", "busy"):
                    self._state = "lost"
            elif event & _HANDSHAKE_FAILED:
                self._failed_handshakes += 1

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
        operation = "send" if self._ledger.messages else ""
        return MemberStatus(
            self._writer, self._writer_pid, self._state, operation, self._ledger.messages, age
        )

    def _handshake_trouble(self) -> str:
        failed = self._failed_handshakes
        return f"{failed} handshakes failed: is the secret the same?" if failed else ""

    def _tell(self, frame: Hello | Credit | Closed) -> None:
        self._zmq.send(encode(frame), zmq.NOBLOCK)

    def _farewell(self) -> None:
        self._note_events()
        if self._state == "busy":
            self._tell(Closed())
        else:
            self._zmq.linger = 0

    def _release(self) -> None:
        self._events.close()
