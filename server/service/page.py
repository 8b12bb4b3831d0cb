"""Serve the page of a service, and the events that keep it up to date.

The server notices that a client has left only when it sends something. So while there is no event
it sends comments, which clients skip; these also keep proxies from closing an idle connection.

It contains no data, so everybody may load it. Its policy lets a browser run only the script and the
style in the file, whatever the service shows there.

One snapshot is taken for all listeners, and only while there are any. Nobody waits for a listener:
one that is slow misses snapshots, and one that does not read at all is disconnected, as any client.
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
"""How long nothing is sent before a comment is."""
COMMENT: Final = b":\n\n"
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class EventStream(StreamingResponse):
    """Events as they come, until they end or the client leaves.

    Args:
        events: each as it is sent.
        meanwhile: entered before anything is sent, and left however that ends.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], meanwhile: AbstractContextManager[object]
    ) -> None:
        super().__init__(events, headers=_HEADERS)
        self._meanwhile = meanwhile
        self._sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
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
        """The answer to a HEAD request: the same without events."""
        return Response(headers=_HEADERS, media_type=cls.media_type)


_FILE = Path(__file__).parents[1] / "data" / "page.html"


def page_route() -> Callable[[Request], Awaitable[Response]]:
    """What answers with the page."""
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
    """The Content-Security-Policy of a page with one script and one style."""
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
"""How many may listen at once."""
_SECONDS = 1.0
_OVER = b"event: over\ndata: {}\n\n"
_log = logging.getLogger(__name__)


class SnapshotBroadcaster:
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
        return EventStream(self.events(), self.broadcasting())

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
    def broadcasting(self) -> Iterator[None]:
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
