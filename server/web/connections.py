"""One client's connection: uvicorn's, with an end to each wait for the client, and to their number.

What a client owes, and how long it has: the head of a request, `ConnectionLimits.head_seconds`; its
body, ``body_seconds``; taking the answer, ``send_seconds``. Who is late is told so (408) where that
is still possible, and cut off. (An end to idle connections is uvicorn's own.)

Where there are too many connections, the one that has kept the server waiting longest gives way to
a new one. So whoever holds connections without asking anything keeps nobody else out.

A client that has shut down its sending side still gets its answer. It cannot be told from one that
has left, for both send the same; but one that has left answers to a byte with a reset. So the
first letter of the answer, which is always the same, is sent ahead, and the reset is looked for.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from ..embedding.openai_api import ApiError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_AHEAD = b"H"
"""Of ``HTTP/1.1``."""
_LOOK_SECONDS = 0.2
"""How often to look whether a client that sends no more has left."""

_LATE = ApiError(408, "the request did not arrive in time")
_MOVED = ApiError(503, "the server is shutting down", "server_error", code="not_ready")
_FULL = ApiError(503, "the server has too many connections", "server_error", code="overloaded")


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What clients may take.

    Attributes:
        connections: at once.
        head_seconds: for the head of a request, counted from its first byte, and for a new
            connection from its beginning.
        body_seconds: for the body, counted from the end of the head.
        send_seconds: to take what was sent.
    """

    connections: int = 1000
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    send_seconds: float = 60.0


class TimedConnection(H11Protocol):
    """A connection that ends in time.

    Attributes:
        limits: what clients may take.
        owed: what the client owes: ``"head"``, ``"body"``, ``"taking"``, ``"request"`` (it is
            idle), or ``""``: it waits for its answer.
        since: since when, by the monotonic clock.
    """

    limits: ClassVar = ConnectionLimits()

    @classmethod
    def within(cls, limits: ConnectionLimits) -> type[TimedConnection]:
        """A class of connections with limits of their own."""
        return type("TimedConnection", (cls,), {"limits": limits})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.owed = ""
        self.since = 0.0
        self._seconds = {
            "head": self.limits.head_seconds,
            "body": self.limits.body_seconds,
            "taking": self.limits.send_seconds,
        }
        self._timer: asyncio.TimerHandle | None = None
        self._half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, at the cost of another one where there are too many."""
        super().connection_made(transport)
        self._note("head")
        if len(self.connections) > self.limits.connections and not self._displace():
            self._refuse(_FULL)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        super().connection_lost(exc)
        self._note("")

    def data_received(self, data: bytes) -> None:
        """Take in some bytes."""
        super().data_received(data)
        self._note(self._what_is_owed())

    def on_response_complete(self) -> None:
        """An answer was handed to the transport."""
        super().on_response_complete()
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()
        self._note(self._what_is_owed())

    def resume_writing(self) -> None:
        """The client takes what was sent."""
        super().resume_writing()
        self._note(self._what_is_owed())

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; whether to keep the connection open."""
        self._half_closed = self.cycle is not None and self._what_is_owed() in ("", "taking")
        if self._half_closed and not self.cycle.response_started:
            self.transport.write(_AHEAD)
            self.cycle.transport = _Rest(self.transport, len(_AHEAD))  # type: ignore[assignment]
            self.loop.call_later(_LOOK_SECONDS, self._look_for_reset)
        return self._half_closed

    def shutdown(self) -> None:
        """The server ends: what was not asked wholly yet is not waited for."""
        if self.cycle is None or self.owed == "":
            super().shutdown()
        elif self.owed == "body" and not self.cycle.response_started:
            self._refuse(_MOVED)
        else:
            self.transport.close()

    def _what_is_owed(self) -> str:
        if self.transport.is_closing():
            return "taking"
        if not self.cycle:
            return "head"
        if self.cycle.more_body:
            return "body"
        if not self.cycle.response_complete:
            return "taking" if self.flow.write_paused else ""
        if self.transport.get_write_buffer_size():
            return "taking"
        return "head" if self.conn.trailing_data[0] else "request"

    def _note(self, owed: str) -> None:
        """The client owes this from now on, unless it did before."""
        if owed == self.owed:
            return
        self.owed = owed
        self.since = time.monotonic()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (seconds := self._seconds.get(owed)) is not None:
            self._timer = self.loop.call_later(seconds, self._overdue)

    def _overdue(self) -> None:
        if self.owed == "taking" and self.transport.get_write_buffer_size():
            self.transport.abort()
        elif self.owed != "taking":
            self._refuse(_LATE)

    def _displace(self) -> bool:
        """Whether another connection gave way."""
        waiting = [
            each
            for each in self.connections
            if isinstance(each, TimedConnection) and each is not self and each.owed
        ]
        if not waiting:
            return False
        min(waiting, key=lambda each: each.since).give_way()
        return True

    def give_way(self) -> None:
        """Close the connection: its client has kept the server waiting."""
        if self.owed in ("head", "body"):
            self._refuse(_LATE)
        else:
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Say why, where no answer was begun, and close."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error.body()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            reason = STATUS_PHRASES[error.status]
            for event in (
                h11.Response(status_code=error.status, headers=headers, reason=reason),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._note("taking")

    def _look_for_reset(self) -> None:
        if self.transport.is_closing() or self.cycle.response_started:
            return
        link: socket.socket = self.transport.get_extra_info("socket")
        if link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(_LOOK_SECONDS, self._look_for_reset)


class _Rest:
    """A transport to which the beginning of what is written has been sent already.

    Args:
        transport: whose.
        sent: how many bytes.
    """

    def __init__(self, transport: asyncio.Transport, sent: int) -> None:
        self._sent = sent
        self._write = transport.write
        self.close: Callable[[], None] = transport.close
        self.is_closing: Callable[[], bool] = transport.is_closing

    def write(self, data: bytes) -> None:
        """Send what was not yet."""
        ahead, self._sent = self._sent, 0
        self._write(data[ahead:])
