"""A host's end of the link to the head."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from coordinator.setup.addresses import who_listens
from shm_broadcast.codec import UNDECODABLE
from shm_broadcast.remote.events import Connection
from shm_broadcast.remote.keys import reader_key, writer_key

from .link_end import ANY_HOST, LINK_NONCE, LinkEnd, endpoint
from .link_messages import FromHead, HostGaveUp

if TYPE_CHECKING:
    from .link_messages import FromHost, HostHello, Pulse
    from .place import Hosts

_DECODER = msgspec.msgpack.Decoder(FromHead)
_TRY_SECONDS = 0.2
"""How long to try to connect, to learn why it fails."""


class HeadHeeder(Protocol):
    """Handles what comes over the link; called in its thread."""

    def hear(self, message: FromHead) -> None:
        """Handle a message of the head."""

    def lose(self, why: str) -> None:
        """Handle the end of the link; called once."""

    def pulse(self) -> Pulse:
        """What to tell the head of this host's board."""


class HostLink(LinkEnd):
    """The link to the head. Call `begin`, and close it."""

    def __init__(
        self, hosts: Hosts, address: str, port: int, hello: HostHello, heeder: HeadHeeder
    ) -> None:
        """Begin to connect, and say hello when that has succeeded.

        Args:
            hosts: which host this is.
            address: the head's IP address.
            port: the head's port.
            hello: the first message.
            heeder: handles what comes.
        """
        secret = hosts.secret or b""
        key = reader_key(secret, LINK_NONCE, ANY_HOST)
        super().__init__(zmq.DEALER, key, hosts.silence_seconds, ipv6=":" in address)
        self._head = address, port
        self._leads_here = hello.address == address or ipaddress.ip_address(address).is_loopback
        self._heeder = heeder
        self._heard_at: float | None = None
        self._lost = False
        self._zmq.curve_serverkey = writer_key(secret, LINK_NONCE).public
        where, denied = f"tcp://{endpoint(address, port)}", "it does not admit this host's key"
        self._connection = Connection(self._context, self._zmq, where, denied)
        self._poller.register(self._connection.events, zmq.POLLIN)
        self._connection.begin()
        self.post(hello)

    def post(self, message: FromHost) -> None:
        """Send a message soon. Any thread; does not wait. Lost if the link is."""
        self._post(message)

    def trouble(self) -> str:
        """Why the head has not answered, as far as is known; `_TRY_SECONDS` to find out."""
        known = self._connection.fault or self._connection.trouble()
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
        self._connection.look()
        while (received := self._receive()) is not None:
            self._heard_at = self._clock.look()
            try:
                message = _DECODER.decode(received[0].buffer)
            except UNDECODABLE as error:
                self._fail(f"the head has sent what is no message: {error}")
                return
            self._heeder.hear(message)
        if self._connection.fault:
            self._fail(self._connection.fault)
        elif self._connection.lost:
            self._fail("the head has ended, or closed the link")

    def _send(self, posted: FromHost) -> None:
        with suppress(zmq.Again):  # there is no link any more: its events say why
            self._zmq.send(msgspec.msgpack.encode(posted), zmq.NOBLOCK)

    def _send_pulse(self) -> None:
        if self._heard_at is not None:
            self._send(self._heeder.pulse())

    def _look_for_silence(self, now: float) -> None:
        if self._heard_at is not None and now - self._heard_at > self._silence and not self._lost:
            seconds = now - self._heard_at
            self._send(HostGaveUp(seconds))
            self._fail(f"the head has not been heard of for {seconds:.1f} s")

    def _fail(self, why: str) -> None:
        if not self._lost:
            self._lost = True
            self._heeder.lose(why)

    def _farewell(self) -> None:
        if not self._connection.made:
            self._zmq.linger = 0

    def _release(self) -> None:
        self._connection.close()
        super()._release()
