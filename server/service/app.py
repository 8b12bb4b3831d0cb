"""Serve the routes that all services share: keys, body limits, errors, access log.

    GET  /                page with the live state of the service and its workers
    POST /v1/...          requests to the model, as in OpenAI's API; see /openapi.json
    GET  /v1/models       the model, also as /v1/models/NAME
    GET  /openapi.json    OpenAPI document
    GET  /health          200 unless the pool cannot recover: 503 and the reason
    GET  /health/progress 200 unless calls are stalled: 503 and the late workers
    GET  /ready           200 while the workers answer, otherwise 503 and the reason
    GET  /status          state of the service and its workers, JSON
    GET  /metrics         Prometheus' text format

With an API key, all routes but the page, /health, /health/progress and /ready require
``Authorization: Bearer KEY``. Errors have OpenAI's body, except those of /health,
/health/progress and /ready.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import socket
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from shm_broadcast import CoordinatorError

from ..calls.call_table import ignore
from ..errors import QueueFullError, WorkerLostError
from ..spans import begin_request, end_request, within
from .api import ApiError, Health, ModelList, Readiness, ServedModel, clipped
from .logs import ACCESS
from .metrics import CONTENT_TYPE
from .openapi import PostRoute, Schema, document_of
from .page import page_route
from .pool_service import NotReadyError, PoolService

if TYPE_CHECKING:
    from opentelemetry.trace import Span
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


_ID = re.compile(r"[\x21-\x7e]{1,128}")
_access_log = logging.getLogger(ACCESS)


class AccessLog:
    """Logs each request, and gives it an id.

    The id is the client's ``X-Request-ID`` if short and printable. A handler may add fields to
    ``request.state.facts``. A request whose end a proxy may see elsewhere is refused.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; other scopes pass unchanged."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        facts: dict[str, Any] = {}
        scope.setdefault("state", {}).update(request_id=request_id, facts=facts)
        names = {name for name, _ in scope["headers"]}
        app = _two_lengths() if {b"content-length", b"transfer-encoding"} <= names else self._app
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
            await app(scope, receive, answer)
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
"""Maximum bytes of a request's body."""
_IDENTITY = "identity"
MAX_HELD_BYTES = 4 * MAX_BODY_BYTES
"""Maximum bytes of all bodies in memory, beyond `SMALL_BODY_BYTES` each."""
SMALL_BODY_BYTES = 64 << 10
"""Bytes of each body outside `MAX_HELD_BYTES`, so stalled large bodies block no small one."""


class BodyLimiter:
    """Limits the memory of bodies; ``held``: bytes beyond `SMALL_BODY_BYTES` of each body."""

    def __init__(self) -> None:
        self.held = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """Read the body of ``request``; its bytes count as held until the block ends.

        Raises:
            ApiError: 413, too large; 415, compressed; 429, too large together with other bodies.
            ClientDisconnect: the client disconnected before the end of the body.
        """
        body, counted = bytearray(), 0
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
            raise _too_large()
        encoding = request.headers.get("content-encoding", _IDENTITY).lower()
        if encoding != _IDENTITY:
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
    """Routes of one service.

    Args:
        service, model: service and its model.
        api_key: key that requests must send; ``None``: no key.

    Attributes:
        on_failure: called when the service has failed for good.
        title: kind of the service.
        bodies: bodies of running requests.
    """

    title: ClassVar[str]

    def __init__(
        self,
        service: Service,
        model: ServedModel,
        *,
        api_key: str | None,
    ) -> None:
        self.service = service
        self._api_key = api_key
        self.on_failure: Callable[[], object] = ignore
        self.model = model
        self.bodies = BodyLimiter()

    def app(self, names: Sequence[str] = ("*",)) -> Starlette:
        """Return the ASGI application; ``names``: hosts that requests may name, by default all."""
        app = Starlette(
            routes=[
                Route("/", page_route()),
                *(
                    Route(post.path, self.answering(post.handler), methods=["POST"])
                    for post in self.posts()
                ),
                Route("/v1/models", self.guarded(self._models)),
                Route("/v1/models/{model:path}", self.guarded(self._one_model)),
                Route("/openapi.json", self.guarded(self._openapi)),
                Route("/health", self._health),
                Route("/health/progress", self._progress),
                Route("/ready", self._ready),
                Route("/status", self.guarded(self._status)),
                Route("/metrics", self.guarded(self._metrics)),
            ],
            middleware=[
                Middleware(AccessLog),
                Middleware(TrustedHostMiddleware, allowed_hosts=names, www_redirect=False),
            ],
            exception_handlers={HTTPException: _no_such_route, ApiError: _failed},
            lifespan=self._lifespan,
        )
        app.router.redirect_slashes = False  # clients behind a proxy cannot use the redirect's URL
        return app

    @abstractmethod
    def posts(self) -> list[PostRoute]:
        """Return the routes to the model."""

    def openapi(self) -> Schema:
        """Return the OpenAPI 3.1 document."""
        with_key = self._api_key is not None
        return document_of(self.title, self.posts(), self.model, with_key=with_key)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.service.start(self.on_failure)
        yield
        await self.service.stop()

    def guarded(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler: check the key."""

        async def guarded(request: Request) -> Response:
            self._check_key(request)
            return await answer(request)

        return guarded

    def _check_key(self, request: Request) -> None:
        if self._api_key is not None and not _has_key(request, self._api_key):
            message = "give the server's API key: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")

    def answering(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wrap a handler of the model: check the key, count, and respond to errors."""

        async def counted(request: Request) -> Response:
            began = time.perf_counter()
            span = begin_request(f"POST {request.url.path}", request.headers)
            try:
                self._check_key(request)
                with within(span):
                    response = await answer(request)
            except ClientDisconnect:
                response = Response(status_code=_CLIENT_LEFT)
                self.service.metrics.errors.labels("client_left").inc()
            except Exception as error:  # noqa: BLE001 - sent to the client and logged
                failure = self.as_api_error(error, request.state.request_id)
                response = error_answer(failure)
                self.service.metrics.errors.labels(failure.code or failure.kind).inc()
            if isinstance(response, StreamingResponse):
                request.state.outcome = _CLIENT_LEFT  # replaced at the end of the stream
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
        """Count a stream by its outcome: the status of the same answer in one piece."""
        if request.state.outcome == _CLIENT_LEFT:
            self.service.metrics.errors.labels("client_left").inc()
        await self._count(request.state.outcome, began, span)

    def as_api_error(self, error: Exception, request_id: str) -> ApiError:
        """Map an exception to an API error; log unexpected ones."""
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
        return json_answer(ModelList([self.model.entry()]))

    async def _one_model(self, request: Request) -> Response:
        self.model.check_name(request.path_params["model"])
        return json_answer(self.model.entry())

    async def _health(self, _: Request) -> Response:
        return _health("failed", str(self.service.failure or ""))

    async def _progress(self, _: Request) -> Response:
        return _health("stalled", self.service.stalled)

    async def _ready(self, _: Request) -> Response:
        try:
            self.service.check_ready()
        except NotReadyError as error:
            return json_answer(Readiness(False, str(error)), 503)
        return json_answer(Readiness(True))

    async def _status(self, _: Request) -> Response:
        return json_answer(await self.service.seen())

    async def _openapi(self, _: Request) -> Response:
        return json_answer(self.openapi())

    async def _metrics(self, _: Request) -> Response:
        return Response(self.service.metrics.expose(), media_type=CONTENT_TYPE)


async def unless_client_leaves(request: Request, answering: Awaitable[T]) -> T:
    """Await ``answering``; cancel it and raise `ClientDisconnect` if the client disconnects."""
    answer = asyncio.ensure_future(answering)
    disconnect = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((answer, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise ClientDisconnect
        return answer.result()
    finally:
        disconnect.cancel()
        answer.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _has_key(request: Request, api_key: str) -> bool:
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    # In constant time, so that the duration does not reveal the key.
    matches = hmac.compare_digest(shown.strip().encode(), api_key.encode())
    return matches and scheme.lower() == "bearer"


async def _no_such_route(request: Request, error: Any) -> Response:
    message = f"no {request.method} {request.url.path} here"
    response = error_answer(ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


async def _failed(_: Request, error: Any) -> Response:
    return error_answer(error)


def _health(state: str, reason: str) -> Response:
    return json_answer(Health(state, reason), 503) if reason else json_answer(Health("ok"))


def json_answer(content: object, status: int = 200) -> Response:
    """Return a JSON response; ask clients to retry after a 429 or 503."""
    headers = {"retry-after": "1"} if status in (429, 503) else None
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


def error_answer(error: ApiError) -> Response:
    """Return the response for an error."""
    response = json_answer(error.response(), error.status)
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


def _two_lengths() -> Response:
    message = "the request has a Content-Length beside its Transfer-Encoding"
    response = error_answer(ApiError(400, message))
    response.headers["connection"] = "close"
    return response


def names_of(host: str) -> list[str]:
    """Return the names by which requests may call a service that listens at ``host``.

    A page of another site may resolve its name to this machine (DNS rebinding). The browser then
    sends that name as ``Host``, and lets the page read the answers.
    """
    machine = socket.gethostname().lower()
    listening = f"[{host}]" if ":" in host else host.lower()
    return ["localhost", "127.0.0.1", "[::1]", listening, machine, machine.partition(".")[0]]
