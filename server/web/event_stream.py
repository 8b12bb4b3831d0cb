"""Server-sent events as the answer to a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.responses import Response, StreamingResponse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractContextManager

    from starlette.types import Receive, Scope, Send

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with self._meanwhile:
            await super().__call__(scope, receive, send)

    @classmethod
    def head(cls) -> Response:
        """The answer to a HEAD request: the same without events."""
        return Response(headers=_HEADERS, media_type=cls.media_type)
