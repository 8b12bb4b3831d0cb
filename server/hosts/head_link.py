"""The head's end of the links to the other hosts: one socket for all of them."""

from __future__ import annotations

import errno
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from coordinator.setup.addresses import own_address
from shm_broadcast.codec import UNDECODABLE
from shm_broadcast.remote.end import bind_socket
from shm_broadcast.remote.keys import AllowList, writer_key

from .link_end import ANY_HOST, LINK_NONCE, LinkEnd
from .link_messages import FromHost, HostAdmitted, HostGaveUp, HostHello, HostRefused

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

    from .link_messages import FromHead, Pulse
    from .place import Hosts

_DECODER = msgspec.msgpack.Decoder(FromHost)
_log = logging.getLogger(__name__)


class HostsHeeder(Protocol):
    """Handles what comes over the links; called in their thread."""

    def admit(self, hello: HostHello) -> HostAdmitted | HostRefused:
        """Decide whether a host may take part."""

    def on_message(self, node: int, message: FromHost) -> None:
        """Handle a message of an admitted host."""

    def on_lost(self, node: int, why: str) -> None:
        """Handle the end of an admitted host, or of the link to it."""

    def pulse(self) -> Pulse:
        """What to tell the hosts of this host's board."""


@dataclass(slots=True)
class _Peer:
    identity: bytes
    hello: HostHello
    heard_at: float

    def __str__(self) -> str:
        return f"{self.hello.who}, pid {self.hello.pid}"


class HeadLink(LinkEnd):
    """The links to all other hosts. Call `begin`, and close it.

    Attributes:
        address: the address of this host at which it listens.
        port: the port.
    """

    def __init__(
        self, hosts: Hosts, address: IPv4Address | IPv6Address, heeder: HostsHeeder
    ) -> None:
        """Listen.

        Args:
            hosts: which host this is: the head.
            address: where it listens.
            heeder: handles what comes.

        Raises:
            OSError: the address is none of this host's, or its port is in use.
        """
        secret = hosts.secret or b""
        key = writer_key(secret, LINK_NONCE)
        super().__init__(zmq.ROUTER, key, hosts.silence_seconds, ipv6=address.version == 6)
        self._heeder = heeder
        self._peers: dict[int, _Peer] = {}
        self._comers: list[_Peer] = []
        self._zmq.router_mandatory = 1  # sending over a link that has ended is an error
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
        """Send a host a message soon. Any thread; does not wait. Lost if the host is."""
        self._post((node, message))

    def _take_in(self) -> None:
        while (received := self._receive()) is not None:
            identity, frame, *_ = received
            node = self._node_at(identity.bytes)
            try:
                message = _DECODER.decode(frame.buffer)
            except UNDECODABLE as error:
                if node is not None:
                    self._lose(node, f"has sent what is no message: {error}")
                continue
            if node is not None and isinstance(message, HostGaveUp):
                silence = f"not heard of the head for {message.seconds:.1f} s"
                self._lose(node, f"has ended its workers, having {silence}")
            elif node is not None:
                self._peers[node].heard_at = self._clock.look()
                self._heeder.on_message(node, message)
            elif isinstance(message, HostHello):
                self._greet(_Peer(identity.bytes, message, self._clock.look()))
        self._judge_comers()

    def _node_at(self, identity: bytes) -> int | None:
        """The admitted host at the other end of a connection."""
        return next((node for node, at in self._peers.items() if at.identity == identity), None)

    def _greet(self, comer: _Peer) -> None:
        node = comer.hello.node
        known = self._peers.get(node)
        if known is None:
            self._admit(comer)
        elif known.hello.visitor == comer.hello.visitor:  # what its old link still brings is old
            self._lose(node, "has closed the link, and come again")
            self._admit(comer)
        else:
            self._comers.append(comer)  # in the place of one that may have ended just now

    def _admit(self, comer: _Peer) -> None:
        answer = self._heeder.admit(comer.hello)
        if isinstance(answer, HostAdmitted):
            comer.heard_at = self._clock.look()  # it was not to speak while it was to wait
            self._peers[comer.hello.node] = comer
        self._tell(comer.identity, answer)

    def _judge_comers(self) -> None:
        """Admit those whose place is free by now; refuse those whose place has spoken since."""
        comers, self._comers = self._comers, []
        for comer in comers:
            node = comer.hello.node
            known = self._peers.get(node)
            if known is None:
                if self._tell(comer.identity, self._heeder.pulse()):  # it has not ended meanwhile
                    self._admit(comer)
            elif known.heard_at > comer.heard_at:
                reason = f"node {node} is here already: {known}"
                _log.warning("refused %s: %s", comer, reason)
                self._tell(comer.identity, HostRefused(reason))
            else:
                self._comers.append(comer)

    def _send(self, posted: tuple[int, FromHead]) -> None:
        node, message = posted
        peer = self._peers.get(node)
        if peer is not None and not self._tell(peer.identity, message):
            self._take_in()  # it may have said why
            if self._peers.get(node) is peer:
                self._lose(node, "has ended: the process that started its workers")

    def _send_pulse(self) -> None:
        pulse = self._heeder.pulse()
        for node in tuple(self._peers):
            self._send((node, pulse))

    def _look_for_silence(self, now: float) -> None:
        for node, peer in tuple(self._peers.items()):
            silence = now - peer.heard_at
            if silence > self._silence:
                self._lose(node, f"has not been heard of for {silence:.1f} s")

    def _lose(self, node: int, why: str) -> None:
        self._heeder.on_lost(node, f"{self._peers.pop(node).hello.who} {why}")

    def _tell(self, identity: bytes, message: FromHead) -> bool:
        """Send one message; False if the link has ended."""
        return self._send_to(identity, [msgspec.msgpack.encode(message)])

    def _fail(self, why: str) -> None:
        for node in tuple(self._peers):
            self._lose(node, f"cannot be reached: {why}")

    def _farewell(self) -> None:
        """Nothing: hosts see that the link ends, and were dismissed before if that is in order."""

    def _release(self) -> None:
        self._admission.stop()
        super()._release()


def _bind(link: zmq.Socket[bytes], hosts: Hosts, address: IPv4Address | IPv6Address) -> str:
    """Listen at the head's address; returns the endpoint.

    Raises:
        OSError: it is none of this host's, or the port is in use.
    """
    try:
        return bind_socket(link, address, hosts.master_port)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        named = f"the head's address {hosts.master_addr!r}"
        named += "" if str(address) == hosts.master_addr else f" ({address})"
        own = ""
        with suppress(OSError):
            own = f", which has {own_address(str(address), 1)} on the way there"
        raise OSError(
            error.errno,
            f"{named} is none of this host's{own}: is this node {hosts.node_rank}, the head?",
        ) from error
