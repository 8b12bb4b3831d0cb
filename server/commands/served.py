"""Serve a model over HTTP: workers, service and web server."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial

from .. import spans
from ..pool import WorkerPool
from ..replicas import Replicas
from ..service import listener, logs
from ..service.api import ServedModel
from ..service.app import names_of
from ..service.completions import CompletionApp, CompletionService
from ..service.embeddings import EmbeddingApp, EmbeddingService
from ..service.web_server import WebServer
from .read_options import DecoderModel, Model, ServePlan


def serve(plan: ServePlan) -> int:
    """Serve until SIGTERM, then finish accepted requests; see `serve.run`."""
    logs.configure(plan.access_log, as_json=plan.log_json)
    if plan.spans is not None:
        spans.record(plan.spans)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers use the cores
    listener.raise_limit()

    def end() -> None:
        server.should_exit = True

    app = _app(plan, end)
    service = app.service
    # Without a key, the host is a loopback address.
    asgi = app.app(names_of(plan.host)) if plan.api_key is None else app.app()
    server = WebServer(asgi, plan.max_connections, service.give_up, plan.drain_timeout)
    with server.handle_signals(), listener.listen(plan.host, plan.port) as listening:
        print(f"serving {plan.name} at {listener.url(listening)}", flush=True)
        server.run(sockets=[listening])
    if service.failure is not None:
        raise service.failure
    if signal.SIGINT in server.received:
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
    service = CompletionService(
        model.text, partial(WorkerPool, **plan.pool), plan.limits, plan.name
    )
    config = model.folder.config
    served = ServedModel(plan.name, config.hidden_size, model.context, config.vocab_size)
    return CompletionApp(service, served, api_key=plan.api_key, on_failure=on_failure)
