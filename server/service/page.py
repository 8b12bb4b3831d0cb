"""Serve the page of a service.

The page contains no data, so it needs no key. Its Content-Security-Policy allows only the script
and the style in the file.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.requests import Request

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
