"""Own the zmq socket of one end of a remote queue: connect, follow its connection, close.

zmq reconnects by itself, but here a connection that was made and then lost stays lost: messages
under way are gone.

- One thread at a time uses the socket. Any thread may call `RemoteEnd.close`; a call that waits in
  another thread then raises `GroupClosedError` within `SLICE_SECONDS`.
- After `close` the end has no socket, thread or context any more.
- An exception from a signal handler closes the end, except while a call only waits: how much of a
  message was sent or received is unknown.

Assumes: libzmq was built with CURVE, as PyPI's pyzmq is.
"""

from __future__ import annotations

import errno
import ipaddress
import math
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address
from typing import Final, Self

import zmq
from zmq.utils.monitor import recv_monitor_message

from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import CoordinatorError, GroupClosedError
from shm_broadcast.eventcount import SLICE_SECONDS, TimedLock
from shm_broadcast.net.keys import ZAP_DOMAIN, CurveKey

_ADDRESS: Final = "inproc://events"
_FAILED: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_ALL: Final = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED


class Connection:
    """Connects a socket to one address and follows the state of the connection.

    Attributes:
        events: a socket that becomes readable when `poll` has events to handle.
        reached: whether a listener has accepted a connection.
        made: whether the handshake has succeeded, now or earlier.
        lost: whether the connection was made and has ended since.
        fault: why there will never be a connection; empty unless that is certain.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        connecting: zmq.Socket[bytes],
        address: str,
        denied: str,
    ) -> None:
        """Prepare ``connecting`` for ``address``, ``tcp://host:port``; `begin` connects.

        ``denied`` is the text of `fault` if the listener does not admit this socket's key.
        """
        self.address = address
        self._socket = connecting
        self.reached = self.made = self.lost = False
        self.fault = ""
        self._denied = denied
        self._tries_again = False
        self._failed = 0
        self.events = context.socket(zmq.PAIR)

    def begin(self) -> None:
        """Connect the socket, whose options are set already.

        Raises zmq.ZMQError if ``address`` is not valid.
        """
        self._socket.monitor(_ADDRESS, _ALL)
        self.events.rcvhwm = 0  # a full one would block libzmq's thread
        self.events.connect(_ADDRESS)
        self._socket.connect(self.address)

    def poll(self) -> None:
        """Handle the events since the last call. Never waits."""
        while self.events.poll(0):
            event = recv_monitor_message(self.events)
            self._handle(event["event"], event["value"])

    def problem(self) -> str:
        """Return why the listener has not answered, for error messages."""
        if self.made:
            return "it is connected, but has not admitted this end yet"
        if self._failed:
            return f"at {self.address} {self._failed} handshakes failed: is the secret the same?"
        if self.reached:
            return f"the listener at {self.address} sends nothing"
        return f"nothing answers at {self.address}"

    def close(self) -> None:
        """Close the event socket; the connected socket is the caller's."""
        self.events.close()

    def _handle(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self.reached = True
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.made = True
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.fault = self._denied
        elif self.made:
            self.lost = True  # zmq reports a forged frame as a failed handshake
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._tries_again = True
            self._failed += value != errno.EAGAIN  # EAGAIN: it took longer than handshake_ivl
        elif self._tries_again:  # the disconnection that follows a failed handshake
            self._tries_again = False
        else:  # a protocol violation: zmq reports only this, and does not connect again
            self.fault = self.fault or f"the listener at {self.address} breaks the protocol"


LINGER_SECONDS: Final = 1.0
"""The longest time in which `RemoteEnd.close` still sends messages.

It must not be 0 for messages of several frames: libzmq 4.3.5 aborts the process (in `clean_pipes`)
if a socket without linger is closed in the middle of a message just when the connection ends.
"""

_HANDSHAKE_SECONDS: Final = 5.0
_FRAME_SLACK: Final = 512
"""Bytes of a frame beyond its contents: CURVE's overhead, and its handshake's frames."""


class RemoteEnd(ABC):
    """One end of a remote queue, and a context manager that closes it."""

    def __init__(
        self, kind: int, key: CurveKey, *, silence: float, frame_bytes: int, ipv6: bool
    ) -> None:
        """Make the socket of zmq's type ``kind``; the subclass binds or connects it.

        ``silence``: seconds without a heartbeat after which the peer counts as lost.
        ``frame_bytes``: a connection that sends a larger frame ends. ``ipv6``: the peer's address
        is an IPv6 address.
        """
        self._lock = TimedLock()
        self._closing = self._interrupted = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zmq = self._context.socket(kind)
        self._zmq.linger = int(LINGER_SECONDS * 1000)
        self._zmq.ipv6 = ipv6
        self._zmq.curve_publickey = key.public
        self._zmq.curve_secretkey = key.secret
        self._zmq.maxmsgsize = frame_bytes + _FRAME_SLACK
        self._zmq.handshake_ivl = int(_HANDSHAKE_SECONDS * 1000)
        # In milliseconds: a ping every quarter of the silence leaves three quarters to answer it.
        self._zmq.heartbeat_ivl = int(silence * 250)
        self._zmq.heartbeat_timeout = int(silence * 750)
        # No limit of zmq's own, which counts messages: byte credits limit the data under way.
        self._zmq.sndhwm = self._zmq.rcvhwm = 0
        self._poller = zmq.Poller()
        self._poller.register(self._zmq, zmq.POLLIN)

    def fileno(self) -> int:
        """Return a descriptor for poll(2) that becomes readable when a message may have arrived.

        It is edge-triggered: call ``readable()`` or ``poll()`` each time before polling it again.
        It also becomes readable for frames without a message.
        """
        return self._zmq.fileno()

    def close(self) -> None:
        """Send the rest and the end to the peers, up to `LINGER_SECONDS`, and close. Idempotent.

        A call that waits in another thread raises `GroupClosedError`.
        """
        self._closing = True
        # The lock's owner releases it within a slice, and then tears down (see `_use`). A signal
        # handler's own thread does so after the handler returns.
        if self._lock.owner_lock.is_owned():
            return
        with self._lock.owner_lock as acquired:
            if acquired or self._lock.owner_lock.take_within(10 * SLICE_SECONDS):
                self._tear_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _send_closed(self) -> None:
        """Send the peers, without waiting, that this end is closed."""

    @abstractmethod
    def _release(self) -> None:
        """Close the subclass's other zmq objects; the socket is closed already."""

    @contextmanager
    def _use(self, operation: str, deadline: Deadline) -> Iterator[None]:
        """Hold the socket for one call: zmq sockets are not thread-safe."""
        with self._lock.owner_lock as acquired:
            if not acquired:
                self._lock.acquire(deadline, operation, self._require_open)
            self._require_open(operation)
            self._interrupted = True  # until the call ends, or only waits
            try:
                yield
                self._interrupted = False
            except CoordinatorError:
                self._interrupted = False
                raise
            finally:
                self._closing |= self._interrupted
                if self._closing:
                    self._tear_down()

    def _pause(self, operation: str, deadline: Deadline, check: Callable[[], None] | None) -> None:
        self._interrupted = False
        self._require_open(operation)
        if check is not None:
            check()
        self._poller.poll(math.ceil(deadline.remaining(SLICE_SECONDS) * 1000))
        self._interrupted = True

    def _receive(self) -> list[zmq.Frame] | None:
        try:
            return self._zmq.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def _send_to(self, identity: bytes, frames: Sequence[bytes | zmq.Frame]) -> bool:
        """Send one zmq message over a ROUTER's connection; return False if that has ended."""
        try:
            self._zmq.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _require_open(self, operation: str) -> None:
        if self._closing:
            why = ": an exception interrupted an earlier message" if self._interrupted else ""
            raise GroupClosedError(f"{operation}: this end of the queue is closed{why}")

    def _tear_down(self) -> None:
        if self._zmq.closed:
            return
        if not self._interrupted:
            self._send_closed()
        self._zmq.close()
        self._release()
        self._context.term()


def bind_socket(
    server: zmq.Socket[bytes], address: IPv4Address | IPv6Address, port: int = 0
) -> str:
    """Bind a socket to ``address``, for peers on the context's `AllowList` only.

    Returns the endpoint, ``tcp://host:port``; ``port`` 0 means any free one. Raises OSError if
    ``address`` is no address of this host, or the port is in use.
    """
    server.curve_server = True
    server.zap_domain = ZAP_DOMAIN.encode()
    # Without it zmq admits every peer while no authenticator answers.
    server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    host = f"[{address}]" if address.version == 6 else str(address)
    try:
        server.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as error:
        where = f"{host}:{port}" if port else host
        reason = zmq.strerror(error.errno or 0)
        raise OSError(error.errno, f"cannot listen on {where}: {reason}") from error
    return server.get_string(zmq.LAST_ENDPOINT)


def one_address(host: str) -> IPv4Address | IPv6Address:
    """Return the IP address of ``host``, which is an address or a name.

    Raises:
        ValueError: it is the wildcard address (0.0.0.0 or ::), which means all interfaces.
        OSError: the name cannot be resolved.
    """
    try:
        first = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except socket.gaierror as error:
        raise OSError(error.errno, f"cannot resolve {host!r}: {error.strerror}") from error
    address = ipaddress.ip_address(first)
    if address.is_unspecified:
        raise ValueError(f"the host must be one address, not all of them; got {host!r}")
    return address
