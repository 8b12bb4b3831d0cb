"""Logs a line for each request, with an id that is also in the answer and in error logs.

The id is the client's own (``X-Request-ID``) if it is short and printable, otherwise a new one.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders

from ..service.overview import clipped
from .logs import ACCESS

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ID = re.compile(r"[\x21-\x7e]{1,128}")
_log = logging.getLogger(ACCESS)


class AccessLog:
    """Passes requests on to ``app``, and logs how they were answered.

    A handler may add to ``request.state.facts`` what is to be logged with its request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; what is not HTTP is passed on as it is."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        facts: dict[str, Any] = {}
        state = scope.setdefault("state", {})
        state.update(request_id=request_id, facts=facts)
        status, size = 0, 0

        async def answer(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            else:
                size += len(message.get("body", b""))
            await send(message)

        began = time.perf_counter()
        try:
            await self._app(scope, receive, answer)
        finally:
            client = scope.get("client")
            path = scope.get("raw_path", b"").decode("ascii", "backslashreplace")
            _log.info(
                "request",
                extra={
                    "facts": {
                        "client": f"{client[0]}:{client[1]}" if client else "",
                        "method": scope["method"],
                        "path": clipped(path),
                        "status": status,
                        "ms": round((time.perf_counter() - began) * 1e3, 1),
                        "bytes": size,
                        "id": request_id,
                        **facts,
                    }
                },
            )
