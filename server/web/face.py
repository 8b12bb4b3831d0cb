"""A service's HTTP face: what all have, whatever their workers compute.

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
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from abc import ABC, abstractmethod
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from shm_broadcast import CoordinatorError

from ..errors import QueueFullError, WorkerLostError
from ..service.metrics import CONTENT_TYPE
from ..service.pool_service import NotReadyError, PoolService
from ..spans import begin_request, end_request, within
from .access_log import AccessLog
from .api import ApiError, too_many_connections
from .body import Bodies
from .page.front_page import page_route
from .page.live import Live

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
    from typing import Any

    from opentelemetry.trace import Span

    from .api import ServedModel
    from .openapi import Schema

T = TypeVar("T")
Service = TypeVar("Service", bound=PoolService)

_CLIENT_LEFT = 499
_log = logging.getLogger(__name__)


class Face(ABC, Generic[Service]):
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
        self.live = Live(self._look)
        self.bodies = Bodies()

    def app(self, *within: Middleware) -> Starlette:
        """The ASGI application; it starts and stops the service.

        Args:
            within: what requests pass before they are answered; the access log comes first.
        """
        about = self.about(with_key=self._api_key is not None)
        app = Starlette(
            routes=[
                Route("/", page_route()),
                Route("/events", self.guarded(self._events)),
                *self.asked(),
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
    def asked(self) -> list[Route]:
        """The routes by which the model is asked."""

    @abstractmethod
    def about(self, *, with_key: bool) -> Schema:
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
