"""The writing end of a queue whose readers are on other hosts: a ROUTER socket.

A PUB socket would drop messages for a slow reader. Here every reader has a window of byte credits
(see `shm_broadcast.net.protocol`), and the writer waits for the slowest.

- Every reader gets every message, whole and in order; or `RemoteWriter.send` raises and no reader
  gets it. A closed reader gets none, and is not waited for.
- The caller may change its buffers after `RemoteWriter.send` has returned.
- A waiting call raises within `PROBE_SECONDS` plus one slice when a reader's process or host has
  closed the connection, and after ``silence`` seconds without a heartbeat (a cut cable, a stopped
  process). If no call waits, the next one raises.
- libzmq's own thread drops connections without the right key, and frames beyond 1 KiB.

Assumes: the writer calls `RemoteWriter.wait_ready`, `RemoteWriter.send` or `RemoteWriter.poll` now
and then: only these admit readers that have connected.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import zmq

from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import CoordinatorError, GroupTimeoutError
from shm_broadcast.net.endpoint import RemoteEnd, bind_socket, one_address
from shm_broadcast.net.keys import HANDSHAKE_NONCE_BYTES, AllowList, writer_key
from shm_broadcast.net.protocol import (
    DEFAULT_CREDIT_BYTES,
    Closed,
    MessageHeader,
    Probe,
    RemoteHandle,
    RemoteReaderState,
    cost,
    cut_part,
    encode,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer


PROBE_SECONDS: Final = 0.25
"""How often a waiting writer tests its readers' connections.

zmq reports a lost connection only to a send. A reader that never reads accumulates the probes:
about 0.5 KiB for each second that the writer waits.
"""

DEFAULT_SILENCE: Final = 10.0

_MESSAGE: Final = memoryview(encode(MessageHeader()))


class RemoteWriter(RemoteEnd):
    """The writing end: make it, publish its `handle`, then `wait_ready`, `send`, `close`."""

    def __init__(
        self,
        rank: int,
        readers: Iterable[int],
        bind_host: str,
        secret: bytes,
        *,
        credit_bytes: int = DEFAULT_CREDIT_BYTES,
        silence: float = DEFAULT_SILENCE,
    ) -> None:
        """Listen on a free port of ``bind_host``.

        Args:
            rank: the writer's rank, for error messages.
            readers: the ranks that may read, each once; `send` waits until all have connected.
            bind_host: this host's address that the readers reach: IPv4, IPv6, or a name.
            secret: the launcher's secret, 16 bytes or more, the same in all processes.
            credit_bytes: the bytes under way to each reader; limits memory at both ends, except
                for a larger message.
            silence: seconds without a heartbeat after which a reader counts as lost.

        Raises:
            ValueError: the secret is too short, or ``bind_host`` means all interfaces.
            OSError: ``bind_host`` cannot be resolved, or is no address of this host.
        """
        address, ranks = one_address(bind_host), tuple(readers)
        nonce = secrets.token_bytes(HANDSHAKE_NONCE_BYTES)
        key = writer_key(secret, nonce)
        super().__init__(
            zmq.ROUTER, key, silence=silence, frame_bytes=1024, ipv6=address.version == 6
        )
        self._links = {each: RemoteReaderState(each, credit_bytes) for each in ranks}
        self._messages = 0
        self._probe_at = 0.0
        self._admission = AllowList(self._context, secret, nonce, ranks)
        try:
            self._admission.start()
            self._zmq.router_mandatory = True
            bound = bind_socket(self._zmq, address)
        except BaseException:
            self.close()
            raise
        self.handle = RemoteHandle(bound, nonce, rank, ranks, credit_bytes, silence)

    def wait_ready(
        self, deadline: Deadline | float | None, check: Callable[[], None] | None = None
    ) -> None:
        """Wait until every reader has connected.

        Collective: yes, the writer and every reader. ``check`` and errors as in `send`.
        """
        operation, until = "wait_until_ready", Deadline.after(deadline)
        with self._use(operation, until):
            self._wait(0, operation, until, check)

    def send(
        self,
        parts: Sequence[Buffer],
        deadline: Deadline | float | None,
        check: Callable[[], None] | None = None,
    ) -> bool:
        """Send one message, a list of contiguous buffers of any size, to every open reader.

        Waits while a reader has no credit left or has not connected, and until the deadline for
        readers to receive a message larger than the credit window. The buffers may be changed after
        the call.

        Args:
            check: called every `SLICE_SECONDS` of waiting; its exceptions end the call.

        Returns:
            Whether any reader was connected.

        Raises:
            GroupTimeoutError: no reader gets the message; names the readers that are behind.
            PeerLostError: a reader's connection has ended; every later call raises it too, until
                `remove`.
            PeerProtocolError: a reader violated the protocol; likewise.
            GroupClosedError: this end was closed.
        """
        operation, until = "enqueue", Deadline.after(deadline)
        frames = [_MESSAGE, *(frame for part in parts for frame in cut_part(_flat(part)))]
        price = cost(frames)
        with self._use(operation, until):
            self._wait(price, operation, until, check)
            for link in self._links.values():
                link.spent += price
            is_sent = self._post(frames)
            self._messages += 1
            if price > self.handle.credit_bytes:
                try:
                    self._wait(0, operation, until, check)
                except CoordinatorError:
                    pass  # the message is sent: the next call raises, if need be
                except BaseException:
                    self._closing = True
                    raise
            return is_sent

    def poll(self) -> None:
        """Handle frames from readers. Never waits; does nothing while another thread sends.

        Raises PeerLostError, PeerProtocolError and GroupClosedError as `send`.
        """
        with suppress(GroupTimeoutError), self._use("poll", Deadline.after(0)):
            self._probe()
            self._receive_all()
            self._require_readers("poll")

    def has_no_readers(self) -> bool:
        """Return whether every reader is closed or was removed, as far as is known."""
        return all(link.state == "closed" for link in self._links.values())

    def remove(self, rank: int) -> None:
        """Continue without reader ``rank``.

        Raises ValueError if it is neither lost nor faulty.
        """
        with self._use("remove_reader", Deadline.after(None)):
            self._probe()
            self._receive_all()
        self._links[rank].remove()

    def _wait(
        self, need: int, operation: str, deadline: Deadline, check: Callable[[], None] | None
    ) -> None:
        while True:
            self._receive_all()
            self._require_readers(operation)
            late = [link for link in self._links.values() if not link.can_take(need)]
            if not late:
                return
            if deadline.expired:
                raise GroupTimeoutError(
                    operation,
                    deadline.timeout,
                    tuple(link.status() for link in late),
                    f"{self._messages} messages were sent before",
                )
            self._pause(operation, deadline, check)
            self._probe()

    def _receive_all(self) -> None:
        while (received := self._receive()) is not None:
            identity, *frames = received
            link = self._links[int(frames[0].get("User-Id"))]
            reply = link.receive(identity.bytes, [frame.buffer for frame in frames])
            if link.identity == identity.bytes:
                link.host = str(frames[0].get("Peer-Address"))
            if reply is not None:
                self._send_to(identity.bytes, [encode(reply)])

    def _probe(self) -> None:
        """Find ended connections by sending on them, at most every `PROBE_SECONDS`."""
        now = time.monotonic()
        if now >= self._probe_at:
            self._probe_at = now + PROBE_SECONDS
            self._post([encode(Probe())])

    def _post(self, frames: Sequence[bytes | memoryview]) -> bool:
        """Send one zmq message to every connected reader; the bytes are copied once for all.

        Returns whether there is such a reader.
        """
        shared = [zmq.Frame(frame, copy=True) for frame in frames]
        connected = [link for link in self._links.values() if link.state == "busy"]
        lost = [link for link in connected if not self._send_to(link.identity, shared)]
        if lost:
            self._receive_all()  # a reader that closed its end has sent `Closed` before
        for link in lost:
            if link.state == "busy":
                link.state = "lost"
        return bool(connected)

    def _require_readers(self, operation: str) -> None:
        for link in self._links.values():
            link.require(operation)

    def _send_closed(self) -> None:
        self._post([encode(Closed())])

    def _release(self) -> None:
        self._admission.stop()


def _flat(part: Buffer) -> memoryview:
    view = memoryview(part)
    return view.cast("B") if view.nbytes else memoryview(b"")
