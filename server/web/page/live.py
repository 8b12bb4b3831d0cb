"""Server-sent events: a snapshot of the service once a second, for everybody who has its page open.

One snapshot is taken for all listeners, and only while there are any. Nobody waits for a listener:
one that is slow misses snapshots, and one that does not read at all is disconnected, as any client.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..api import ApiError
from ..event_stream import EventStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from starlette.requests import Request
    from starlette.responses import Response

LISTENERS = 100
"""How many may listen at once."""
_SECONDS = 1.0
_OVER = b"event: over\ndata: {}\n\n"
_log = logging.getLogger(__name__)


class Live:
    """Those who listen to one service; belongs to its event loop.

    Args:
        take: a snapshot, as JSON in one line.
    """

    def __init__(self, take: Callable[[], Awaitable[bytes]]) -> None:
        self._take = take
        self._listeners = 0
        self._latest: bytes | None = None
        self._news = asyncio.Event()
        self._taking: asyncio.Task[None] | None = None
        self._over = False

    def answer(self, request: Request) -> Response:
        """Events until the client leaves, or `close`: a snapshot at once, then one each second.

        Raises:
            ApiError: 503: too many listen already.
        """
        if self._listeners >= LISTENERS:
            message = f"{LISTENERS} clients listen already"
            raise ApiError(503, message, "server_error", code="overloaded")
        if request.method == "HEAD":
            return EventStream.head()
        return EventStream(self.events(), self.listening())

    def close(self) -> None:
        """Tell all listeners that it is over, and end their answers. Idempotent."""
        self._over = True
        self._tell()
        self._rest()

    async def events(self) -> AsyncIterator[bytes]:
        """The snapshots as they come, without those that came while the last one was sent."""
        sent = None
        while not self._over:
            news = self._news
            if self._latest is sent:
                await news.wait()
            elif (sent := self._latest) is not None:
                yield b"data: " + sent + b"\n\n"
        yield _OVER

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Snapshots are taken meanwhile."""
        self._listeners += 1
        if self._taking is None and not self._over:
            self._taking = asyncio.create_task(self._take_each_second())
        try:
            yield
        finally:
            self._listeners -= 1
            if not self._listeners:
                self._rest()

    async def _take_each_second(self) -> None:
        while True:
            try:
                self._latest = await self._take()
            except Exception:  # noqa: BLE001 - told to the log; the next one may do
                _log.exception("the state of the service cannot be shown")
            self._tell()
            await asyncio.sleep(_SECONDS)

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _rest(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None
        self._latest = None
