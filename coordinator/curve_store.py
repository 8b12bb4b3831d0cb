"""A store between hosts, encrypted and authenticated with the launcher's secret.

One process hosts it; all members connect, the host's own too. CURVE encrypts each connection, and
each end proves its key before any request. The keys derive from the secret and a random nonce
(`shm_broadcast.net.keys`). The host's address need not be secret: a process that alters it prevents
the rendezvous but reads nothing.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import msgspec
import zmq

from coordinator.key_values import (
    MAX_BYTES,
    InMemoryStore,
    StoreAddress,
    StoreRequest,
    StoreResponse,
)
from shm_broadcast import Deadline, GroupTimeoutError, MemberStatus
from shm_broadcast.codec import UNDECODABLE
from shm_broadcast.errors import PeerProtocolError, TransportError
from shm_broadcast.eventcount import WakeFd
from shm_broadcast.net.endpoint import Connection, RemoteEnd, bind_socket, one_address
from shm_broadcast.net.keys import HANDSHAKE_NONCE_BYTES, AllowList, reader_key, writer_key

_HOST: Final = 0
"""The member that hosts the store."""
_SILENCE: Final = 10.0
_FRAME_BYTES: Final = 2 * MAX_BYTES
_OPERATION: Final = "store"
_LEFT: Final = b""
"""The frame that a member sends when it leaves."""
_STAY_SECONDS: Final = 60.0
"""How long the host serves members that have not left: see `StoreServer.close`."""
_POLL_SECONDS: Final = 10.0
_QUESTION: Final = msgspec.msgpack.Decoder(StoreRequest)
_ANSWER: Final = msgspec.msgpack.Decoder(StoreResponse)


class StoreServer(RemoteEnd):
    """Hosts a store in its own thread, at the address ``at``. Close it."""

    def __init__(self, members: Iterable[int], bind_host: str, secret: bytes) -> None:
        """Listen on a free port of ``bind_host``.

        Args:
            members: the ranks that may use the store.
            bind_host: an address of this host that the members can reach: IPv4, IPv6, or a name.
            secret: the launcher's secret.

        Raises:
            ValueError: ``bind_host`` is a wildcard address.
            OSError: ``bind_host`` cannot be resolved, or is not an address of this host.
        """
        address = one_address(bind_host)
        nonce = secrets.token_bytes(HANDSHAKE_NONCE_BYTES)
        super().__init__(
            zmq.ROUTER,
            writer_key(secret, nonce),
            silence=_SILENCE,
            frame_bytes=_FRAME_BYTES,
            ipv6=address.version == 6,
        )
        self._present = set(members)
        self._values = InMemoryStore()
        self._stay_until = math.inf
        self._wake = WakeFd()
        self._poller.register(self._wake, zmq.POLLIN)
        self._admission = AllowList(self._context, secret, nonce, self._present)
        try:
            self._admission.start()
            self.at = StoreAddress(bind_socket(self._zmq, address), nonce)
            threading.Thread(target=self._serve, name="store-host", daemon=True).start()
        except BaseException:
            self._tear_down()
            raise

    def close(self, stay: float = _STAY_SECONDS) -> None:
        """Let the thread end when all members have left, or after ``stay`` seconds; return at once.

        Pass 0 if all members are known to have left or exited.
        """
        self._stay_until = time.monotonic() + stay
        self._wake.notify()

    def _serve(self) -> None:
        try:
            while (left := self._stay_until - time.monotonic()) > 0:
                while (received := self._receive()) is not None:
                    self._reply(*received)
                if not self._present:
                    return
                self._poller.poll(math.ceil(min(left, _POLL_SECONDS) * 1000))
                self._wake.clear()
        finally:
            self._tear_down()

    def _reply(self, identity: zmq.Frame, frame: zmq.Frame, *_: zmq.Frame) -> None:
        if not frame.buffer:
            self._present.discard(int(frame.get("User-Id")))
            return
        try:
            request = _QUESTION.decode(frame.buffer)
        except UNDECODABLE:
            return
        response = msgspec.msgpack.encode(self._values.answer(request))
        self._zmq.send_multipart([identity.bytes, response], zmq.NOBLOCK)

    def _send_closed(self) -> None:
        pass

    def _release(self) -> None:
        self._admission.stop()
        self._wake.close()


class StoreGuestClient(RemoteEnd):
    """One member's connection to a `StoreServer`. Close it."""

    def __init__(self, at: StoreAddress, rank: int, secret: bytes) -> None:
        """Begin to connect member ``rank``; raise ValueError if ``at`` is not a valid address.

        ``at``, the host's `StoreServer.at`, may come from an untrusted source.
        """
        super().__init__(
            zmq.DEALER,
            reader_key(secret, at.nonce, rank),
            silence=_SILENCE,
            frame_bytes=_FRAME_BYTES,
            ipv6="[" in at.address,
        )
        denied = "it does not admit this member's key"
        self._connection = Connection(self._context, self._zmq, at.address, denied)
        try:
            self._zmq.curve_serverkey = writer_key(secret, at.nonce).public
            self._poller.register(self._connection.events, zmq.POLLIN)
            if not at.address.startswith("tcp://"):
                raise zmq.ZMQError(zmq.EPROTONOSUPPORT)
            self._connection.begin()
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"{at.address!r} is no address of a store: {error}") from error

    def ask(self, question: StoreRequest, deadline: Deadline) -> StoreResponse:
        """Send a request and wait for its response.

        Raises:
            ValueError: the request has more than 2 x `MAX_BYTES` bytes; nothing is sent.
            GroupTimeoutError: no response before the deadline.
            TransportError: the connection broke, now or earlier.
            PeerProtocolError: the host rejects this member's key, or sent an invalid response.
            GroupClosedError: this end is closed.
        """
        encoded = msgspec.msgpack.encode(question)
        if len(encoded) > _FRAME_BYTES:
            raise ValueError(
                f"a request to the store is limited to {_FRAME_BYTES} bytes; got {len(encoded)}"
            )
        with self._use(_OPERATION, deadline):
            self._note_events()
            self._send_frame(encoded)
            while True:
                while (received := self._receive()) is not None:
                    response = self._decoded(received[0])
                    self._connection.made = True  # zmq may report this event later
                    # Another number answers a request whose caller was interrupted.
                    if response.number == question.number:
                        return response
                self._note_events()
                if deadline.expired:
                    raise GroupTimeoutError(
                        _OPERATION,
                        deadline.timeout,
                        (MemberStatus(_HOST, 0, "absent"),),
                        f"the store does not answer: {self._connection.problem()}",
                    )
                self._pause(_OPERATION, deadline, None)

    def _decoded(self, frame: zmq.Frame) -> StoreResponse:
        try:
            return _ANSWER.decode(frame.buffer)
        except UNDECODABLE as error:
            raise PeerProtocolError(_OPERATION, _HOST, str(error)) from error

    def _note_events(self) -> None:
        connection = self._connection
        connection.poll()
        if connection.fault:
            raise PeerProtocolError(_OPERATION, _HOST, connection.fault)
        if connection.lost:
            # zmq reconnects by itself, but must not be used: the request may have been executed,
            # and a repeated `Add` would count twice.
            self._closing = True
            raise TransportError(
                _OPERATION, f"the connection to {connection.address} is lost", _HOST
            )

    def _send_frame(self, frame: bytes) -> None:
        with suppress(zmq.Again):  # no connection: `_note_events` raises the reason
            self._zmq.send(frame, zmq.NOBLOCK)

    def _send_closed(self) -> None:
        if self._connection.made:
            self._send_frame(_LEFT)
        else:
            self._zmq.linger = 0

    def _release(self) -> None:
        self._connection.close()
