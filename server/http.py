"""The service's HTTP face.

    POST /v1/embeddings   as OpenAI's API
    GET  /health          200 while the process runs
    GET  /ready           200 once the workers answer, otherwise 503 and why
    GET  /status          the workers as the board shows them, JSON
    GET  /metrics         Prometheus' text format

With an API key, all but /health and /ready ask for ``Authorization: Bearer KEY``. Whatever is not
answered with 200 has an error of OpenAI's shape, except /ready.
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
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from server.errors import QueueFullError, WorkerLostError
from server.metrics import CONTENT_TYPE
from server.openai_api import ApiError, read_request, write_response
from server.service import NotReadyError
from shm_broadcast import CoordinatorError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    import numpy as np

    from server.service import EmbeddingService

MAX_BODY_BYTES = 16 << 20
_CLIENT_LEFT = 499
_log = logging.getLogger(__name__)


class Face:
    """The routes of one service.

    Args:
        service: who answers.
        model: the name that requests have to give.
        api_key: what they have to show; ``None``: nothing.
        on_start_failure: called if the workers do not start.
    """

    def __init__(
        self,
        service: EmbeddingService,
        model: str,
        api_key: str | None,
        on_start_failure: Callable[[], None],
    ) -> None:
        self._service = service
        self._model = model
        self._api_key = api_key
        self._on_start_failure = on_start_failure

    def app(self) -> Starlette:
        """The ASGI application; it starts and stops the service."""
        return Starlette(
            routes=[
                Route("/v1/embeddings", self._guarded(self._embeddings), methods=["POST"]),
                Route("/health", self._health),
                Route("/ready", self._ready),
                Route("/status", self._guarded(self._status)),
                Route("/metrics", self._guarded(self._metrics)),
            ],
            exception_handlers={HTTPException: _no_such_route},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._service.start(self._on_start_failure)
        yield
        await self._service.stop()

    def _guarded(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            if self._api_key is None or _shows(request, self._api_key):
                return await answer(request)
            message = "give the server's API key: Authorization: Bearer KEY"
            return _refusal(ApiError(401, message, code="invalid_api_key"))

        return guarded

    async def _embeddings(self, request: Request) -> Response:
        began = time.perf_counter()
        try:
            response = await self._embed(request)
            self._service.metrics.seconds.observe(time.perf_counter() - began)
        except ApiError as error:
            response = _refusal(error)
        except ClientDisconnect:
            response = Response(status_code=_CLIENT_LEFT)
        except Exception as error:  # noqa: BLE001 - told to the client and to the log
            response = _refusal(self._as_api_error(error))
        self._service.metrics.requests.labels(str(response.status_code)).inc()
        return response

    async def _embed(self, request: Request) -> Response:
        body = await _read_body(request)
        folder = self._service.folder
        asked, inputs = read_request(body, self._model, folder.bert.hidden_size)
        try:
            folder.check_inputs(inputs)
        except (TypeError, ValueError) as error:
            raise ApiError(400, str(error), param="input") from error
        vectors, n_tokens = await _unless_client_leaves(request, self._service.embed(inputs))
        return _json(write_response(asked, vectors, n_tokens))

    def _as_api_error(self, error: Exception) -> ApiError:
        match error:
            case QueueFullError(asked=asked, limit=limit) if asked > limit:
                message = f"input has {asked} items; this server takes at most {limit} at once"
                return ApiError(400, message, param="input")
            case QueueFullError():
                return ApiError(429, str(error), "rate_limit_error", code="queue_full")
            case NotReadyError():
                return ApiError(503, str(error), "server_error", code="not_ready")
            case WorkerLostError():
                return ApiError(503, str(error), "server_error", code="worker_lost")
            case CoordinatorError() if self._service.state != "ready":
                return ApiError(503, str(error), "server_error", code="not_ready")
            case TimeoutError():
                message = "the workers did not answer in time"
                return ApiError(504, message, "server_error", code="timeout")
        _log.error("an embeddings request failed", exc_info=error)
        return ApiError(500, f"{type(error).__name__}: {error}", "server_error")

    async def _health(self, _: Request) -> Response:
        return _json(b'{"status":"ok"}')

    async def _ready(self, _: Request) -> Response:
        try:
            self._service.check_ready()
        except NotReadyError as error:
            return _json(msgspec.json.encode({"ready": False, "reason": str(error)}), 503)
        return _json(b'{"ready":true}')

    async def _status(self, _: Request) -> Response:
        return _json(msgspec.json.encode(self._service.status()))

    async def _metrics(self, _: Request) -> Response:
        return Response(self._service.metrics.expose(), media_type=CONTENT_TYPE)


async def _read_body(request: Request) -> bytes:
    too_large = ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise too_large
    return bytes(body)


async def _unless_client_leaves(
    request: Request, answering: Awaitable[tuple[list[np.ndarray], int]]
) -> tuple[list[np.ndarray], int]:
    """What ``answering`` gives; it is cancelled when the client closes its connection.

    Raises:
        ClientDisconnect: it did.
    """
    answer = asyncio.ensure_future(answering)
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


async def _no_such_route(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    response = _refusal(ApiError(status, f"no {request.method} {request.url.path} here"))
    response.headers.update(getattr(error, "headers", None) or {})
    return response


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


def _refusal(error: ApiError) -> Response:
    response = _json(error.body(), error.status)
    if error.status == 429:
        response.headers["retry-after"] = "1"
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response
