"""Serve embeddings, or completions and chats, over HTTP, from parallel pools of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...config import (
    BATCH_TOKENS,
    CHUNK_TOKENS,
    CONTEXT,
    MAX_INPUTS,
    MAX_RESTARTS,
    PACKAGED_DECODER,
    PACKAGED_NAME,
    RESTARTS,
    SLOTS,
)
from ...service.logs import ACCESS_MODES
from . import shared_options

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    decoders = f"; or a Llama-type folder, or {PACKAGED_DECODER}: serves completions and chats"
    shared_options.add_model_arguments(parser, tp=1, pp=1, more=decoders)
    add("--slots", type=int, metavar="N", help="completions: answers computed at once "
        f"(default {SLOTS})")  # fmt: skip
    add("--context", type=int, metavar="N", help="completions: tokens of a prompt and its answer "
        f"(default {CONTEXT}, or the model's maximum)")  # fmt: skip
    add("--dp", type=int, default=1, metavar="N", help="replicas of the model (default 1)")
    shared_options.add_host_arguments(parser)
    add("--served-name", metavar="NAME", help="the model's name in requests "
        f"(default: the name of its folder, or {PACKAGED_NAME})")  # fmt: skip
    add("--http", default="127.0.0.1:8000", metavar="HOST:PORT", help="where to listen "
        "(default 127.0.0.1:8000; port 0: any free one)")  # fmt: skip
    add("--api-key", metavar="KEY", help="key that requests must send; required beyond "
        "loopback. @FILE: read the key from a file, hidden from process lists")  # fmt: skip
    add("--max-batch-tokens", type=int, metavar="N", help="tokens computed at once (default "
        f"{BATCH_TOKENS}; for completions {CHUNK_TOKENS})")  # fmt: skip
    add("--max-waiting", type=int, default=2 * MAX_INPUTS, metavar="N", help="inputs that may "
        f"wait before requests get 429 (default {2 * MAX_INPUTS})")  # fmt: skip
    add("--max-connections", type=int, default=1000, metavar="N", help="open connections above "
        "which requests get 503 (default 1000)")  # fmt: skip
    add("--truncate", action="store_true", help="cut inputs that are too long, unless a "
        "request sets truncate (default: reject them)")  # fmt: skip
    add("--access-log", choices=ACCESS_MODES, default="off", help="a line on stdout for each "
        "request (default off)")  # fmt: skip
    add("--log-json", action="store_true", help="log JSON lines to stderr, with rank and "
        "generation, from level INFO")  # fmt: skip
    add("--spans", metavar="EXPORTER", help="record OpenTelemetry spans of requests, batches and "
        "workers: console, or an installed exporter such as otlp (default: none)")  # fmt: skip
    add("--restart", choices=RESTARTS, default="never", help="when a worker is lost: end the "
        "service, replace the worker, or replace all workers (default never)")  # fmt: skip
    add("--max-restarts", type=int, metavar="N", help="with --restart: restarts within a minute "
        f"before the service ends (default {MAX_RESTARTS})")  # fmt: skip
    add("--stuck-after", type=float, metavar="S", help="seconds for a batch after which its "
        "workers count as lost (default: 300 with --restart, else never)")  # fmt: skip
    add("--start-timeout", type=float, default=300.0, metavar="S", help="seconds for the workers "
        "to start (default 300)")  # fmt: skip
    add("--request-timeout", type=float, default=60.0, metavar="S", help="seconds for a request, "
        "including its wait in the queue; for a completion, seconds per token; a batch has half "
        "of it (default 60)")  # fmt: skip
    add("--stall-timeout", type=float, default=10.0, metavar="S", help="seconds for a batch; then "
        "/ready and /health/progress fail until a batch is answered (default 10)")  # fmt: skip
    add("--drain-timeout", type=float, default=25.0, metavar="S", help="seconds after a signal to "
        "answer accepted requests; then they are abandoned (default 25: a pod has 30)")  # fmt: skip
