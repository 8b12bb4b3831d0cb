"""What both ends of a remote queue share: one zmq socket, its keys, waiting, and closing.

Guarantees
- One thread at a time uses the socket; any thread may `RemoteEnd.close`, and a call that waits in
  another thread then raises `GroupClosedError` within `SLICE_SECONDS`.
- After `close` no socket, thread or context of the end is left.

Assumes: libzmq was built with CURVE, as PyPI's pyzmq is.
"""

from __future__ import annotations

import ipaddress
import math
import socket
import threading
from abc import ABC, abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Self

import zmq

from shm_broadcast.errors import GroupClosedError, GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from ipaddress import IPv4Address, IPv6Address

    from shm_broadcast.deadline import Deadline
    from shm_broadcast.remote_keys import CurveKey

SLICE_SECONDS: Final = 0.04
"""How long an end sleeps at most before it looks at the caller's ``check`` again."""

LINGER_SECONDS: Final = 1.0
"""How long `RemoteEnd.close` waits at most for what was sent to leave this host."""

_HANDSHAKE_SECONDS: Final = 5.0
_FRAME_SLACK: Final = 512
"""Bytes a frame may have beyond its contents: what CURVE adds, and the handshake's own frames."""


class RemoteEnd(ABC):
    """One end of a remote queue. Close it; it is a context manager."""

    def __init__(
        self, kind: int, key: CurveKey, *, silence: float, frame_bytes: int, ipv6: bool
    ) -> None:
        """Make the socket.

        Args:
            kind: zmq's socket type.
            key: this end's own key pair.
            silence: seconds without a sign of life after which the peer counts as lost.
            frame_bytes: the largest frame to accept; a connection that sends a larger one ends.
            ipv6: whether the address is one of IPv6.
        """
        self._lock = threading.Lock()
        self._closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._zmq = self._context.socket(kind)
        self._zmq.linger = int(LINGER_SECONDS * 1000)
        self._zmq.ipv6 = ipv6
        self._zmq.curve_publickey = key.public
        self._zmq.curve_secretkey = key.secret
        self._zmq.maxmsgsize = frame_bytes + _FRAME_SLACK
        self._zmq.handshake_ivl = int(_HANDSHAKE_SECONDS * 1000)
        # Asked every quarter of the silence, a peer has the other three to answer.
        self._zmq.heartbeat_ivl = int(silence * 250)
        self._zmq.heartbeat_timeout = int(silence * 750)
        # Byte credits bound what is under way; zmq's own limits count messages.
        self._zmq.sndhwm = self._zmq.rcvhwm = 0
        self._poller = zmq.Poller()
        self._poller.register(self._zmq, zmq.POLLIN)

    def fileno(self) -> int:
        """A descriptor that becomes readable when something may have arrived.

        It is edge-triggered: after each edge, call ``readable()`` or ``poll()`` before sleeping on
        it again. It is also readable for frames that carry no message.
        """
        return self._zmq.fileno()

    def close(self) -> None:
        """Leave in good order; what was sent has up to `LINGER_SECONDS` to get out. Idempotent.

        A call that waits in another thread raises `GroupClosedError`.
        """
        self._closing = True
        # Not got only where the holder cannot go on before this returns: a signal handler that
        # interrupted it. The holder then tears down.
        if self._lock.acquire(timeout=10 * SLICE_SECONDS):
            try:
                self._tear_down()
            finally:
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _farewell(self) -> None:
        """Tell the peers, without waiting, that this end leaves."""

    @abstractmethod
    def _release(self) -> None:
        """Let go of what the subclass keeps in the context; the socket is closed already."""

    @contextmanager
    def _use(self, operation: str, deadline: Deadline) -> Iterator[None]:
        """Hold the socket for one call.

        Raises:
            GroupClosedError: the end is closed.
            GroupTimeoutError: another thread holds it past the deadline.
        """
        self._require_open(operation)
        if not self._lock.acquire(timeout=deadline.remaining(threading.TIMEOUT_MAX)):
            raise GroupTimeoutError(operation, deadline.timeout, detail="another thread is in it")
        try:
            self._require_open(operation)
            yield
        finally:
            if self._closing:
                self._tear_down()
            self._lock.release()

    def _pause(self, operation: str, deadline: Deadline, check: Callable[[], None] | None) -> None:
        """Sleep until something arrives, or one slice.

        Raises:
            GroupClosedError: the end was closed.
            Exception: what ``check`` raises.
        """
        self._require_open(operation)
        if check is not None:
            check()
        self._poller.poll(math.ceil(deadline.remaining(SLICE_SECONDS) * 1000))

    def _receive(self) -> list[zmq.Frame] | None:
        """The next message that has arrived, if one has."""
        try:
            return self._zmq.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def _require_open(self, operation: str) -> None:
        if self._closing:
            raise GroupClosedError(f"{operation}: this end of the queue is closed")

    def _tear_down(self) -> None:
        if self._zmq.closed:
            return
        self._farewell()
        self._zmq.close()
        self._release()
        self._context.term()


def one_address(host: str) -> IPv4Address | IPv6Address:
    """The address that ``host``, an address or a name, stands for.

    Raises:
        ValueError: it stands for all addresses of this host.
        OSError: the name is not known.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    address = ipaddress.ip_address(found)
    if address.is_unspecified:
        raise ValueError(f"the host must be one address, not all of them; got {host!r}")
    return address
