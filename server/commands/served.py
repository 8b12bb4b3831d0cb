"""Serve a model over HTTP: workers, service and web server."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial

import uvicorn
from starlette.middleware import Middleware

from .. import spans
from ..pool import WorkerPool
from ..replicas import Replicas
from ..service import listener, logs
from ..service import listener as descriptors
from ..service.api import ServedModel
from ..service.completions import CompletionApp, CompletionService
from ..service.embeddings import EmbeddingApp, EmbeddingService
from ..service.face import TrustedHosts, names_of
from ..service.web_server import ConnectionLimits, TimedConnection, WebServer
from .read_options import DecoderModel, Model, ServePlan

_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections: a request fails if the server closes its connection.
"""


def serve(plan: ServePlan) -> int:
    """Serve until SIGTERM, then finish accepted requests; see `serve.run`."""
    logs.configure(plan.access_log, as_json=plan.log_json)
    if plan.spans is not None:
        spans.record(plan.spans)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers use the cores
    workers = plan.model.workers
    shares = descriptors.connection_shares(
        descriptors.raise_limit(), plan.max_connections, workers.dp * workers.tp * workers.pp
    )

    def end() -> None:
        server.should_exit = True

    app = _app(plan, end)
    service = app.service
    config = _web_config(plan, app, shares)
    server = WebServer(config, service.give_up, app.live.close, plan.drain_timeout)
    with server.handle_signals(), listener.listen(plan.host, plan.port) as listening:
        print(f"serving {plan.name} at {listener.url(listening)}", flush=True)
        server.run(sockets=[listening])
    if service.failure is not None:
        raise service.failure
    if signal.SIGINT in server.heard:
        raise KeyboardInterrupt
    return 1 if server.gave_up else 0


def _app(plan: ServePlan, on_failure: Callable[[], None]) -> EmbeddingApp | CompletionApp:
    if isinstance(plan.model, DecoderModel):
        return _completion_app(plan, plan.model, on_failure)
    return _embedding_app(plan, plan.model, on_failure)


def _embedding_app(plan: ServePlan, model: Model, on_failure: Callable[[], None]) -> EmbeddingApp:
    dp, pp = model.workers.dp, model.workers.pp
    make = WorkerPool if dp == 1 else partial(Replicas, dp=dp)
    service = EmbeddingService(
        model.tokenizer, partial(make, **plan.pool), plan.limits, in_flight=dp * (pp + 1)
    )
    folder = model.folder
    served = ServedModel(
        plan.name, folder.bert.hidden_size, folder.max_length, folder.bert.vocab_size
    )
    return EmbeddingApp(
        service, served, api_key=plan.api_key, truncate=plan.truncate, on_failure=on_failure
    )


def _completion_app(
    plan: ServePlan, model: DecoderModel, on_failure: Callable[[], None]
) -> CompletionApp:
    service = CompletionService(model.text, partial(WorkerPool, **plan.pool), plan.limits)
    config = model.folder.config
    served = ServedModel(plan.name, config.hidden_size, model.context, config.vocab_size)
    return CompletionApp(service, served, api_key=plan.api_key, on_failure=on_failure)


def _web_config(
    plan: ServePlan, app: EmbeddingApp | CompletionApp, shares: descriptors.Shares
) -> uvicorn.Config:
    metrics = app.service.metrics
    own_names = Middleware(TrustedHosts, names=names_of(plan.host), failed=metrics.fail)
    keyless = plan.api_key is None  # then the host is a loopback address
    return uvicorn.Config(
        app.app(own_names) if keyless else app.app(),
        http=TimedConnection.within(ConnectionLimits(shares.connections, refused=metrics.refuse)),
        ws="none",
        backlog=shares.accepts,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
    )
