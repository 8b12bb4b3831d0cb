"""Run uvicorn with an orderly shutdown.

The first SIGTERM, SIGINT or SIGHUP refuses new connections and finishes accepted requests. A second
one, or the drain timeout, abandons unfinished requests. Plain uvicorn reacts only to a second
SIGINT, drops connections without an answer, is killed by SIGHUP, and raises the signals again after
an orderly end.

Clients that send or read slowly, or hold idle connections, are not limited: a proxy does that.
"""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Literal

import uvicorn

from .listener import BACKLOG

if TYPE_CHECKING:
    from starlette.types import ASGIApp

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections: a request fails if the server closes its connection.
"""
_ABANDON_SECONDS = 5.0
"""Seconds from the drain timeout until uvicorn cancels requests that still run."""


class WebServer(uvicorn.Server):
    """Server with an orderly shutdown; `handle_signals` works also before it runs.

    Attributes:
        received: received signals.
        gave_up: whether unfinished requests were abandoned.

    Args:
        app: the application.
        connections: maximum open connections; requests beyond them get 503.
        give_up: called once to abandon unfinished requests, in the main thread, between any two
            bytecodes; must call its argument after clients had time to read the error.
        drain_seconds: timeout of accepted requests, from the first signal.
        lifespan: ``"off"``: the caller starts and stops the service.
    """

    def __init__(
        self,
        app: ASGIApp,
        connections: int,
        give_up: Callable[[Callable[[], None]], None],
        drain_seconds: float,
        lifespan: Literal["on", "off"] = "on",
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                backlog=BACKLOG,
                limit_concurrency=connections + 1,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=math.ceil(drain_seconds + _ABANDON_SECONDS),
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan=lifespan,
            )
        )
        self.received: list[int] = []
        self.gave_up = False
        self._give_up = give_up
        self._drain_seconds = drain_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's
        """Begin the shutdown; at the second signal abandon unfinished requests."""
        self.received.append(sig)
        self.should_exit = True
        if len(self.received) == 2:
            self._give_up_now()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish accepted requests; abandon them after ``drain_seconds``."""
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
                signal.signal(number, signal.SIG_IGN if self.received else handler)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone, unlike uvicorn."""
        yield

    def _give_up_now(self) -> None:
        if not self.gave_up:
            self.gave_up = True
            self._give_up(self._drop_connections)

    def _drop_connections(self) -> None:
        for each in tuple(self.server_state.connections):
            each.transport.abort()  # ends its request, if one still runs
