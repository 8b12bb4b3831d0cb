"""The writer's view of one reader on another host. Uses no socket, so tests need none.

A reader is ``absent``, ``busy`` from its `ReaderHello` on, and at the end ``closed``, ``lost`` or
``faulty``, for good. The writer no longer waits for one that has closed. The first connection that
says hello with the reader's key is the reader's; frames over any other connection change nothing.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from shm_broadcast.codec import UNDECODABLE
from shm_broadcast.errors import MemberStatus, PeerLostError, PeerProtocolError
from shm_broadcast.remote.frames import (
    Credit,
    CreditWindow,
    FrameError,
    ReaderHello,
    Refused,
    Welcome,
    decode_from_reader,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class RemoteLink:
    """One reader as its writer sees it.

    Attributes:
        rank: the reader's rank.
        identity: the routing id that zmq gave its connection; empty while it is absent.
        host: the address that its connection comes from; empty while it is absent.
        window: its byte credits.
    """

    def __init__(self, rank: int, credit_bytes: int) -> None:
        self.rank = rank
        self.identity = b""
        self.host = ""
        self.window = CreditWindow(credit_bytes)
        self._state = "absent"
        self._pid = 0
        self._heard_at: float | None = None
        self._fault = ""

    @property
    def joined(self) -> bool:
        """Whether it is connected, as far as is known."""
        return self._state == "busy"

    @property
    def left(self) -> bool:
        """Whether it has closed its end, or was removed."""
        return self._state == "closed"

    def can_take(self, amount: int) -> bool:
        """Whether the writer may send ``amount`` bytes: the reader has the credit, or has left."""
        return self.left or (self.joined and self.window.available >= amount)

    def take(
        self, identity: bytes, frames: Sequence[bytes | memoryview]
    ) -> Welcome | Refused | None:
        """Handle a zmq message that came over a connection which proved this reader's key.

        Args:
            identity: the connection's routing id.
            frames: the message's frames.

        Returns:
            What to answer on that connection; None: nothing.
        """
        if self.identity and identity != self.identity:
            return Refused(f"rank {self.rank} came on another connection before ({self._state})")
        if self.identity and not self.joined:
            return None
        try:
            if len(frames) != 1:
                raise FrameError(f"{len(frames)} frames where 1 was due")
            return self._handle(identity, decode_from_reader(frames[0]))
        except (*UNDECODABLE, FrameError) as error:
            self.identity, self._state, self._fault = identity, "faulty", str(error)
            return Refused(self._fault)

    def lose(self) -> None:
        """Note that its connection has ended. A reader that closed its end before is not lost."""
        if self.joined:
            self._state = "lost"

    def remove(self) -> None:
        """Treat a lost or faulty reader as one that has closed: the writer stops waiting for it.

        Raises:
            ValueError: it is neither lost nor faulty.
        """
        if self._state not in ("lost", "faulty"):
            raise ValueError(f"{self.status()}: it is not lost")
        self._state = "closed"

    def require(self, operation: str) -> None:
        """Check that the reader is neither lost nor faulty.

        Raises:
            PeerLostError: its connection has ended.
            PeerProtocolError: it sent what the protocol does not allow.
        """
        if self._state == "lost":
            raise PeerLostError(operation, self.status())
        if self._state == "faulty":
            raise PeerProtocolError(operation, self.rank, self._fault)

    def status(self) -> MemberStatus:
        """What is known of it; ``sequence`` is the number of messages it has reported as taken."""
        age = None if self._heard_at is None else time.monotonic() - self._heard_at
        operation = "dequeue" if self.identity else ""
        messages = self.window.messages
        return MemberStatus(self.rank, self._pid, self._state, operation, messages, age, self.host)

    def _handle(self, identity: bytes, frame: ReaderHello | Credit | object) -> Welcome | None:
        self._heard_at = time.monotonic()
        if isinstance(frame, ReaderHello):
            if self.joined:
                raise FrameError("a second hello")
            self.identity, self._state, self._pid = identity, "busy", frame.pid
            return Welcome(os.getpid())
        if not self.joined:
            raise FrameError(f"{type(frame).__name__} before hello")
        if isinstance(frame, Credit):
            self.window.restore(frame)
        else:
            self._state = "closed"
        return None
