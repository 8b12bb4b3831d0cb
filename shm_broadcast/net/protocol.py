"""The wire protocol between a queue's writer and its readers on other hosts, without sockets.

A message is a list of buffers ("parts"). It is sent as one or more fragments; every fragment is one
zmq message: a header, then chunks of the parts in order::

    Fragment(sequence, sizes)  chunk  chunk ...     sizes: of all parts, in the first fragment only

A part is its chunks concatenated; no chunk spans two parts, an empty part has none. ``sequence``
counts fragments from 0 on each connection. All other frames are a header alone.

    reader -> writer   ReaderHello, then Credit as it consumes, Closed at the end
    writer -> reader   Welcome or Refused, then Fragment, Cancel, Probe, Closed at the end

Byte credits: the writer may have up to ``credit_bytes`` (the window) under way to a reader, as
`cost` counts them. The reader sends the total that it has consumed whenever a quarter of the window
is unreported. A fragment costs at most a quarter of the window (an eighth for the header, an eighth
for the chunks). So after a reader has consumed everything, at most a quarter is unreported, and the
next fragment fits: the writer is never stuck while its reader reads.

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

MIN_CREDIT_BYTES: Final = 1 << 16
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


class Fragment(_Frame, frozen=True, tag="fragment"):
    """Chunks of a message follow. ``sizes`` is set in a message's first fragment only."""

    sequence: Count
    sizes: tuple[Count, ...] | None = None


class Cancel(_Frame, frozen=True, tag="cancel"):
    """The unfinished message is dropped."""


class Probe(_Frame, frozen=True, tag="probe"):
    """An empty frame by which the writer tests whether the connection still exists."""


class Closed(_Frame, frozen=True, tag="closed"):
    """The sender has closed its end."""


FromReader = ReaderHello | Credit | Closed
FromWriter = Fragment | Welcome | Refused | Cancel | Probe | Closed

encode = msgspec.msgpack.Encoder().encode
decode_from_reader = msgspec.msgpack.Decoder(FromReader).decode
decode_from_writer = msgspec.msgpack.Decoder(FromWriter).decode


class FrameError(ValueError):
    """The protocol does not allow this frame at this point."""


def cost(frames: Sequence[bytes | memoryview]) -> int:
    """Return the bytes of credit that a zmq message of these frames takes."""
    return sum(len(frame) for frame in frames) + FRAME_COST * len(frames)


def fragment_limit(credit_bytes: int) -> int:
    """Return the largest `cost` of a fragment's chunks, and size of its header, in bytes."""
    return credit_bytes // 8


def split_message(parts: Sequence[memoryview], limit: int) -> list[list[memoryview]]:
    """Cut a message into fragments without copying: a list of chunks for each, at least one.

    Args:
        parts: one-dimensional views of bytes.
        limit: the largest `cost` of a fragment's chunks; more than `FRAME_COST`.
    """
    fragments: list[list[memoryview]] = [[]]
    room = limit
    for part in parts:
        begin = 0
        while begin < len(part):
            if room <= FRAME_COST:
                fragments.append([])
                room = limit
            chunk = part[begin : begin + room - FRAME_COST]
            fragments[-1].append(chunk)
            begin += len(chunk)
            room -= len(chunk) + FRAME_COST
    return fragments


class Assembler:
    """Assembles a connection's messages from their fragments."""

    def __init__(self) -> None:
        self._sequence = 0
        self._sizes: tuple[int, ...] | None = None
        self._parts: list[memoryview] = []
        self._open: memoryview | None = None
        self._filled = 0

    @property
    def partial(self) -> bool:
        """Return whether a message has begun and is not complete."""
        return self._sizes is not None

    def add(self, fragment: Fragment, chunks: Sequence[memoryview]) -> list[memoryview] | None:
        """Add a fragment; return the message's parts if it completes the message, else ``None``.

        A part of one chunk is that chunk, not a copy; others are assembled in new memory. Raises
        FrameError if the fragment does not follow its predecessors.
        """
        if fragment.sequence != self._sequence:
            raise FrameError(f"fragment {fragment.sequence} where {self._sequence} was due")
        self._sequence += 1
        if (fragment.sizes is None) != self.partial:
            raise FrameError("a fragment that does not belong to the message begun")
        if fragment.sizes is not None:
            self._sizes = fragment.sizes
        for chunk in chunks:
            self._add_chunk(chunk)
        return self._complete()

    def cancel(self) -> None:
        """Drop the message under assembly, if there is one."""
        self._sizes, self._parts, self._open, self._filled = None, [], None, 0

    def _add_chunk(self, chunk: memoryview) -> None:
        size = self._due()
        if size is None or self._filled + len(chunk) > size:
            raise FrameError("more bytes than the message's header announced")
        if len(chunk) == size:
            self._parts.append(chunk)
            return
        if self._open is None:
            self._open = memoryview(_memory(size))
        self._open[self._filled : self._filled + len(chunk)] = chunk
        self._filled += len(chunk)
        if self._filled == size:
            self._parts.append(self._open)
            self._open, self._filled = None, 0

    def _due(self) -> int | None:
        """Return the size of the part of the next chunk; ``None`` if all parts are complete.

        Adds empty parts on the way: they have no chunks.
        """
        sizes = self._sizes or ()
        while len(self._parts) < len(sizes):
            size = sizes[len(self._parts)]
            if size:
                return size
            self._parts.append(memoryview(b""))
        return None

    def _complete(self) -> list[memoryview] | None:
        if self._due() is not None:
            return None
        parts = self._parts
        self.cancel()
        return parts


def _memory(size: int) -> bytearray:
    try:
        return bytearray(size)
    except (MemoryError, OverflowError) as error:
        raise FrameError(f"a part of {size} bytes, more than there is memory for") from error


class CreditWindow:
    """The writer's account of one reader's credit, in bytes as `cost` counts them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._spent = 0
        self._returned = 0
        self.messages = 0

    @property
    def available(self) -> int:
        """Return how many bytes may be sent now."""
        return self._size - (self._spent - self._returned)

    def spend(self, amount: int) -> None:
        """Count ``amount`` bytes as sent; at most `available`."""
        self._spent += amount

    def restore(self, credit: Credit) -> None:
        """Restore the credit of a reader's report.

        Raises FrameError if the total is less than before, or more than was sent.
        """
        if not self._returned <= credit.consumed <= self._spent:
            raise FrameError(f"credit for {credit.consumed} bytes of {self._spent} sent")
        self._returned, self.messages = credit.consumed, credit.messages


class CreditAccount:
    """A reader's account of its consumption, in bytes as `cost` counts them."""

    def __init__(self, size: int) -> None:
        self._threshold = size // 4
        self._consumed = 0
        self._reported = 0
        self.messages = 0

    def consume(self, amount: int, *, completes: bool) -> Credit | None:
        """Count a fragment of ``amount`` bytes; ``completes``: it completes a message.

        Returns the frame to send to the writer; None if less than a quarter of the window is due.
        """
        self._consumed += amount
        self.messages += completes
        if self._consumed - self._reported < self._threshold:
            return None
        self._reported = self._consumed
        return Credit(self._consumed, self.messages)


class RemoteReaderState:
    """The writer's state of one reader.

    Attributes:
        identity: the routing id of its connection; empty while it is absent.
        host: the address of its connection; empty while it is absent.
        window: its byte credits.
    """

    def __init__(self, rank: int, credit_bytes: int) -> None:
        self.rank = rank
        self.identity = b""
        self.host = ""
        self.window = CreditWindow(credit_bytes)
        self._state = "absent"
        self._pid = 0
        self._received_at: float | None = None
        self._fault = ""

    @property
    def joined(self) -> bool:
        """Return whether it is connected, as far as is known."""
        return self._state == "busy"

    @property
    def left(self) -> bool:
        """Return whether it has closed its end, or was removed."""
        return self._state == "closed"

    def can_take(self, amount: int) -> bool:
        """Return whether the reader has credit for ``amount`` bytes, or is closed."""
        return self.left or (self.joined and self.window.available >= amount)

    def receive(
        self, identity: bytes, frames: Sequence[bytes | memoryview]
    ) -> Welcome | Refused | None:
        """Handle a zmq message over the connection ``identity``, which proved this reader's key.

        Returns the answer for that connection, or None.
        """
        if self.identity and identity != self.identity:
            return Refused(f"rank {self.rank} used another connection before ({self._state})")
        if self.identity and not self.joined:
            return None
        try:
            if len(frames) != 1:
                raise FrameError(f"{len(frames)} frames where 1 was due")
            return self._handle(identity, decode_from_reader(frames[0]))
        except (*UNDECODABLE, FrameError) as error:
            self.identity, self._state, self._fault = identity, "faulty", str(error)
            return Refused(self._fault)

    def mark_lost(self) -> None:
        """Mark its connection as ended. A reader that closed its end before is not lost."""
        if self.joined:
            self._state = "lost"

    def remove(self) -> None:
        """Treat a lost or faulty reader as closed, so that the writer stops waiting for it.

        Raises ValueError if it is neither lost nor faulty.
        """
        if self._state not in ("lost", "faulty"):
            raise ValueError(f"{self.status()}: it is not lost")
        self._state = "closed"

    def require(self, operation: str) -> None:
        """Raise PeerLostError if the reader is lost, PeerProtocolError if it is faulty."""
        if self._state == "lost":
            raise PeerLostError(operation, self.status())
        if self._state == "faulty":
            raise PeerProtocolError(operation, self.rank, self._fault)

    def status(self) -> MemberStatus:
        """Return its state; ``sequence`` is the number of messages that it has reported."""
        age = None if self._received_at is None else time.monotonic() - self._received_at
        operation = "dequeue" if self.identity else ""
        messages = self.window.messages
        return MemberStatus(self.rank, self._pid, self._state, operation, messages, age, self.host)

    def _handle(self, identity: bytes, frame: ReaderHello | Credit | object) -> Welcome | None:
        self._received_at = time.monotonic()
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
