"""The wire protocol between a queue's writer and its readers on other hosts, without sockets.

A message is a list of buffers ("parts"). It is one multipart message of zmq, which delivers all
frames or none: a `MessageHeader`, then the frames of the parts (`cut_part`). All other frames
are a header alone.

    reader -> writer   ReaderHello, then Credit as it consumes, Closed at the end
    writer -> reader   Welcome or Refused, then MessageHeader, Probe, Closed at the end

Byte credits: the writer may have up to ``credit_bytes`` (the window) under way to a reader, as
`cost` counts them, and one message that costs more than the rest of the window if three quarters
of the window are free. The reader sends the total that it has consumed whenever a quarter of the
window is unreported. So after a reader has consumed everything, the next message may be sent: the
writer is never stuck while its reader reads.

A reader is ``absent``, ``busy`` after its `ReaderHello`, and at the end ``closed``, ``lost`` or
``faulty``, for good. The writer does not wait for a closed reader. The first connection that sends
a `ReaderHello` with the reader's key is the reader's; frames over other connections change nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from shm_broadcast.codec import UNDECODABLE
from shm_broadcast.errors import MemberStatus, PeerLostError, PeerProtocolError

FRAME_COST: Final = 64
"""Bytes charged for every frame beside its contents: roughly zmq's allocation for it."""

FRAME_BYTES: Final = 2 << 20
"""The limit of a frame: heartbeats pass between frames only, and strangers send no longer ones."""

DEFAULT_CREDIT_BYTES: Final = 8 << 20

Count = Annotated[int, msgspec.Meta(ge=0)]


class RemoteHandle(msgspec.Struct, frozen=True):
    """Names a writer to its readers on other hosts. It holds no secret and may be published."""

    address: str  # of the writer, tcp://host:port
    nonce: bytes  # random; the queue's keys are derived from it and the launcher's secret
    writer: int
    readers: tuple[int, ...]  # the ranks that may read
    credit_bytes: int  # the byte-credit window of each reader
    silence: float  # seconds without a heartbeat after which a peer counts as lost


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    """The base of all headers."""


class ReaderHello(_Frame, frozen=True, tag="hello"):
    """A reader's first frame."""

    pid: Count


class Credit(_Frame, frozen=True, tag="credit"):
    """A reader's totals: consumed bytes as `cost` counts them, and whole messages."""

    consumed: Count
    messages: Count


class Welcome(_Frame, frozen=True, tag="welcome"):
    """The writer has admitted the reader."""

    pid: Count


class Refused(_Frame, frozen=True, tag="refused"):
    """The writer will not serve this connection."""

    reason: str


class MessageHeader(_Frame, frozen=True, tag="message"):
    """A message's parts follow."""


class Probe(_Frame, frozen=True, tag="probe"):
    """An empty frame by which the writer tests whether the connection still exists."""


class Closed(_Frame, frozen=True, tag="closed"):
    """The sender has closed its end."""


FromReader = ReaderHello | Credit | Closed
FromWriter = MessageHeader | Welcome | Refused | Probe | Closed

encode = msgspec.msgpack.Encoder().encode
decode_from_reader = msgspec.msgpack.Decoder(FromReader).decode
decode_from_writer = msgspec.msgpack.Decoder(FromWriter).decode


class FrameError(ValueError):
    """The protocol does not allow this frame at this point."""


def cost(frames: Sequence[bytes | memoryview]) -> int:
    """Return the bytes of credit that a zmq message of these frames takes."""
    return sum(len(frame) for frame in frames) + FRAME_COST * len(frames)


def cut_part(part: memoryview) -> list[memoryview]:
    """Cut a part into full frames and a last one that is shorter, perhaps empty."""
    return [part[at : at + FRAME_BYTES] for at in range(0, len(part) + 1, FRAME_BYTES)]


def join_parts(frames: Sequence[memoryview]) -> list[memoryview]:
    """Join the frames of `cut_part` to parts, writable if the frames are; copy only long parts.

    Raises FrameError if a part has no end.
    """
    parts, pieces = [], list[memoryview]()
    for frame in frames:
        pieces.append(frame)
        if len(frame) < FRAME_BYTES:
            parts.append(frame if len(pieces) == 1 else memoryview(bytearray().join(pieces)))
            pieces = []
    if pieces:
        raise FrameError("a part without an end")
    return parts


class Peer:
    """The state of the process at the other end of a connection.

    Attributes:
        state: as in the module's description.
        pid: 0 while it is absent.
        host: the address of its end.
        operation: its last operation, for messages.
        messages: the number of whole messages that it has sent, or has reported.
        received_at: when its last frame was received.
    """

    def __init__(self, rank: int, host: str = "") -> None:
        self.rank = rank
        self.host = host
        self.state = "absent"
        self.pid = self.messages = 0
        self.operation = ""
        self.received_at: float | None = None
        self._fault = ""

    def mark_faulty(self, fault: str) -> None:
        """Mark it as having violated the protocol."""
        self.state, self._fault = "faulty", fault

    def require(self, operation: str) -> None:
        """Raise PeerLostError if the peer is lost, PeerProtocolError if it is faulty."""
        if self.state == "lost":
            raise PeerLostError(operation, self.status())
        if self.state == "faulty":
            raise PeerProtocolError(operation, self.rank, self._fault)

    def status(self) -> MemberStatus:
        """Return its state, for messages."""
        age = None if self.received_at is None else time.monotonic() - self.received_at
        return MemberStatus(
            *(self.rank, self.pid, self.state, self.operation, self.messages, age, self.host)
        )


class RemoteReaderState(Peer):
    """The writer's state of one reader.

    Attributes:
        identity: the routing id of its connection; empty while it is absent.
        window: the bytes that may be under way to it.
        spent: the bytes of credit of all messages sent to it.
    """

    def __init__(self, rank: int, credit_bytes: int) -> None:
        super().__init__(rank)
        self.identity = b""
        self.window = credit_bytes
        self.spent = 0
        self._consumed = 0

    @property
    def under_way(self) -> int:
        """Return the bytes of credit that the reader has not confirmed yet."""
        return self.spent - self._consumed

    def can_take(self, amount: int) -> bool:
        """Return whether a message of ``amount`` bytes may be sent, or the reader is closed."""
        need = min(amount, self.window * 3 // 4)
        has_credit = self.state == "busy" and self.under_way + need <= self.window
        return has_credit or self.state == "closed"

    def receive(
        self, identity: bytes, frames: Sequence[bytes | memoryview]
    ) -> Welcome | Refused | None:
        """Handle a zmq message over the connection ``identity``, which proved this reader's key.

        Returns the answer for that connection, or None.
        """
        if self.identity and identity != self.identity:
            return Refused(f"rank {self.rank} used another connection before ({self.state})")
        if self.identity and self.state != "busy":
            return None
        try:
            if len(frames) != 1:
                raise FrameError(f"{len(frames)} frames where 1 was due")
            return self._handle(identity, decode_from_reader(frames[0]))
        except (*UNDECODABLE, FrameError) as error:
            self.identity = identity
            self.mark_faulty(str(error))
            return Refused(str(error))

    def remove(self) -> None:
        """Treat a lost or faulty reader as closed, so that the writer stops waiting for it.

        Raises ValueError if it is neither lost nor faulty.
        """
        if self.state not in ("lost", "faulty"):
            raise ValueError(f"{self.status()}: it is not lost")
        self.state = "closed"

    def _handle(self, identity: bytes, frame: ReaderHello | Credit | Closed) -> Welcome | None:
        self.received_at = time.monotonic()
        if isinstance(frame, ReaderHello):
            if self.identity:
                raise FrameError("a second hello")
            self.identity, self.state, self.pid = identity, "busy", frame.pid
            self.operation = "dequeue"
            return Welcome(os.getpid())
        if not self.identity:
            raise FrameError(f"{type(frame).__name__} before hello")
        if isinstance(frame, Closed):
            self.state = "closed"
        elif self._consumed <= frame.consumed <= self.spent:
            self._consumed, self.messages = frame.consumed, frame.messages
        else:
            raise FrameError(f"credit for {frame.consumed} bytes of {self.spent} sent")
        return None
