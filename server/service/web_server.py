"""Run uvicorn with limits to each connection and to their number, and an orderly end.

The server waits for the head of a request for `ConnectionLimits.head_seconds`, for its body for
``body_seconds``, and for the client to read the answer for ``send_seconds``. A client that takes
longer is told so (408), unless an answer was begun, and disconnected. (Connections without a
request are closed by uvicorn itself.)

If there are too many connections, the one that has kept the server waiting longest is closed for a
new one, so clients that hold connections and send no request cannot keep others out. If all of them
wait for the server, some more are accepted: on these it reports its state, but takes no work.

A client that has shut down its sending side still gets its answer. One that has left looks the same
to the server, but its host answers any byte with a reset. So the first byte of the answer, which is
always the same, is sent at once, and the server watches for a reset until the answer is complete.

At the first SIGTERM, SIGINT or SIGHUP it refuses new connections and finishes accepted requests. At
a second one, or after the drain timeout, it abandons unfinished requests. Plain uvicorn reacts only
to a second SIGINT, drops connections without an answer, is killed by SIGHUP, and raises the signals
again after an orderly end.
"""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import unquote

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from .api import ApiError, too_many_connections
from .listener import BACKLOG, SPARE_CONNECTIONS

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


_AHEAD = b"H"
"""The first byte of every answer, which begins with ``HTTP/1.1``."""
_LOOK_SECONDS = 0.2
"""Seconds between two looks whether a client that sends no more has left."""

_ABSOLUTE = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)
"""A request's target that names the host as well, and counts before the ``Host``; as to a proxy."""

_LATE = ApiError(408, "the request did not arrive in time")
_TWO_LENGTHS = ApiError(400, "the request has a Content-Length beside its Transfer-Encoding")
_MOVED = ApiError(503, "the server is shutting down", "server_error", code="not_ready")
_FULL = too_many_connections()


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """How many connections there may be, and how long the server waits for their clients.

    Attributes:
        connections: how many may be open at once.
        spare: how many more are accepted where all of those wait for the server.
        head_seconds: for the head of a request, counted from its first byte, and for a new
            connection from its beginning.
        body_seconds: for the body, counted from the end of the head.
        send_seconds: for the client to read what was sent.
        refused: called with the status that a client is told beyond these limits.
    """

    connections: int = 1000
    spare: int = SPARE_CONNECTIONS
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    send_seconds: float = 60.0
    refused: Callable[[int], None] = lambda _: None


class TimedConnection(H11Protocol):
    """A connection that waits for its client for a limited time.

    Attributes:
        limits: how long it waits.
        owed: what it waits for: ``"head"``, ``"body"``, ``"taking"`` (the client has not read all
            that was sent), ``"request"`` (it is idle), or ``""``: the client waits for the server.
        since: when that began, by the monotonic clock.
        spare: whether it was accepted beyond the limit, and has not come within it.
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
        self.spare = False
        self._app = self.app
        self.app = self._answer
        self._seconds = {
            "head": self.limits.head_seconds,
            "body": self.limits.body_seconds,
            "taking": self.limits.send_seconds,
        }
        self._timer: asyncio.TimerHandle | None = None
        self._half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection; where there are too many, close another one for it."""
        super().connection_made(transport)
        self._note("head")
        beyond = len(self.connections) - self.limits.connections
        if beyond > 0 and self._is_crowded() and not self._displace(spare=False):
            self.spare = True
            if beyond > self.limits.spare and not self._displace(spare=True):
                self._refuse(_FULL)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection was closed: wait for nothing more."""
        super().connection_lost(exc)
        self._note("")

    def data_received(self, data: bytes) -> None:
        """Take in some bytes from the client."""
        super().data_received(data)
        self._note(self._what_is_owed())

    def on_response_complete(self) -> None:
        """An answer was handed to the transport."""
        super().on_response_complete()
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()
        self._note(self._what_is_owed())

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's
        """What came is not HTTP: say what is wrong with it."""
        self._refuse(ApiError(400, f"this is not HTTP/1.1: {sys.exception()}"))

    def pause_writing(self) -> None:
        """The client has not read much of what was sent."""
        super().pause_writing()
        self._note(self._what_is_owed())

    def resume_writing(self) -> None:
        """The client has read enough of what was sent for more to be sent."""
        super().resume_writing()
        self._note(self._what_is_owed())

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more; whether to keep the connection open."""
        self._half_closed = self.cycle is not None and self._what_is_owed() in ("", "taking")
        if self._half_closed:
            if not self.cycle.response_started:
                self.transport.write(_AHEAD)
                self.cycle.transport = _Rest(self.transport, len(_AHEAD))  # type: ignore[assignment]
            self.loop.call_later(_LOOK_SECONDS, self._look_for_reset)
        return self._half_closed

    def shutdown(self) -> None:
        """The server ends: a request that has not arrived as a whole is not waited for."""
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
        """Wait for this from now on; the time runs on if it is what was waited for before."""
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

    def _should_upgrade(self) -> bool:
        """No: who asks for another protocol gets this one, and the log is not told of it."""
        return False

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:
            self._refuse(_TWO_LENGTHS)
            return
        if target := _ABSOLUTE.fullmatch(scope["raw_path"]):
            host, path = target[1], target[2] or b"/"
            others = [each for each in scope["headers"] if each[0] != b"host"]
            scope.update(raw_path=path, path=unquote(path), headers=[(b"host", host), *others])
        self.spare = self.spare and self._is_crowded()
        scope["state"]["spare"] = self.spare
        await self._app(scope, receive, send)

    def _is_crowded(self) -> bool:
        return len(self._others(spare=False)) >= self.limits.connections

    def _others(self, *, spare: bool) -> list[TimedConnection]:
        others = (each for each in self.connections if each is not self)
        return [
            each for each in others if isinstance(each, TimedConnection) and each.spare is spare
        ]

    def _displace(self, *, spare: bool) -> bool:
        """Close the connection that has kept the server waiting longest; whether there is one."""
        waiting = [each for each in self._others(spare=spare) if each.owed]
        if not waiting:
            return False
        min(waiting, key=lambda each: each.since).give_way()
        return True

    def give_way(self) -> None:
        """Close the connection in favour of a new one."""
        if self.owed in ("head", "body"):
            self._refuse(_LATE)
        else:
            self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Close the connection, and say why unless an answer was begun."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error.body()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            reason = STATUS_PHRASES[error.status]
            self.limits.refused(error.status)
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
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        link: socket.socket = self.transport.get_extra_info("socket")
        if link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(_LOOK_SECONDS, self._look_for_reset)


class _Rest:
    """A transport on which the first bytes of the answer have been sent already.

    Args:
        transport: where the rest is written.
        sent: how many bytes have been sent.
    """

    def __init__(self, transport: asyncio.Transport, sent: int) -> None:
        self._sent = sent
        self._write = transport.write
        self.close: Callable[[], None] = transport.close
        self.is_closing: Callable[[], bool] = transport.is_closing

    def write(self, data: bytes) -> None:
        """Send ``data`` without the bytes that were sent already."""
        ahead, self._sent = self._sent, 0
        self._write(data[ahead:])


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class WebServer(uvicorn.Server):
    """A server that hears signals from `handle_signals` on, also before it runs.

    Attributes:
        heard: the signals that came.
        gave_up: whether what was unfinished was given up.

    Args:
        config: uvicorn's.
        give_up: called once to give up what is unfinished, in the main thread, between any two
            instructions; it must call its argument after clients have had time to read of it.
        leave: called when it begins to finish: ends the answers that have no end of their own.
        drain_seconds: how long it may take from the first signal to finish what was accepted.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        give_up: Callable[[Callable[[], None]], None],
        leave: Callable[[], None],
        drain_seconds: float,
    ) -> None:
        super().__init__(config)
        self.heard: list[int] = []
        self.gave_up = False
        self._give_up = give_up
        self._leave = leave
        self._drain_seconds = drain_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's
        """Take a signal."""
        self.heard.append(sig)
        self.should_exit = True
        if len(self.heard) == 2:
            self._give_up_now()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve; what cannot be accepted yet waits in the queue that `listen` gave.

        asyncio shortens it to ``config.backlog``, which is how many it accepts at a time.
        """
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish what was accepted; after ``drain_seconds`` give it up."""
        self._leave()
        over = asyncio.get_running_loop().call_later(self._drain_seconds, self._give_up_now)
        try:
            await super().shutdown(sockets)
        finally:
            over.cancel()

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle signals in this block; in the main thread only.

        A hang-up that is ignored, as under nohup, stays so. Once a signal was heard, later ones are
        ignored: the process ends, and with its own exit status.
        """
        before = {number: signal.getsignal(number) for number in SIGNALS}
        if before[signal.SIGHUP] is signal.SIG_IGN:
            del before[signal.SIGHUP]
        for number in before:
            signal.signal(number, self.handle_exit)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_IGN if self.heard else handler)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals as they are; uvicorn would take them over here."""
        yield

    def _give_up_now(self) -> None:
        if not self.gave_up:
            self.gave_up = True
            self._give_up(self._drop_connections)

    def _drop_connections(self) -> None:
        self.force_exit = True
