"""The links between a pool's head and its other hosts: messages, one socket, and both ends.

host -> head    HostHello; then HeartbeatMessage, OfWorker, WorkerEnded, WorkerStack, HostState;
                HostGaveUp at the end, if the head was silent
head -> host    HostAdmitted or HostRefused; then HeartbeatMessage, BeginGeneration, ToWorker,
                SignalWorker, MarkCall, QueryState; HostShutdown at the end

Both ends send heartbeats in short intervals and announce a close, so a silence means that a host is
lost or unreachable. Links are encrypted; each end proves possession of the launcher's secret before
any other exchange (`shm_broadcast.net.keys`).
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import platform
import sys
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from ipaddress import IPv4Address, IPv6Address
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import msgspec
import zmq

from coordinator.launcher import own_address, who_listens
from shm_broadcast import __version__
from shm_broadcast.codec import UNDECODABLE
from shm_broadcast.deadline import PauseAwareClock
from shm_broadcast.eventcount import WakeFd
from shm_broadcast.net.endpoint import Connection, RemoteEnd, bind_socket
from shm_broadcast.net.keys import (
    HANDSHAKE_NONCE_BYTES,
    AllowList,
    CurveKey,
    reader_key,
    writer_key,
)

from ..config import PoolConfig
from ..control.protocol import (
    FromWorker,
    Resume,
    Start,
)
from ..inspection.snapshot import BoardSnapshot

if TYPE_CHECKING:
    from .place import Hosts


_PACKAGES = ("torch", "msgspec", "pyzmq")


def facts_here(given: Mapping[str, str]) -> dict[str, str]:
    """Return this host's facts, by name: versions (torch's without build), and ``given``."""
    versions = {name: version(name).partition("+")[0] for name in _PACKAGES}
    python = ".".join(map(str, sys.version_info[:2]))
    return {
        "group-coordinator": __version__,
        "python": python,
        "byte order": sys.byteorder,
        "system": platform.system(),
        **versions,
        **given,
    }


def differing_fact(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Return text on the first fact that both sides state differently, or ``""``."""
    for name, value in here.items():
        if name in there and there[name] != value:
            return f"{name} is {there[name]} there, and {value} on the head"
    return ""


class HostHello(msgspec.Struct, frozen=True, tag=True):
    """A host's first message.

    Attributes:
        address: its address on the route to the head.
        facts: values that must be equal on all hosts, by name.
        instance_id: random; stable across reconnects of one process.
    """

    name: str
    address: str
    pid: int
    node: int
    facts: dict[str, str]
    instance_id: str = ""

    @property
    def who(self) -> str:
        """Return the host's name and address, for messages."""
        return f"host {self.name} ({self.address})"


class HostAdmitted(msgspec.Struct, frozen=True, tag=True):
    """The host takes part.

    Attributes:
        n_workers, ranks: the number of the pool's workers, and the ranks of this host.
        stays: whether the host reconnects when the link has broken.
    """

    n_workers: int
    ranks: tuple[int, ...]
    config: PoolConfig
    stays: bool


class HostRefused(msgspec.Struct, frozen=True, tag=True):
    """The host takes no part."""

    reason: str


class HostShutdown(msgspec.Struct, frozen=True, tag=True):
    """The pool was shut down."""


class BeginGeneration(msgspec.Struct, frozen=True, tag=True):
    """Start a generation within ``seconds``: make its board, and start the missing workers."""

    generation: int
    missing: tuple[int, ...]
    in_flight: int
    seconds: float | None


class ToWorker(msgspec.Struct, frozen=True, tag=True):
    """Forward a message to a worker. The host adds its own memory to `Start.handles`."""

    rank: int
    message: Start | Resume


class SignalWorker(msgspec.Struct, frozen=True, tag=True):
    """Send a worker a signal; `STACK_SIGNAL` requests a `WorkerStack`."""

    rank: int
    number: int


class MarkCall(msgspec.Struct, frozen=True, tag=True):
    """Set the cancellation flag of a call."""

    generation: int
    number: int


class HeartbeatMessage(msgspec.Struct, frozen=True, tag=True):
    """The state of the sender's board; sent at its abort, and in short intervals.

    ``heartbeat`` is an encoded `coordinator.remote_boards.HostHeartbeat`; before the first
    generation it is empty, and ``generation`` 0.
    """

    generation: int
    heartbeat: bytes


class OfWorker(msgspec.Struct, frozen=True, tag=True):
    """A message of a worker that was started in generation ``since``.

    Here and below, messages of a replaced worker do not apply to its replacement.
    """

    rank: int
    since: int
    message: FromWorker


class WorkerEnded(msgspec.Struct, frozen=True, tag=True):
    """A worker's process has ended, or could not be started.

    ``how`` is such as ``"killed by SIGKILL"``; ``stack`` its stacks, if it could write them.
    """

    rank: int
    since: int
    how: str
    stack: str


class WorkerStack(msgspec.Struct, frozen=True, tag=True):
    """The requested stack."""

    rank: int
    since: int
    text: str


class QueryState(msgspec.Struct, frozen=True, tag=True):
    """Request a host's `HostState` with the same number."""

    number: int


class HostState(msgspec.Struct, frozen=True, tag=True):
    """The boards of a host's processes, in reply to the `QueryState` of the same number.

    ``key`` is that of the pool's board on that host. No boards: they could not be read.
    """

    number: int
    key: str
    boards: tuple[BoardSnapshot, ...]


class HostGaveUp(msgspec.Struct, frozen=True, tag=True):
    """The host ends its workers after ``seconds`` without a message; a resumed head reads it."""

    seconds: float


FromHost: TypeAlias = (
    HostHello | HeartbeatMessage | OfWorker | WorkerEnded | WorkerStack | HostState | HostGaveUp
)
FromHead: TypeAlias = (
    HostAdmitted
    | HostRefused
    | HostShutdown
    | BeginGeneration
    | ToWorker
    | SignalWorker
    | MarkCall
    | QueryState
    | HeartbeatMessage
)

LINK_NONCE: Final = b"the link between the hosts of a pool".ljust(HANDSHAKE_NONCE_BYTES, b".")[
    :HANDSHAKE_NONCE_BYTES
]
"""Fixed, since a link's address comes from the launcher, without a nonce."""

ANY_HOST: Final = 1
"""The rank of the key of all hosts but the head; a host's hello has its node number."""

HEARTBEAT_SECONDS: Final = 0.25
"""The interval of heartbeats."""

_FRAME_BYTES: Final = 1 << 28
"""The longest message, which must hold a worker's arguments."""

_LOOK_SECONDS: Final = 0.1
_log = logging.getLogger(__name__)


def endpoint(address: str, port: int) -> str:
    """Return a link's endpoint in the form of ZeroMQ."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class LinkEnd(RemoteEnd):
    """One end; a subclass handles the messages. Call `begin`, and close it."""

    def __init__(self, kind: int, key: CurveKey, silence: float, *, ipv6: bool) -> None:
        # Longer than ours: libzmq reports a silent link as closed, this class as silent.
        super().__init__(kind, key, silence=4 * silence, frame_bytes=_FRAME_BYTES, ipv6=ipv6)
        self._silence = silence
        self._clock = PauseAwareClock(HEARTBEAT_SECONDS)
        self._outbox: deque[Any] = deque()
        self._wake = WakeFd()
        self._poller.register(self._wake, zmq.POLLIN)
        self._heartbeat_at = 0.0
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread, or raise RuntimeError."""
        self._thread = threading.Thread(target=self._serve, name="pool-hosts", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None  # not for `close` to join
            raise

    def heartbeat_now(self) -> None:
        """Send a heartbeat at once: the board has changed. Any thread; does not wait."""
        self._heartbeat_at = 0.0
        self._wake.notify()

    def close(self) -> None:
        """Send all posted messages, announce the close, and close. Idempotent."""
        self._closing = True
        if self._thread is None:
            self._tear_down()
        elif self._thread is not threading.current_thread():
            self._wake.notify()
            self._thread.join()

    def _post(self, message: Any) -> None:
        """Queue a message. Any thread; does not wait."""
        self._outbox.append(message)
        self._wake.notify()

    def _serve(self) -> None:
        try:
            while not self._closing:
                self._step()
            self._send_posted()
        except Exception as error:  # noqa: BLE001 - otherwise it would count as silence
            _log.exception("the link between the hosts has failed")
            self._fail(f"the link has failed: {type(error).__name__}: {error}")
        finally:
            self._tear_down()

    def _step(self) -> None:
        self._take_in()
        self._send_posted()
        if time.monotonic() >= self._heartbeat_at:
            self._heartbeat_at = time.monotonic() + HEARTBEAT_SECONDS
            self._send_heartbeat()
        self._look_for_silence(self._clock.read())
        self._poller.poll(int(_LOOK_SECONDS * 1000))
        self._wake.clear()

    def _send_posted(self) -> None:
        while self._outbox:
            self._send(self._outbox.popleft())

    @abstractmethod
    def _take_in(self) -> None:
        """Handle the frames that have arrived."""

    @abstractmethod
    def _send(self, posted: Any) -> None:
        """Send a posted message."""

    @abstractmethod
    def _send_heartbeat(self) -> None:
        """Send the state of the board here."""

    @abstractmethod
    def _look_for_silence(self, now: float) -> None:
        """Handle peers that were silent for too long; ``now`` is of the `PauseAwareClock`."""

    @abstractmethod
    def _fail(self, why: str) -> None:
        """Handle the end of the link by a local fault."""

    def _release(self) -> None:
        self._wake.close()


_FROM_HOST = msgspec.msgpack.Decoder(FromHost)


class HeadLinkHandler(Protocol):
    """Handles the links' events; called in their thread."""

    def admit(self, hello: HostHello) -> HostAdmitted | HostRefused:
        """Decide whether a host may take part."""

    def on_message(self, node: int, message: FromHost) -> None:
        """Handle a message of an admitted host."""

    def on_lost(self, node: int, why: str) -> None:
        """Handle the end of an admitted host, or of the link to it."""

    def heartbeat_message(self) -> HeartbeatMessage:
        """Return the state of this host's board."""


@dataclass(slots=True)
class _Peer:
    identity: bytes
    hello: HostHello
    received_at: float

    def __str__(self) -> str:
        return f"{self.hello.who}, pid {self.hello.pid}"


class HeadLink(LinkEnd):
    """The links to all other hosts, at ``address`` and ``port``. Call `begin`, and close it."""

    def __init__(
        self, hosts: Hosts, address: IPv4Address | IPv6Address, handler: HeadLinkHandler
    ) -> None:
        """Listen at ``address``, or raise OSError; ``handler`` handles the events."""
        secret = hosts.secret or b""
        key = writer_key(secret, LINK_NONCE)
        super().__init__(zmq.ROUTER, key, hosts.silence_seconds, ipv6=address.version == 6)
        self._handler = handler
        self._peers: dict[int, _Peer] = {}
        self._pending: list[_Peer] = []
        self._zmq.router_mandatory = 1  # a send over an ended link raises an error
        self._admission = AllowList(self._context, secret, LINK_NONCE, [ANY_HOST])
        try:
            self._admission.start()
            bound = _bind(self._zmq, hosts, address)
        except BaseException:
            self._tear_down()
            raise
        self.address = str(address)
        self.port = int(bound.rpartition(":")[2])

    def post(self, node: int, message: FromHead) -> None:
        """Queue a message to a host. Any thread; does not wait. Lost if the host is."""
        self._post((node, message))

    def _take_in(self) -> None:
        while (received := self._receive()) is not None:
            identity, frame, *_ = received
            node = self._node_at(identity.bytes)
            try:
                message = _FROM_HOST.decode(frame.buffer)
            except UNDECODABLE as error:
                if node is not None:
                    self._lose(node, f"has sent an undecodable message: {error}")
                continue
            if node is not None and isinstance(message, HostGaveUp):
                silence = f"nothing from the head for {message.seconds:.1f} s"
                self._lose(node, f"has ended its workers, having received {silence}")
            elif node is not None:
                self._peers[node].received_at = self._clock.read()
                self._handler.on_message(node, message)
            elif isinstance(message, HostHello):
                self._handle_hello(_Peer(identity.bytes, message, self._clock.read()))
        self._admit_pending()

    def _node_at(self, identity: bytes) -> int | None:
        """Return the admitted host at the other end of a connection."""
        return next((node for node, at in self._peers.items() if at.identity == identity), None)

    def _handle_hello(self, pending: _Peer) -> None:
        node = pending.hello.node
        known = self._peers.get(node)
        if known is None:
            self._admit(pending)
        elif known.hello.instance_id == pending.hello.instance_id:
            # Its old link may still deliver messages, which must not count.
            self._lose(node, "has closed the link, and connected again")
            self._admit(pending)
        else:
            self._pending.append(pending)  # the holder of the number may have ended

    def _admit(self, pending: _Peer) -> None:
        answer = self._handler.admit(pending.hello)
        if isinstance(answer, HostAdmitted):
            pending.received_at = self._clock.read()  # a pending host sends nothing
            self._peers[pending.hello.node] = pending
        self._tell(pending.identity, answer)

    def _admit_pending(self) -> None:
        """Admit pending hosts whose number is free; refuse those whose holder is alive."""
        waiting, self._pending = self._pending, []
        for pending in waiting:
            node = pending.hello.node
            known = self._peers.get(node)
            if known is None:
                # The heartbeat fails if the pending host has ended.
                if self._tell(pending.identity, self._handler.heartbeat_message()):
                    self._admit(pending)
            elif known.received_at > pending.received_at:
                reason = f"node {node} is connected already: {known}"
                _log.warning("refused %s: %s", pending, reason)
                self._tell(pending.identity, HostRefused(reason))
            else:
                self._pending.append(pending)

    def _send(self, posted: tuple[int, FromHead]) -> None:
        node, message = posted
        peer = self._peers.get(node)
        if peer is not None and not self._tell(peer.identity, message):
            self._take_in()  # its last message may have the reason
            if self._peers.get(node) is peer:
                self._lose(node, "has ended: the process that started its workers")

    def _send_heartbeat(self) -> None:
        heartbeat_message = self._handler.heartbeat_message()
        for node in tuple(self._peers):
            self._send((node, heartbeat_message))

    def _look_for_silence(self, now: float) -> None:
        for node, peer in tuple(self._peers.items()):
            silence = now - peer.received_at
            if silence > self._silence:
                self._lose(node, f"has sent nothing for {silence:.1f} s")

    def _lose(self, node: int, why: str) -> None:
        self._handler.on_lost(node, f"{self._peers.pop(node).hello.who} {why}")

    def _tell(self, identity: bytes, message: FromHead) -> bool:
        """Send one message; False if the link has ended."""
        return self._send_to(identity, [msgspec.msgpack.encode(message)])

    def _fail(self, why: str) -> None:
        for node in tuple(self._peers):
            self._lose(node, f"cannot be reached: {why}")

    def _send_closed(self) -> None:
        """Do nothing: hosts detect the end of the link."""

    def _release(self) -> None:
        self._admission.stop()
        super()._release()


def _bind(link: zmq.Socket[bytes], hosts: Hosts, address: IPv4Address | IPv6Address) -> str:
    """Listen at the head's address, or raise OSError; return the endpoint."""
    try:
        return bind_socket(link, address, hosts.master_port)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        text = f"the head's address {hosts.master_addr!r}"
        text += "" if str(address) == hosts.master_addr else f" ({address})"
        own = ""
        with suppress(OSError):
            own = f", which has {own_address(str(address), 1)} on the way there"
        raise OSError(
            error.errno,
            f"{text} is none of this host's{own}: is this node {hosts.node_rank}, the head?",
        ) from error


_FROM_HEAD = msgspec.msgpack.Decoder(FromHead)
_TRY_SECONDS = 0.2
"""Time of a test connection, whose error is the reason."""


class HostLinkHandler(Protocol):
    """Handles the link's events; called in its thread."""

    def hear(self, message: FromHead) -> None:
        """Handle a message of the head."""

    def lose(self, why: str) -> None:
        """Handle the end of the link; called once."""

    def heartbeat_message(self) -> HeartbeatMessage:
        """Return the state of this host's board."""


class HostLink(LinkEnd):
    """The link to the head. Call `begin`, and close it."""

    def __init__(
        self, hosts: Hosts, address: str, port: int, hello: HostHello, handler: HostLinkHandler
    ) -> None:
        """Start to connect to the head at ``address``; ``hello`` is the first message."""
        secret = hosts.secret or b""
        key = reader_key(secret, LINK_NONCE, ANY_HOST)
        super().__init__(zmq.DEALER, key, hosts.silence_seconds, ipv6=":" in address)
        self._head = address, port
        self._leads_here = hello.address == address or ipaddress.ip_address(address).is_loopback
        self._handler = handler
        self._received_at: float | None = None
        self._lost = False
        self._zmq.curve_serverkey = writer_key(secret, LINK_NONCE).public
        url, denied = f"tcp://{endpoint(address, port)}", "it does not admit this host's key"
        self._connection = Connection(self._context, self._zmq, url, denied)
        self._poller.register(self._connection.events, zmq.POLLIN)
        self._connection.begin()
        self.post(hello)

    def post(self, message: FromHost) -> None:
        """Queue a message. Any thread; does not wait. Lost if the link is."""
        self._post(message)

    def problem(self) -> str:
        """Return the reason why the head has not answered; takes `_TRY_SECONDS`."""
        known = self._connection.fault or self._connection.problem()
        if self._connection.reached:
            return known
        try:
            who_listens(*self._head, _TRY_SECONDS)
        except OSError as error:
            known += f": {error.strerror or error}"
        if self._leads_here:
            known += "; that is an address of this host itself: is it the head's?"
        return known

    def _take_in(self) -> None:
        self._connection.poll()
        while (received := self._receive()) is not None:
            self._received_at = self._clock.read()
            try:
                message = _FROM_HEAD.decode(received[0].buffer)
            except UNDECODABLE as error:
                self._fail(f"the head has sent an undecodable message: {error}")
                return
            self._handler.hear(message)
        if self._connection.fault:
            self._fail(self._connection.fault)
        elif self._connection.lost:
            self._fail("the head has ended, or closed the link")

    def _send(self, posted: FromHost) -> None:
        with suppress(zmq.Again):  # the link has ended: its events have the reason
            self._zmq.send(msgspec.msgpack.encode(posted), zmq.NOBLOCK)

    def _send_heartbeat(self) -> None:
        if self._received_at is not None:
            self._send(self._handler.heartbeat_message())

    def _look_for_silence(self, now: float) -> None:
        if self._received_at is None or self._lost:
            return
        seconds = now - self._received_at
        if seconds > self._silence:
            self._send(HostGaveUp(seconds))
            self._fail(f"the head has sent nothing for {seconds:.1f} s")

    def _fail(self, why: str) -> None:
        if not self._lost:
            self._lost = True
            self._handler.lose(why)

    def _send_closed(self) -> None:
        if not self._connection.made:
            self._zmq.linger = 0

    def _release(self) -> None:
        self._connection.close()
        super()._release()
