"""The head's end of the links to the other hosts: one socket for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from coordinator.setup.addresses import own_address
from shm_broadcast.codec import UNDECODABLE
from shm_broadcast.remote.end import bind_socket, one_address
from shm_broadcast.remote.keys import AllowList, writer_key

from .link_end import LINK_NONCE, LinkEnd
from .link_messages import FromHost, HostAdmitted, HostHello, HostRefused

if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv6Address

    from .link_messages import FromHead, Pulse
    from .place import Hosts

_DECODER = msgspec.msgpack.Decoder(FromHost)


class HostsHeeder(Protocol):
    """Handles what comes over the links; called in their thread."""

    def admit(self, node: int, hello: HostHello) -> HostAdmitted | HostRefused:
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
        return f"host {self.hello.name} ({self.hello.address})"


class HeadLink(LinkEnd):
    """The links to all other hosts. Call `begin`, and close it.

    Attributes:
        address: the address of this host at which it listens.
        port: the port.
    """

    def __init__(self, hosts: Hosts, heeder: HostsHeeder) -> None:
        """Listen.

        Raises:
            OSError: the head's address cannot be resolved, or its port is in use.
            ValueError: the address means all interfaces.
        """
        secret = hosts.secret or b""
        address = _on_this_host(hosts)
        key = writer_key(secret, LINK_NONCE)
        super().__init__(zmq.ROUTER, key, hosts.silence_seconds, ipv6=address.version == 6)
        self._heeder = heeder
        self._peers: dict[int, _Peer] = {}
        self._comers: dict[int, _Peer] = {}
        self._zmq.router_mandatory = 1  # sending over a link that has ended is an error
        others = range(1, hosts.nnodes)
        self._admission = AllowList(self._context, secret, LINK_NONCE, others)
        try:
            self._admission.start()
            bound = bind_socket(self._zmq, address, hosts.master_port)
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
            identity, *frames = received
            node = int(frames[0].get("User-Id"))
            try:
                message = _DECODER.decode(frames[0].buffer)
            except UNDECODABLE as error:
                self._lose(node, identity.bytes, f"has sent what is no message: {error}")
                continue
            self._take(node, identity.bytes, message)
        self._judge_comers()

    def _take(self, node: int, identity: bytes, message: FromHost) -> None:
        peer = self._peers.get(node)
        if isinstance(message, HostHello):
            self._greet(node, identity, message)
        elif peer is not None and peer.identity == identity:
            peer.heard_at = self._clock.look()
            self._heeder.on_message(node, message)

    def _greet(self, node: int, identity: bytes, hello: HostHello) -> None:
        comer = _Peer(identity, hello, self._clock.look())
        if node in self._peers:
            self._comers[node] = comer  # in the place of one that may have ended just now
        else:
            self._admit(node, comer)

    def _admit(self, node: int, comer: _Peer) -> None:
        answer = self._heeder.admit(node, comer.hello)
        if isinstance(answer, HostAdmitted):
            self._peers[node] = comer
        self._tell(comer.identity, answer)

    def _judge_comers(self) -> None:
        """Admit those whose place is free by now; refuse those whose place has spoken since."""
        for node, comer in tuple(self._comers.items()):
            known = self._peers.get(node)
            if known is None:
                del self._comers[node]
                self._admit(node, comer)
            elif known.heard_at > comer.heard_at:
                del self._comers[node]
                reason = f"node {node} is here already: {known}, pid {known.hello.pid}"
                self._tell(comer.identity, HostRefused(reason))

    def _send(self, posted: tuple[int, FromHead]) -> None:
        node, message = posted
        peer = self._peers.get(node)
        if peer is not None and not self._tell(peer.identity, message):
            self._lose(node, peer.identity, "has ended: the process that started its workers")

    def _send_pulse(self) -> None:
        pulse = self._heeder.pulse()
        for node in tuple(self._peers):
            self._send((node, pulse))

    def _look_for_silence(self, now: float) -> None:
        for node, peer in tuple(self._peers.items()):
            silence = now - peer.heard_at
            if silence > self._silence:
                self._lose(node, peer.identity, f"has not been heard of for {silence:.1f} s")

    def _lose(self, node: int, identity: bytes, why: str) -> None:
        peer = self._peers.get(node)
        if peer is not None and peer.identity == identity:
            del self._peers[node]
            self._heeder.on_lost(node, f"{peer} {why}")

    def _tell(self, identity: bytes, message: FromHead) -> bool:
        """Send one message; False if the link has ended."""
        return self._send_to(identity, [msgspec.msgpack.encode(message)])

    def _fail(self, why: str) -> None:
        for node, peer in tuple(self._peers.items()):
            self._lose(node, peer.identity, f"cannot be reached: {why}")

    def _farewell(self) -> None:
        """Nothing: hosts see that the link ends, and were dismissed before if that is in order."""

    def _release(self) -> None:
        self._admission.stop()
        super()._release()


def _on_this_host(hosts: Hosts) -> IPv4Address | IPv6Address:
    """The head's address; behind address translation this host's address on the way to it."""
    address = one_address(hosts.master_addr)
    if address.is_loopback:
        return address
    return one_address(own_address(str(address), hosts.master_port or 1))
