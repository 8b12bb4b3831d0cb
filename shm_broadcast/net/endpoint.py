"""Own the zmq socket of one end of a remote queue: connect, wait, follow its connection, close.

zmq connects again by itself, but a connection that was made and then lost counts as lost for good
here: the messages that were under way are gone. Nothing here waits.

Guarantees
- One thread at a time uses the socket; any thread may `RemoteEnd.close`, and a call that waits in
  another thread then raises `GroupClosedError` within `SLICE_SECONDS`.
- After `close` no socket, thread or context of the end is left.
- An exception in the middle of a message, such as one from a signal handler, closes the end: nobody
  can tell how much of that message the peers have.

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
    """Connects a socket to one address and follows what becomes of the connection.

    Attributes:
        address: the other side's, ``tcp://host:port``.
        events: a socket that becomes readable when `poll` has something to take in.
        reached: whether anything has accepted a connection there.
        made: whether the handshake has succeeded, now or earlier.
        lost: whether the connection was made and has ended since.
        fault: why there will never be a connection; empty unless that is known.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        connecting: zmq.Socket[bytes],
        address: str,
        denied: str,
    ) -> None:
        """Prepare; `begin` connects.

        Args:
            context: the socket's zmq context.
            connecting: the socket to connect.
            address: ``tcp://host:port``.
            denied: the text of `fault` if the other side does not admit this socket's key.
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
        """Connect the socket; its options must be set already.

        Raises:
            zmq.ZMQError: ``address`` is not valid.
        """
        self._socket.monitor(_ADDRESS, _ALL)
        self.events.rcvhwm = 0  # a full one would block libzmq's thread
        self.events.connect(_ADDRESS)
        self._socket.connect(self.address)

    def poll(self) -> None:
        """Take in the events since the last call. Never waits."""
        while self.events.poll(0):
            told = recv_monitor_message(self.events)
            self._take(told["event"], told["value"])

    def problem(self) -> str:
        """A text for error messages: why the other side has not answered, as far as is known."""
        if self.made:
            return "it is connected, and has not attended to this end since"
        if self._failed:
            return f"at {self.address} {self._failed} handshakes failed: is the secret the same?"
        if self.reached:
            return f"what listens at {self.address} says nothing"
        return f"nothing answers at {self.address}"

    def close(self) -> None:
        """Close the event socket; the connected socket is the caller's."""
        self.events.close()

    def _take(self, event: int, value: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self.reached = True
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.made = True
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.fault = self._denied
        elif self.made:
            self.lost = True  # also by a failed handshake, which zmq reports for a forged frame
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._tries_again = True
            self._failed += value != errno.EAGAIN  # EAGAIN: it took longer than handshake_ivl
        elif self._tries_again:  # the disconnection that follows a failed handshake
            self._tries_again = False
        else:  # a protocol violation: zmq reports only this, and does not connect again
            self.fault = self.fault or f"what listens at {self.address} breaks the protocol"


LINGER_SECONDS: Final = 1.0
"""The longest that `RemoteEnd.close` waits until messages that were sent have left this host. It
must not be 0 for messages of several frames: libzmq 4.3.5 ends the process (in `clean_pipes`) if a
socket without linger is closed in the middle of one just when the connection ends."""

_HANDSHAKE_SECONDS: Final = 5.0
_FRAME_SLACK: Final = 512
"""Bytes that a frame may have beyond its contents: CURVE's overhead, and its handshake's frames."""


class RemoteEnd(ABC):
    """One end of a remote queue. Close it; it is a context manager."""

    def __init__(
        self, kind: int, key: CurveKey, *, silence: float, frame_bytes: int, ipv6: bool
    ) -> None:
        """Make the socket; the subclass binds or connects it.

        Args:
            kind: zmq's socket type.
            key: this end's own key pair.
            silence: seconds without a heartbeat after which the peer counts as lost.
            frame_bytes: the largest frame to accept; a connection that sends a larger one ends.
            ipv6: whether the peer's address is an IPv6 address.
        """
        self._lock = TimedLock()
        self._closing = False
        self._partial = False
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
        # No limit of zmq's own, which counts messages: byte credits bound what is under way.
        self._zmq.sndhwm = self._zmq.rcvhwm = 0
        self._poller = zmq.Poller()
        self._poller.register(self._zmq, zmq.POLLIN)

    def fileno(self) -> int:
        """A descriptor for poll(2) that becomes readable when something may have arrived.

        It is edge-triggered: each time, call ``readable()`` or ``poll()`` before polling it again.
        It also becomes readable for frames that carry no message.
        """
        return self._zmq.fileno()

    def close(self) -> None:
        """Tell the peers and close; takes up to `LINGER_SECONDS` to send the rest. Idempotent.

        A call that waits in another thread raises `GroupClosedError`.
        """
        self._closing = True
        # Whoever holds the turn gives it up within a slice, and then tears down (see `_use`). If a
        # signal handler has interrupted this very thread, it does so when the handler returns.
        if self._lock.owner_lock.is_owned():
            return
        with self._lock.owner_lock as mine:
            if mine or self._lock.owner_lock.take_within(10 * SLICE_SECONDS):
                self._tear_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _send_closed(self) -> None:
        """Tell the peers, without waiting, that this end leaves."""

    @abstractmethod
    def _release(self) -> None:
        """Close what else the subclass has in the zmq context; the socket is closed already."""

    @contextmanager
    def _use(self, operation: str, deadline: Deadline) -> Iterator[None]:
        """Hold the socket for one call: zmq sockets are not thread-safe.

        Raises:
            GroupClosedError: the end is closed.
            GroupTimeoutError: another thread holds it past the deadline.
            RuntimeError: this thread holds it: a signal handler uses the end that it interrupted.
        """
        with self._lock.owner_lock as mine:
            if not mine:
                self._lock.acquire(deadline, operation, self._require_open)
            try:
                self._require_open(operation)
                yield
            except BaseException:
                self._closing |= self._partial
                raise
            finally:
                if self._closing:
                    self._tear_down()

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Around steps that belong together: an exception in between, unless it is ours, closes the
        end.
        """
        before, self._partial = self._partial, True
        try:
            yield
        except CoordinatorError:
            self._partial = before
            raise
        self._partial = before

    def _pause(self, operation: str, deadline: Deadline, check: Callable[[], None] | None) -> None:
        """Sleep until something arrives, but at most `SLICE_SECONDS`.

        Raises:
            GroupClosedError: this end was closed.
            Exception: what ``check`` raises.
        """
        self._require_open(operation)
        if check is not None:
            check()
        self._poller.poll(math.ceil(deadline.remaining(SLICE_SECONDS) * 1000))

    def _receive(self) -> list[zmq.Frame] | None:
        """The next zmq message that has arrived; None if there is none."""
        try:
            return self._zmq.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def _send_to(self, identity: bytes, frames: Sequence[bytes | zmq.Frame]) -> bool:
        """Send one zmq message over one of a ROUTER's connections; False if that has ended."""
        try:
            self._zmq.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _require_open(self, operation: str) -> None:
        if self._partial:
            raise GroupClosedError(
                f"{operation}: this end of the queue is closed: an exception came up in the middle "
                "of an earlier message"
            )
        if self._closing:
            raise GroupClosedError(f"{operation}: this end of the queue is closed")

    def _tear_down(self) -> None:
        if self._zmq.closed:
            return
        if not self._partial:
            self._send_closed()
        self._zmq.close()
        self._release()
        self._context.term()


def bind_socket(
    server: zmq.Socket[bytes], address: IPv4Address | IPv6Address, port: int = 0
) -> str:
    """Bind a socket to a port of ``address``; only peers on the context's `AllowList` get in.

    Args:
        server: the socket.
        address: one of this host's.
        port: 0: any free one.

    Returns:
        The address it listens at, ``tcp://host:port``.

    Raises:
        OSError: ``address`` is no address of this host, or the port is in use.
    """
    server.curve_server = True
    server.zap_domain = ZAP_DOMAIN.encode()
    # Without it zmq admits everybody while no authenticator answers.
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
    """The IP address of ``host``, which is an address or a name.

    Raises:
        ValueError: it is the wildcard address (0.0.0.0 or ::), which means all interfaces.
        OSError: the name cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except socket.gaierror as error:
        raise OSError(error.errno, f"cannot resolve {host!r}: {error.strerror}") from error
    address = ipaddress.ip_address(found)
    if address.is_unspecified:
        raise ValueError(f"the host must be one address, not all of them; got {host!r}")
    return address
