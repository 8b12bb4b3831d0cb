"""Follows the state of one outgoing zmq connection by the events of zmq's socket monitor.

zmq connects again by itself, but a connection that was made and then lost counts as lost for good
here: the messages that were under way are gone. Nothing here waits.
"""

from __future__ import annotations

import errno
from typing import Final

import zmq
from zmq.utils.monitor import recv_monitor_message

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
        events: a socket that becomes readable when `look` has something to take in.
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

    def look(self) -> None:
        """Take in the events since the last call. Never waits."""
        while self.events.poll(0):
            told = recv_monitor_message(self.events)
            self._take(told["event"], told["value"])

    def trouble(self) -> str:
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
