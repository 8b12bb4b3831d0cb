"""Run uvicorn with limits for connections, and with an orderly shutdown.

A client has a limited time to send the head of a request and its body, and to read the answer
(`ConnectionLimits`). A client that takes longer gets a 408, unless an answer has begun, and is
disconnected. uvicorn itself closes idle connections.

Above the maximum number of connections, the connection that has kept the server waiting longest is
closed for a new one, so clients that hold connections without a request cannot block others. If all
connections wait for the server, a few spare ones are accepted: the server reports its state on
them, but takes no work.

A client that shuts down its sending side still gets its answer. A client that has exited looks the
same, but its host answers any byte with a reset. So the first byte of the answer, always the same,
is sent at once, and the server polls for a reset until the answer is complete.

The first SIGTERM, SIGINT or SIGHUP refuses new connections and finishes accepted requests. A second
one, or the drain timeout, abandons unfinished requests. Plain uvicorn reacts only to a second
SIGINT, drops connections without an answer, is killed by SIGHUP, and raises the signals again after
an orderly end.
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
"""First byte of every answer, which begins with ``HTTP/1.1``."""
_POLL_SECONDS = 0.2
"""Seconds between two polls for a reset."""

_ABSOLUTE = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)
"""Absolute form of a request's target (RFC 9112), whose host overrides ``Host``."""

_LATE = ApiError(408, "the request did not arrive in time")
_TWO_LENGTHS = ApiError(400, "the request has a Content-Length beside its Transfer-Encoding")
_SHUTTING_DOWN = ApiError(503, "the server is shutting down", "server_error", code="not_ready")
_FULL = too_many_connections()


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Maximum number of connections, and timeouts of their clients.

    Attributes:
        connections: maximum open connections.
        spare: further connections while all others wait for the server.
        head_seconds: for the head of a request, from its first byte or from a new connection.
        body_seconds: for the body, from the end of the head.
        send_seconds: for the client to read sent data.
        refused: called with the HTTP status of each refusal.
    """

    connections: int = 1000
    spare: int = SPARE_CONNECTIONS
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    send_seconds: float = 60.0
    refused: Callable[[int], None] = lambda _: None


class TimedConnection(H11Protocol):
    """Connection with timeouts for its client.

    Attributes:
        limits: limits of all connections.
        owed: input that the server waits for: ``"head"``, ``"body"``, ``"taking"`` (unread data),
            ``"request"`` (idle connection), or ``""``: the client waits for the server.
        since: monotonic time since which ``owed`` is unchanged.
        spare: whether the connection is beyond the maximum.
    """

    limits: ClassVar = ConnectionLimits()

    @classmethod
    def within(cls, limits: ConnectionLimits) -> type[TimedConnection]:
        """Return a subclass with its own limits."""
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
        """Register the connection; if there are too many, close another."""
        super().connection_made(transport)
        self._set_owed("head")
        beyond = len(self.connections) - self.limits.connections
        if beyond > 0 and self._is_crowded() and not self._displace(spare=False):
            self.spare = True
            if beyond > self.limits.spare and not self._displace(spare=True):
                self._refuse(_FULL)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timer."""
        super().connection_lost(exc)
        self._set_owed("")

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and set the timer."""
        super().data_received(data)
        self._set_owed(self._owed_now())

    def on_response_complete(self) -> None:
        """Close a half-closed connection, otherwise set the timer."""
        super().on_response_complete()
        if self._half_closed and self.cycle.response_complete:
            self.transport.close()
        self._set_owed(self._owed_now())

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's
        """Refuse data that is not HTTP, with the reason."""
        self._refuse(ApiError(400, f"this is not HTTP/1.1: {sys.exception()}"))

    def pause_writing(self) -> None:
        """Start the timer of a client that does not read."""
        super().pause_writing()
        self._set_owed(self._owed_now())

    def resume_writing(self) -> None:
        """Set the timer after the client has read."""
        super().resume_writing()
        self._set_owed(self._owed_now())

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether to keep a half-closed connection: an answer is due."""
        self._half_closed = self.cycle is not None and self._owed_now() in ("", "taking")
        if self._half_closed:
            if not self.cycle.response_started:
                self.transport.write(_AHEAD)
                self.cycle.transport = _RestOfAnswer(self.transport, len(_AHEAD))  # type: ignore[assignment]
            self.loop.call_later(_POLL_SECONDS, self._poll_reset)
        return self._half_closed

    def shutdown(self) -> None:
        """Close the connection, after an answer that is due."""
        if self.cycle is None or self.owed == "":
            super().shutdown()
        elif self.owed == "body" and not self.cycle.response_started:
            self._refuse(_SHUTTING_DOWN)
        else:
            self.transport.close()

    def _owed_now(self) -> str:
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

    def _set_owed(self, owed: str) -> None:
        """Set ``owed`` and its timer; an unchanged ``owed`` keeps the timer."""
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
        """Ignore requests for another protocol, without uvicorn's warning."""
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
        """Close the connection that kept the server waiting longest, if any; return whether."""
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
        self._set_owed("taking")

    def _poll_reset(self) -> None:
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        peer: socket.socket = self.transport.get_extra_info("socket")
        if peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(_POLL_SECONDS, self._poll_reset)


class _RestOfAnswer:
    """Transport that skips the first ``sent`` bytes of an answer, which were sent ahead."""

    def __init__(self, transport: asyncio.Transport, sent: int) -> None:
        self._sent = sent
        self._write = transport.write
        self.close: Callable[[], None] = transport.close
        self.is_closing: Callable[[], bool] = transport.is_closing

    def write(self, data: bytes) -> None:
        ahead, self._sent = self._sent, 0
        self._write(data[ahead:])


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class WebServer(uvicorn.Server):
    """Server with an orderly shutdown; `handle_signals` works also before it runs.

    Attributes:
        heard: received signals.
        gave_up: whether unfinished requests were abandoned.

    Args:
        config: uvicorn's.
        give_up: called once to abandon unfinished requests, in the main thread, between any two
            bytecodes; must call its argument after clients had time to read the error.
        leave: called at the begin of the shutdown; ends endless answers.
        drain_seconds: timeout of accepted requests, from the first signal.
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
        """Begin the shutdown; at the second signal abandon unfinished requests."""
        self.heard.append(sig)
        self.should_exit = True
        if len(self.heard) == 2:
            self._give_up_now()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve, with the full backlog of `listen`.

        asyncio lowers it to ``config.backlog``, the number of connections accepted at once.
        """
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish accepted requests; abandon them after ``drain_seconds``."""
        self._leave()
        over = asyncio.get_running_loop().call_later(self._drain_seconds, self._give_up_now)
        try:
            await super().shutdown(sockets)
        finally:
            over.cancel()

    @contextmanager
    def handle_signals(self) -> Iterator[None]:
        """Handle signals in this block, which must run in the main thread.

        An ignored SIGHUP (nohup) stays ignored. After a signal, later ones are ignored at the end
        of the block, so that the process exits with its own status.
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
        """Leave signals alone, unlike uvicorn."""
        yield

    def _give_up_now(self) -> None:
        if not self.gave_up:
            self.gave_up = True
            self._give_up(self._drop_connections)

    def _drop_connections(self) -> None:
        self.force_exit = True
