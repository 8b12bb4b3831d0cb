"""Reading the bodies of requests: each bounded, and all of them together."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ..embedding.openai_api import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

MAX_BODY_BYTES = 16 << 20
MAX_HELD_BYTES = 4 * MAX_BODY_BYTES


class Bodies:
    """The bodies of the requests that are being answered.

    Attributes:
        held: bytes of them.

    Args:
        max_bytes: of one.
        max_held: of all together.
    """

    def __init__(self, max_bytes: int = MAX_BODY_BYTES, max_held: int = MAX_HELD_BYTES) -> None:
        self.held = 0
        self._max_bytes = max_bytes
        self._max_held = max_held

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """The body of ``request``, which counts as held until the block ends.

        Raises:
            ApiError: 413: it is too large; 429: with the others it is.
            ClientDisconnect: the client left before it was complete.
        """
        body = bytearray()
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise self._too_large()
        try:
            async for chunk in request.stream():
                if len(body) + len(chunk) > self._max_bytes:
                    raise self._too_large()
                if self.held + len(chunk) > self._max_held:
                    message = f"the requests before this one have {self.held} bytes"
                    raise ApiError(429, message, "rate_limit_error", code="queue_full")
                body += chunk
                self.held += len(chunk)
            yield body
        finally:
            self.held -= len(body)

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body has more than {self._max_bytes} bytes")
