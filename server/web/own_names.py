"""The names by which clients may call a service that has no API key.

A page of another site may make its own name resolve to this machine (DNS rebinding); the browser
then takes the service for that site, and lets the page read its answers. Such a request has that
site in its ``Host``. A request to an address, or to a name of this machine, is not from such a
page.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from .api import ApiError
from .face import error_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from starlette.types import ASGIApp, Receive, Scope, Send

OPEN = ("/health", "/health/progress", "/ready")
"""What anybody may ask by any name."""


def names_of(host: str) -> frozenset[str]:
    """The names of a service that listens at ``host`` of this machine."""
    machine = socket.gethostname().lower()
    return frozenset({"localhost", host.lower(), machine, machine.partition(".")[0]})


class OwnNames:
    """Passes on to ``app`` what calls the service by one of ``names``, or by an address.

    A request without a ``Host``, as of HTTP/1.0, comes from no browser.

    Args:
        app: who answers.
        names: see `names_of`.
        failed: called with the status and the code of each request that is refused.
    """

    def __init__(
        self, app: ASGIApp, names: Collection[str], failed: Callable[[int, str], None]
    ) -> None:
        self._app = app
        self._names = names
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; what is not HTTP is passed on as it is."""
        if scope["type"] == "http" and scope["path"] not in OPEN:
            called = Headers(scope=scope).get("host", "")
            if called and not is_own(called, self._names):
                message = (
                    f"this service is not {called!r}: without an API key it answers only to "
                    "addresses and to this machine's names"
                )
                self._failed(421, "unknown_host")
                error = ApiError(421, message, code="unknown_host")
                await error_answer(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_own(called: str, names: Collection[str]) -> bool:
    """Whether a ``Host`` names one of ``names``, or is an address."""
    try:
        name = (urlsplit(f"//{called}").hostname or "").removesuffix(".")
        return name in names or bool(ipaddress.ip_address(name))
    except ValueError:
        return False
