"""What the writer knows of one reader on another host; no socket, so that it is tested by hand.

A reader's life: absent, then busy from its `Hello` on, then closed, lost or faulty, for good. One
that closed in good order gates nobody. The first connection that says hello with the reader's key
is the reader; frames that come over any other connection change nothing.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import msgspec

from shm_broadcast.errors import MemberStatus, PeerLostError, PeerProtocolError
from shm_broadcast.remote_wire import (
    Credit,
    CreditWindow,
    FrameError,
    Hello,
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
        identity: zmq's name of its connection; empty while it is absent.
        window: its byte credits.
    """

    def __init__(self, rank: int, credit_bytes: int) -> None:
        self.rank = rank
        self.identity = b""
        self.window = CreditWindow(credit_bytes)
        self._state = "absent"
        self._pid = 0
        self._heard_at: float | None = None
        self._fault = ""

    @property
    def joined(self) -> bool:
        """Whether it is there, as far as is known."""
        return self._state == "busy"

    @property
    def left(self) -> bool:
        """Whether it was there and closed its end in good order."""
        return self._state == "closed"

    def can_take(self, amount: int) -> bool:
        """Whether nothing keeps the writer from sending ``amount`` bytes as far as it goes."""
        return self.left or (self.joined and self.window.available >= amount)

    def take(
        self, identity: bytes, frames: Sequence[bytes | memoryview]
    ) -> Welcome | Refused | None:
        """Handle what came with this reader's key proved; what to answer on that connection."""
        if self.identity and identity != self.identity:
            return Refused(f"rank {self.rank} came on another connection before ({self._state})")
        if self.identity and not self.joined:
            return None
        try:
            if len(frames) != 1:
                raise FrameError(f"{len(frames)} frames where 1 was due")
            return self._handle(identity, decode_from_reader(frames[0]))
        except (msgspec.MsgspecError, FrameError) as error:
            self.identity, self._state, self._fault = identity, "faulty", str(error)
            return Refused(self._fault)

    def lose(self) -> None:
        """Note that its connection is gone; one that left in good order before is not lost."""
        if self.joined:
            self._state = "lost"

    def require(self, operation: str) -> None:
        """Do nothing if the reader may still be served.

        Raises:
            PeerLostError: its connection is gone.
            PeerProtocolError: it sent what it may not.
        """
        if self._state == "lost":
            raise PeerLostError(operation, self.status())
        if self._state == "faulty":
            raise PeerProtocolError(operation, self.rank, self._fault)

    def status(self) -> MemberStatus:
        """What is known of it; ``sequence`` counts the messages it took, at least."""
        age = None if self._heard_at is None else time.monotonic() - self._heard_at
        operation = "recv" if self.identity else ""
        return MemberStatus(self.rank, self._pid, self._state, operation, self.window.messages, age)

    def _handle(self, identity: bytes, frame: Hello | Credit | object) -> Welcome | None:
        self._heard_at = time.monotonic()
        if isinstance(frame, Hello):
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
