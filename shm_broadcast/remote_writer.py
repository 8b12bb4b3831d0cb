"""The writing end of a queue whose readers are on other hosts.

One ROUTER socket, bound to one address. PUB would drop messages for a slow reader and could not
hear one; here every reader has a window of byte credits, and the writer waits for the slowest.

Guarantees
- Every reader gets every message, whole and in order; or `RemoteWriter.send` raises and no reader
  gets it, unless a reader was lost meanwhile.
- The caller may change its buffers once `RemoteWriter.send` has returned.
- A reader whose process or host closed the connection is named within `PROBE_SECONDS` plus a
  slice by a call that waits, and by the next call otherwise. One that went silent (a cut cable, a
  stopped process) is named after ``silence`` seconds, while a call waits or at the next one.
- Connections without the right key, and frames beyond 1 KiB, are dropped by libzmq's own thread.

Assumes: the writer's process calls in now and then while readers arrive: they are welcomed by
`RemoteWriter.wait_ready`, `RemoteWriter.send` and `RemoteWriter.poll`.
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import zmq

from shm_broadcast.deadline import Deadline
from shm_broadcast.errors import GroupClosedError, GroupTimeoutError, MessageTooLargeError
from shm_broadcast.remote_end import RemoteEnd, one_address
from shm_broadcast.remote_keys import NONCE_BYTES, ZAP_DOMAIN, AllowList, writer_key
from shm_broadcast.remote_link import RemoteLink
from shm_broadcast.remote_wire import (
    DEFAULT_CREDIT_BYTES,
    MIN_CREDIT_BYTES,
    Cancel,
    Closed,
    Fragment,
    Probe,
    RemoteHandle,
    cost,
    encode,
    fragment_limit,
    split,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from ipaddress import IPv4Address, IPv6Address

    from typing_extensions import Buffer

    from shm_broadcast.errors import MemberStatus

PROBE_SECONDS: Final = 0.25
"""How often a waiting writer asks zmq whether its readers' connections are still there.

A reader that never reads keeps the probes: about 0.5 KiB for each second of the writer's wait.
"""

DEFAULT_SILENCE: Final = 10.0


class RemoteWriter(RemoteEnd):
    """The writing end. Make it, publish its `handle`, `wait_ready`, `send`, `close`.

    Attributes:
        handle: what readers attach with; holds no secret.
    """

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

        Collective: no.

        Args:
            rank: the writer's rank, for messages.
            readers: the ranks that may read, each once; all of them must arrive.
            bind_host: the one address that the readers reach: an IPv4 or IPv6 address, or a name.
            secret: the launcher's, 16 bytes or more, the same in all processes.
            credit_bytes: what may be on its way to each reader; bounds the memory on either side.
            silence: seconds without a sign of life after which a reader counts as lost.

        Raises:
            ValueError: an argument is out of range, or ``bind_host`` means all interfaces.
            OSError: ``bind_host`` is not known, or is no address of this host.
        """
        ranks = tuple(readers)
        if not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0:
            raise ValueError(f"readers must be one or more different ranks; got {ranks}")
        if credit_bytes < MIN_CREDIT_BYTES:
            raise ValueError(f"credit_bytes must be {MIN_CREDIT_BYTES} or more; got {credit_bytes}")
        if not silence > 0:
            raise ValueError(f"silence must be a positive number of seconds; got {silence}")
        address = one_address(bind_host)
        nonce = secrets.token_bytes(NONCE_BYTES)
        key = writer_key(secret, nonce)
        super().__init__(
            zmq.ROUTER, key, silence=silence, frame_bytes=1024, ipv6=address.version == 6
        )
        self._links = {each: RemoteLink(each, credit_bytes) for each in ranks}
        self._limit = fragment_limit(credit_bytes)
        self._sequence = 0
        self._messages = 0
        self._probe_at = 0.0
        self._admission = AllowList(self._context, secret, nonce, ranks)
        try:
            self._admission.start()
            self._zmq.curve_server = True
            self._zmq.zap_domain = ZAP_DOMAIN.encode()
            self._zmq.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            self._zmq.router_mandatory = True
            bound = self._bind(address)
        except BaseException:
            self.close()
            raise
        self.handle = RemoteHandle(bound, nonce, rank, ranks, credit_bytes, silence)

    @property
    def address(self) -> str:
        """Where it listens: ``tcp://host:port``."""
        return self.handle.address

    def wait_ready(
        self, deadline: Deadline | float | None, check: Callable[[], None] | None = None
    ) -> None:
        """Wait until every reader has arrived.

        Collective: yes, the writer and every reader.

        Args:
            deadline: when to give up.
            check: called between slices of waiting; what it raises ends the wait.

        Raises:
            GroupTimeoutError: lists the readers that have not arrived.
            PeerLostError: a reader arrived and is gone.
            PeerProtocolError, GroupClosedError: as for `send`.
        """
        operation, until = "wait_ready", Deadline.after(deadline)
        with self._use(operation, until):
            self._wait(0, operation, until, check)

    def send(
        self,
        parts: Sequence[Buffer],
        deadline: Deadline | float | None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Send one message, a list of buffers of any size, to every reader.

        Waits while a reader's credit is spent, or a reader has not arrived. A message larger than
        the credit window is a rendezvous: the readers take it out while it is sent.

        Collective: no.

        Args:
            parts: contiguous buffers; may be changed once this returns.
            deadline: when to give up.
            check: called between slices of waiting; what it raises ends the call.

        Raises:
            GroupTimeoutError: no reader gets the message; lists the readers that are behind.
            PeerLostError: a reader is gone; so for every later call.
            PeerProtocolError: a reader sent what it may not; so for every later call.
            GroupClosedError: this end was closed, or every reader closed its own.
            MessageTooLargeError: too many parts for one header.
        """
        operation, until = "send", Deadline.after(deadline)
        views = [_flat(part) for part in parts]
        sizes = tuple(len(view) for view in views)
        size_of_header = len(encode(Fragment(self._sequence, sizes)))
        if size_of_header > self._limit:
            raise MessageTooLargeError(size_of_header, self._limit)
        with self._use(operation, until):
            begun = False
            try:
                for chunks in split(views, self._limit):
                    header = encode(Fragment(self._sequence, None if begun else sizes))
                    frames: list[bytes | memoryview] = [header, *chunks]
                    self._wait(cost(frames), operation, until, check)
                    begun = True
                    self._send_fragment(frames)
            except BaseException:
                if begun:
                    self._post([encode(Cancel())])
                raise
            self._messages += 1
            self._require_readers(operation)

    def poll(self) -> None:
        """Take in what readers have sent. Never waits; a `send` in another thread does it itself.

        Raises:
            PeerLostError, PeerProtocolError, GroupClosedError: as for `send`.
        """
        with suppress(GroupTimeoutError), self._use("poll", Deadline.after(0)):
            self._probe()
            self._take_in()
            self._require_readers("poll")

    def status(self) -> list[MemberStatus]:
        """What is known of each reader; ``sequence`` counts the messages it took, at least."""
        return [link.status() for link in self._links.values()]

    def _bind(self, address: IPv4Address | IPv6Address) -> str:
        host = f"[{address}]" if address.version == 6 else str(address)
        try:
            self._zmq.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"cannot listen on {host}: {error.strerror}") from error
        return self._zmq.get_string(zmq.LAST_ENDPOINT)

    def _wait(
        self, need: int, operation: str, deadline: Deadline, check: Callable[[], None] | None
    ) -> None:
        """Wait until every reader is there and has ``need`` bytes of credit."""
        while True:
            self._take_in()
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

    def _take_in(self) -> None:
        """Handle all that has arrived."""
        gone: list[RemoteLink] = []
        while (received := self._receive()) is not None:
            identity, *frames = received
            link = self._links[int(frames[0].get("User-Id"))]
            reply = link.take(identity.bytes, [frame.buffer for frame in frames])
            heard = reply is None or self._send_to(identity.bytes, [encode(reply)])
            if not heard and link.identity == identity.bytes:
                gone.append(link)
        for link in gone:
            link.lose()

    def _send_fragment(self, frames: Sequence[bytes | memoryview]) -> None:
        """Send to every reader, all of which have the credit."""
        self._sequence += 1
        price = cost(frames)
        for link in self._links.values():
            link.window.spend(price)
        self._post(frames)

    def _probe(self) -> None:
        """Find connections that are gone, at most every `PROBE_SECONDS`."""
        now = time.monotonic()
        if now >= self._probe_at:
            self._probe_at = now + PROBE_SECONDS
            self._post([encode(Probe())])

    def _post(self, frames: Sequence[bytes | memoryview]) -> None:
        """Hand one zmq message to every reader that is there; its bytes are copied once."""
        shared = [zmq.Frame(frame, copy=True) for frame in frames]
        gone = [
            link
            for link in self._links.values()
            if link.joined and not self._send_to(link.identity, shared)
        ]
        if gone:
            self._take_in()  # a reader that left in good order said so before it went
        for link in gone:
            link.lose()

    def _send_to(self, identity: bytes, frames: Sequence[bytes | zmq.Frame]) -> bool:
        """Whether the connection was still there."""
        try:
            self._zmq.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _require_readers(self, operation: str) -> None:
        for link in self._links.values():
            link.require(operation)
        if all(link.left for link in self._links.values()):
            raise GroupClosedError(f"{operation}: every reader has left")

    def _farewell(self) -> None:
        self._post([encode(Closed())])

    def _release(self) -> None:
        self._admission.stop()


def _flat(part: Buffer) -> memoryview:
    view = memoryview(part)
    return view.cast("B") if view.nbytes else memoryview(b"")
