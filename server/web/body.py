"""Reading the bodies of requests: each bounded, and all of them together."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from .api import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

MAX_BODY_BYTES = 16 << 20
"""The longest body that a request may have."""
_AS_IT_IS = "identity"
MAX_HELD_BYTES = 4 * MAX_BODY_BYTES
"""What the bodies of all requests under way may have, beyond `SMALL_BODY_BYTES` each."""
SMALL_BODY_BYTES = 64 << 10
"""What each may have whatever the others have: large ones that stall keep out no small one."""


class Bodies:
    """The bodies of the requests that are being answered.

    Attributes:
        held: the number of their bytes that are in memory now, beyond `SMALL_BODY_BYTES` of each.
    """

    def __init__(self) -> None:
        self.held = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """The body of ``request``, which counts as held until the block ends.

        Raises:
            ApiError: 413: it is too large; 415: it is compressed; 429: with the others it is too
                large.
            ClientDisconnect: the client left before it was complete.
        """
        body, counted = bytearray(), 0
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
            raise _too_large()
        encoding = request.headers.get("content-encoding", _AS_IT_IS).lower()
        if encoding != _AS_IT_IS:
            raise ApiError(415, f"the body has the encoding {encoding!r}: send it as it is")
        try:
            async for chunk in request.stream():
                if len(body) + len(chunk) > MAX_BODY_BYTES:
                    raise _too_large()
                more = max(0, len(body) + len(chunk) - SMALL_BODY_BYTES) - counted
                if more and self.held + more > MAX_HELD_BYTES:
                    message = f"the large requests before this one have {self.held} bytes"
                    raise ApiError(429, message, "rate_limit_error", code="queue_full")
                body += chunk
                counted += more
                self.held += more
            yield body
        finally:
            self.held -= counted


def _too_large() -> ApiError:
    return ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
