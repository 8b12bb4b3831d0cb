"""Server-sent events as the answer to a request.

The server notices that a client has left only when it sends something. So while there is no event
it sends comments, which clients skip; these also keep proxies from closing an idle connection.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from starlette.responses import Response, StreamingResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractContextManager

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
