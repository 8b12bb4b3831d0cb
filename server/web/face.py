"""The service's HTTP face.

    GET  /                the page: what the service and its workers do, live
    GET  /events          what it shows, as server-sent events
    POST /v1/embeddings   as OpenAI's API; see /openapi.json
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
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from shm_broadcast import CoordinatorError

from ..embedding.metrics import CONTENT_TYPE
from ..embedding.openai_api import ApiError, read_request, write_response
from ..embedding.service import BadInputError, NotReadyError
from ..errors import QueueFullError, WorkerLostError
from ..workers.minilm import InputTooLongError
from .access_log import AccessLog
from .body import Bodies
from .front_page import page_route
from .live import Live
from .openapi import document

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
    from typing import Any

    from ..embedding.openai_api import ServedModel
    from ..embedding.service import Embedded, EmbeddingService

_CLIENT_LEFT = 499
_log = logging.getLogger(__name__)


class Face:
    """The routes of one service.

    Args:
        service: who answers.
        model: what it serves.
        api_key: what requests have to show; ``None``: nothing.
        truncate: whether inputs that are too long are cut where a request does not say.
        on_failure: called when the service has failed for good.

    Attributes:
        live: those who look at the page.
    """

    def __init__(
        self,
        service: EmbeddingService,
        model: ServedModel,
        *,
        api_key: str | None,
        truncate: bool,
        on_failure: Callable[[], None],
    ) -> None:
        self._service = service
        self._model = model
        self._api_key = api_key
        self._truncate = truncate
        self._on_failure = on_failure
        self.live = Live(self._look)
        self._bodies = Bodies()

    def app(self) -> Starlette:
        """The ASGI application; it starts and stops the service."""
        about = document(self._model, with_key=self._api_key is not None)
        return Starlette(
            routes=[
                Route("/", page_route()),
                Route("/events", self._guarded(self._events)),
                Route("/v1/embeddings", self._embeddings, methods=["POST"]),
                Route("/v1/models", self._guarded(self._models)),
                Route("/v1/models/{name:path}", self._guarded(self._one_model)),
                Route("/openapi.json", self._guarded(_always(about))),
                Route("/health", self._health),
                Route("/health/progress", self._progress),
                Route("/ready", self._ready),
                Route("/status", self._guarded(self._status)),
                Route("/metrics", self._guarded(self._metrics)),
            ],
            middleware=[Middleware(AccessLog)],
            exception_handlers={HTTPException: _no_such_route},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._service.start(self._on_failure)
        yield
        self.live.close()
        await self._service.stop()

    def _guarded(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            try:
                self._check_key(request)
            except ApiError as error:
                return _refusal(error)
            return await answer(request)

        return guarded

    def _check_key(self, request: Request) -> None:
        if self._api_key is not None and not _shows(request, self._api_key):
            message = "give the server's API key: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")

    async def _embeddings(self, request: Request) -> Response:
        metrics, began = self._service.metrics, time.perf_counter()
        try:
            self._check_key(request)
            response = await self._embed(request)
            metrics.seconds.observe(time.perf_counter() - began)
        except ClientDisconnect:
            response = Response(status_code=_CLIENT_LEFT)
            metrics.errors.labels("client_left").inc()
        except Exception as error:  # noqa: BLE001 - told to the client and to the log
            refused = self._as_api_error(error, request.state.request_id)
            response = _refusal(refused)
            metrics.errors.labels(refused.code or refused.kind).inc()
        metrics.requests.labels(str(response.status_code)).inc()
        return response

    async def _embed(self, request: Request) -> Response:
        async with self._bodies.read(request) as body:
            asked, inputs = read_request(body, self._model)
            truncate = self._truncate if asked.truncate is None else asked.truncate
            found = await _unless_client_leaves(
                request, self._service.embed(inputs, truncate=truncate)
            )
        response = _json(write_response(asked, found.vectors, found.n_tokens))
        request.state.facts.update(inputs=len(inputs), tokens=found.n_tokens)
        self._service.metrics.inputs.inc(len(inputs))
        self._service.metrics.tokens.inc(found.n_tokens)
        if found.truncated:
            self._service.metrics.truncated.inc(len(found.truncated))
            response.headers["x-truncated-inputs"] = str(len(found.truncated))
            request.state.facts["truncated"] = len(found.truncated)
        return response

    def _as_api_error(self, error: Exception, request_id: str) -> ApiError:
        match error:
            case ApiError():
                return error
            case BadInputError(__cause__=InputTooLongError()):
                return ApiError(400, str(error), param="input", code="context_length_exceeded")
            case BadInputError():
                return ApiError(400, str(error), param="input")
            case QueueFullError(asked=asked, limit=limit) if asked > limit:
                message = f"input has {asked} items; this server takes at most {limit} at once"
                return ApiError(400, message, param="input")
            case QueueFullError():
                return ApiError(429, str(error), "rate_limit_error", code="queue_full")
            case NotReadyError():
                return ApiError(503, str(error), "server_error", code="not_ready")
            case WorkerLostError():
                return ApiError(503, str(error), "server_error", code="worker_lost")
            case CoordinatorError() if self._service.state in ("failed", "stopping"):
                return ApiError(503, str(error), "server_error", code="not_ready")
            case TimeoutError():
                return ApiError(504, str(error), "server_error", code="timeout")
        _log.error("an embeddings request failed: id %s", request_id, exc_info=error)
        return ApiError(500, f"{type(error).__name__}: {error}", "server_error")

    async def _models(self, _: Request) -> Response:
        return _json(msgspec.json.encode({"object": "list", "data": [self._model.entry()]}))

    async def _one_model(self, request: Request) -> Response:
        try:
            self._model.check_name(request.path_params["name"])
        except ApiError as error:
            return _refusal(error)
        return _json(msgspec.json.encode(self._model.entry()))

    async def _health(self, _: Request) -> Response:
        return _ok_unless("failed", str(self._service.failure or ""))

    async def _progress(self, _: Request) -> Response:
        return _ok_unless("stalled", self._service.stalled)

    async def _ready(self, _: Request) -> Response:
        try:
            self._service.check_ready()
        except NotReadyError as error:
            return _unavailable({"ready": False, "reason": str(error)})
        return _json(b'{"ready":true}')

    async def _status(self, _: Request) -> Response:
        return _json(await self._look())

    async def _look(self) -> bytes:
        return msgspec.json.encode(await self._service.seen())

    async def _events(self, request: Request) -> Response:
        try:
            return self.live.answer(request)
        except ApiError as error:
            return _refusal(error)

    async def _metrics(self, _: Request) -> Response:
        return Response(self._service.metrics.expose(), media_type=CONTENT_TYPE)


async def _unless_client_leaves(
    request: Request, answering: Coroutine[Any, Any, Embedded]
) -> Embedded:
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


def _shows(request: Request, api_key: str) -> bool:
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    # Compared without a branch on the contents, so that the time tells nothing of the key.
    right = hmac.compare_digest(shown.strip().encode(), api_key.encode())
    return right and scheme.lower() == "bearer"


def _always(content: object) -> Callable[[Request], Awaitable[Response]]:
    body = msgspec.json.encode(content)

    async def answer(_: Request) -> Response:
        return _json(body)

    return answer


async def _no_such_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    response = _refusal(ApiError(status, f"no {request.method} {request.url.path} here"))
    response.headers.update(getattr(error, "headers", None) or {})
    return response


def _ok_unless(what: str, reason: str) -> Response:
    if reason:
        return _unavailable({"status": what, "reason": reason})
    return _json(b'{"status":"ok"}')


def _unavailable(content: object) -> Response:
    return _json(msgspec.json.encode(content), 503)


def _json(body: bytes, status: int = 200) -> Response:
    headers = {"retry-after": "1"} if status in (429, 503) else None
    return Response(body, status, headers, media_type="application/json")


def _refusal(error: ApiError) -> Response:
    response = _json(error.body(), error.status)
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response
