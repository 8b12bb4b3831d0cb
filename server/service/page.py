"""Serve the page of a service, and the server-sent events that update it.

The page contains no data, so it needs no key. Its Content-Security-Policy allows only the script
and the style in the file.

While there are listeners, one snapshot per second is taken for all of them. A slow listener misses
snapshots; one that does not read is disconnected, as any client.

A server detects a lost client only when it sends. Without events it therefore sends comments, which
clients skip; comments also keep proxies from closing an idle connection.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from starlette.responses import Response, StreamingResponse

from .api import ApiError

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Message, Receive, Scope, Send


SILENT_SECONDS: Final = 2.0
"""Seconds without an event after which a comment is sent."""
COMMENT: Final = b":\n\n"
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class EventStream(StreamingResponse):
    """Response of server-sent events, within the context ``meanwhile``."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], meanwhile: AbstractContextManager[object]
    ) -> None:
        super().__init__(events, headers=_HEADERS)
        self._meanwhile = meanwhile
        self._sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        with self._meanwhile:
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Send the events, and comments in between."""

        async def send_and_count(message: Message) -> None:
            await send(message)
            self._sent += 1

        comments = asyncio.create_task(self._send_comments(send))
        try:
            await super().stream_response(send_and_count)
        finally:
            comments.cancel()

    async def _send_comments(self, send: Send) -> None:
        sent = 0
        while True:
            await asyncio.sleep(SILENT_SECONDS)
            if sent == self._sent and sent > 0:
                await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
            sent = self._sent

    @classmethod
    def head(cls) -> Response:
        """Return the response to a HEAD request."""
        return Response(headers=_HEADERS, media_type=cls.media_type)


_FILE = Path(__file__).parents[1] / "data" / "page.html"


def page_route() -> Callable[[Request], Awaitable[Response]]:
    """Return the handler that serves the page."""
    content = _FILE.read_text(encoding="utf-8")
    headers = {
        "content-security-policy": policy(content),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }

    async def answer(_: Request) -> Response:
        return Response(content, headers=headers, media_type="text/html")

    return answer


def policy(content: str) -> str:
    """Return the Content-Security-Policy of a page with one script and one style."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest('script', content)}'",
            f"style-src '{_digest('style', content)}'",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _digest(tag: str, content: str) -> str:
    (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", content, re.DOTALL)
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


LISTENERS = 100
"""Maximum number of listeners."""
_SECONDS = 1.0
_OVER = b"event: over\ndata: {}\n\n"
_log = logging.getLogger(__name__)


class SnapshotBroadcaster:
    """Sends snapshots of ``take``, JSON lines, to listeners; belongs to one event loop."""

    def __init__(self, take: Callable[[], Awaitable[bytes]]) -> None:
        self._take = take
        self._listeners = 0
        self._latest: bytes | None = None
        self._changed = asyncio.Event()
        self._taking: asyncio.Task[None] | None = None
        self._over = False

    def answer(self, request: Request) -> Response:
        """Return a stream of snapshots: one at once, then one per second until `close`.

        Raises:
            ApiError: 503; too many listeners.
        """
        if self._listeners >= LISTENERS:
            message = f"{LISTENERS} clients listen already"
            raise ApiError(503, message, "server_error", code="overloaded")
        if request.method == "HEAD":
            return EventStream.head()
        return EventStream(self.events(), self.broadcasting())

    def close(self) -> None:
        """Send a final event to all listeners, and end their streams. Idempotent."""
        self._over = True
        self._notify()
        self._stop_taking()

    async def events(self) -> AsyncIterator[bytes]:
        """Yield each new snapshot; skip those taken while one was being sent."""
        sent = None
        while not self._over:
            changed = self._changed
            if self._latest is sent:
                await changed.wait()
            elif (sent := self._latest) is not None:
                yield b"data: " + sent + b"\n\n"
        yield _OVER

    @contextmanager
    def broadcasting(self) -> Iterator[None]:
        """Count a listener within the block; snapshots are taken meanwhile."""
        self._listeners += 1
        if self._taking is None and not self._over:
            self._taking = asyncio.create_task(self._take_each_second())
        try:
            yield
        finally:
            self._listeners -= 1
            if not self._listeners:
                self._stop_taking()

    async def _take_each_second(self) -> None:
        while True:
            try:
                self._latest = await self._take()
            except Exception:  # noqa: BLE001 - logged; the next snapshot may succeed
                _log.exception("the state of the service cannot be shown")
            self._notify()
            await asyncio.sleep(_SECONDS)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _stop_taking(self) -> None:
        if self._taking is not None:
            self._taking.cancel()
            self._taking = None
        self._latest = None
