"""Serve the routes that all services have: host names, keys, bodies, errors, and the access log.

The id is the client's own (``X-Request-ID``) if it is short and printable, otherwise a new one.

    GET  /                the page: what the service and its workers do, live
    GET  /events          what it shows, as server-sent events
    POST /v1/...          what the model is asked, as in OpenAI's API; see /openapi.json
    GET  /v1/models       likewise, and /v1/models/NAME
    GET  /openapi.json    all of this for programs
    GET  /health          200 unless the pool cannot recover: then 503 and why
    GET  /health/progress 200 unless calls do not move: then 503 and who is late
    GET  /ready           200 while the workers answer, otherwise 503 and why
    GET  /status          the service, and the workers as the board shows them, JSON
    GET  /metrics         Prometheus' text format

With an API key, all but the page, /health, /health/progress and /ready ask for
``Authorization: Bearer KEY``. Whatever is not answered with 200 has an error of OpenAI's shape,
except the last three.

A page of another site may make its own name resolve to this machine (DNS rebinding); the browser
then takes the service for that site, and lets the page read its answers. Such a request has that
site in its ``Host``. A request to an address, or to a name of this machine, is not from such a
page.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import socket
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from shm_broadcast import CoordinatorError

from ..errors import QueueFullError, WorkerLostError
from ..spans import begin_request, end_request, within
from .api import ApiError, ServedModel, clipped, too_many_connections
from .logs import ACCESS
from .metrics import CONTENT_TYPE
from .page import SnapshotBroadcaster, page_route
from .pool_service import NotReadyError, PoolService

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from .openapi import Schema


_ID = re.compile(r"[\x21-\x7e]{1,128}")
_access_log = logging.getLogger(ACCESS)


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
            _access_log.info(
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


MAX_BODY_BYTES = 16 << 20
"""The longest body that a request may have."""
_AS_IT_IS = "identity"
MAX_HELD_BYTES = 4 * MAX_BODY_BYTES
"""What the bodies of all requests under way may have, beyond `SMALL_BODY_BYTES` each."""
SMALL_BODY_BYTES = 64 << 10
"""What each may have whatever the others have: large ones that stall keep out no small one."""


class BodyLimiter:
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


T = TypeVar("T")
Service = TypeVar("Service", bound=PoolService)

_CLIENT_LEFT = 499
_log = logging.getLogger(__name__)


class ServiceApp(ABC, Generic[Service]):
    """The routes of one service.

    Args:
        service: who answers.
        model: what it serves.
        api_key: what requests have to show; ``None``: nothing.
        on_failure: called when the service has failed for good.

    Attributes:
        service: who answers.
        live: those who look at the page.
        model: what it serves.
        bodies: of the requests that are being answered.
    """

    def __init__(
        self,
        service: Service,
        model: ServedModel,
        *,
        api_key: str | None,
        on_failure: Callable[[], None],
    ) -> None:
        self.service = service
        self._api_key = api_key
        self._on_failure = on_failure
        self.model = model
        self.live = SnapshotBroadcaster(self._look)
        self.bodies = BodyLimiter()

    def app(self, *within: Middleware) -> Starlette:
        """The ASGI application; it starts and stops the service.

        Args:
            within: what requests pass before they are answered; the access log comes first.
        """
        about = self.openapi(with_key=self._api_key is not None)
        app = Starlette(
            routes=[
                Route("/", page_route()),
                Route("/events", self.guarded(self._events)),
                *self.model_routes(),
                Route("/v1/models", self.guarded(self._models)),
                Route("/v1/models/{model:path}", self.guarded(self._one_model)),
                Route("/openapi.json", self.guarded(_always(about))),
                Route("/health", self._health),
                Route("/health/progress", self._progress),
                Route("/ready", self._ready),
                Route("/status", self.guarded(self._status)),
                Route("/metrics", self.guarded(self._metrics)),
            ],
            middleware=[Middleware(AccessLog), *within],
            exception_handlers={HTTPException: _no_such_route},
            lifespan=self._lifespan,
        )
        app.router.redirect_slashes = False  # to a URL that a proxy's clients cannot know
        return app

    @abstractmethod
    def model_routes(self) -> list[Route]:
        """The routes by which the model is asked."""

    @abstractmethod
    def openapi(self, *, with_key: bool) -> Schema:
        """The OpenAPI document; ``with_key``: whether requests have to show a key."""

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.service.start(self._on_failure)
        yield
        self.live.close()
        await self.service.stop()

    def guarded(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """``answer``, or the `ApiError` that it raises, for those who show the key."""

        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
                return await answer(request)
            except ApiError as error:
                return error_answer(error)

        return guarded

    def _check_key(self, request: Request) -> None:
        if self._api_key is not None and not _shows(request, self._api_key):
            message = "give the server's API key: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")

    def answering(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """``answer``, for those who show the key: timed, counted, and its errors told as OpenAI's
        API does.
        """

        async def counted(request: Request) -> Response:
            began = time.perf_counter()
            span = begin_request(f"POST {request.url.path}", request.headers)
            try:
                self._check_key(request)
                _check_room(request)
                with within(span):
                    response = await answer(request)
            except ClientDisconnect:
                response = Response(status_code=_CLIENT_LEFT)
                self.service.metrics.errors.labels("client_left").inc()
            except Exception as error:  # noqa: BLE001 - told to the client and to the log
                refused = self.as_api_error(error, request.state.request_id)
                response = error_answer(refused)
                self.service.metrics.errors.labels(refused.code or refused.kind).inc()
            if isinstance(response, StreamingResponse):
                request.state.outcome = _CLIENT_LEFT  # unless it comes to an end
                response.background = BackgroundTask(self._count_stream, request, began, span)
            else:
                await self._count(response.status_code, began, span)
            return response

        return counted

    async def _count(self, status: int, began: float, span: Span | None) -> None:
        end_request(span, status)
        if status == 200:
            self.service.metrics.seconds.observe(time.perf_counter() - began)
        self.service.metrics.requests.labels(str(status)).inc()

    async def _count_stream(self, request: Request, began: float, span: Span | None) -> None:
        """Count a stream by the status that it would have had as a whole, which it has left."""
        if request.state.outcome == _CLIENT_LEFT:
            self.service.metrics.errors.labels("client_left").inc()
        await self._count(request.state.outcome, began, span)

    def as_api_error(self, error: Exception, request_id: str) -> ApiError:
        """What a client is told of an error; the log is told of those that are nobody's fault."""
        match error:
            case ApiError():
                return error
            case QueueFullError(asked=asked, limit=limit) if asked > limit:
                message = f"input has {asked} items; this server takes at most {limit} at once"
                return ApiError(400, message, param="input")
            case QueueFullError():
                return ApiError(429, str(error), "rate_limit_error", code="queue_full")
            case NotReadyError():
                return ApiError(503, str(error), "server_error", code="not_ready")
            case WorkerLostError():
                return ApiError(503, str(error), "server_error", code="worker_lost")
            case CoordinatorError() if self.service.state in ("failed", "stopping"):
                return ApiError(503, str(error), "server_error", code="not_ready")
            case TimeoutError():
                return ApiError(504, str(error), "server_error", code="timeout")
        _log.error("a request failed: id %s", request_id, exc_info=error)
        return ApiError(500, f"{type(error).__name__}: {error}", "server_error")

    async def _models(self, _: Request) -> Response:
        return json_answer(msgspec.json.encode({"object": "list", "data": [self.model.entry()]}))

    async def _one_model(self, request: Request) -> Response:
        self.model.check_name(request.path_params["model"])
        return json_answer(msgspec.json.encode(self.model.entry()))

    async def _health(self, _: Request) -> Response:
        return _ok_unless("failed", str(self.service.failure or ""))

    async def _progress(self, _: Request) -> Response:
        return _ok_unless("stalled", self.service.stalled)

    async def _ready(self, _: Request) -> Response:
        try:
            self.service.check_ready()
        except NotReadyError as error:
            return _unavailable({"ready": False, "reason": str(error)})
        return json_answer(b'{"ready":true}')

    async def _status(self, _: Request) -> Response:
        return json_answer(await self._look())

    async def _look(self) -> bytes:
        return msgspec.json.encode(await self.service.seen())

    async def _events(self, request: Request) -> Response:
        _check_room(request)
        return self.live.answer(request)

    async def _metrics(self, _: Request) -> Response:
        return Response(self.service.metrics.expose(), media_type=CONTENT_TYPE)


async def unless_client_leaves(request: Request, answering: Coroutine[Any, Any, T]) -> T:
    """What ``answering`` gives; it is cancelled when the client closes its connection.

    Raises:
        ClientDisconnect: it did.
    """
    answer = asyncio.create_task(answering)
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        leaving.cancel()
        answer.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _check_room(request: Request) -> None:
    if request.scope["state"].get("spare", False):
        raise too_many_connections()


def _shows(request: Request, api_key: str) -> bool:
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    # Compared without a branch on the contents, so that the time tells nothing of the key.
    right = hmac.compare_digest(shown.strip().encode(), api_key.encode())
    return right and scheme.lower() == "bearer"


def _always(content: object) -> Callable[[Request], Awaitable[Response]]:
    body = msgspec.json.encode(content)

    async def answer(_: Request) -> Response:
        return json_answer(body)

    return answer


async def _no_such_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    response = error_answer(ApiError(status, f"no {request.method} {request.url.path} here"))
    response.headers.update(getattr(error, "headers", None) or {})
    return response


def _ok_unless(what: str, reason: str) -> Response:
    if reason:
        return _unavailable({"status": what, "reason": reason})
    return json_answer(b'{"status":"ok"}')


def _unavailable(content: object) -> Response:
    return json_answer(msgspec.json.encode(content), 503)


def json_answer(body: bytes, status: int = 200) -> Response:
    """An answer in JSON."""
    headers = {"retry-after": "1"} if status in (429, 503) else None
    return Response(body, status, headers, media_type="application/json")


def error_answer(error: ApiError) -> Response:
    """The answer that tells an error."""
    response = json_answer(error.body(), error.status)
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


OPEN = ("/health", "/health/progress", "/ready")
"""What anybody may ask by any name."""


def names_of(host: str) -> frozenset[str]:
    """The names of a service that listens at ``host`` of this machine."""
    machine = socket.gethostname().lower()
    return frozenset({"localhost", host.lower(), machine, machine.partition(".")[0]})


class TrustedHosts:
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
