"""Serve sentence embeddings over HTTP, from a tensor- and pipeline-parallel pool of workers."""

from __future__ import annotations

import ipaddress
import math
import signal
import socket
import sys
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from server import model_options
from server.model_options import Model, read_model
from server.openai_api import MAX_INPUTS

if TYPE_CHECKING:
    import argparse

PACKAGES = ("prometheus_client", "safetensors", "starlette", "tokenizers", "uvicorn")
PACKAGED_NAME = "all-MiniLM-L6-v2"
_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep unused connections: else they ask just as the server closes one."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A server that has been checked: see `add_arguments`."""

    model: Model
    name: str
    host: str
    port: int
    api_key: str | None
    max_batch: int
    max_waiting: int
    timeout: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    model_options.add_arguments(parser, tp=1, pp=1)
    add("--served-name", metavar="NAME", help="the model's name in requests "
        f"(default: the name of its folder, or {PACKAGED_NAME})")  # fmt: skip
    add("--http", default="127.0.0.1:8000", metavar="HOST:PORT", help="where to listen "
        "(default 127.0.0.1:8000; port 0: any free one)")  # fmt: skip
    add("--api-key", metavar="KEY", help="what requests have to show; needed beyond loopback. "
        "@FILE: read it from there, so that no list of processes shows it")  # fmt: skip
    add("--max-batch", type=int, default=32, metavar="N", help="inputs computed at once (default "
        "32)")  # fmt: skip
    add("--max-waiting", type=int, default=2 * MAX_INPUTS, metavar="N", help="inputs that may "
        f"wait before requests get 429 (default {2 * MAX_INPUTS})")  # fmt: skip
    add("--timeout", type=float, default=300.0, metavar="S", help="seconds for the workers to "
        "start, for each batch, and to finish at the end (default 300)")  # fmt: skip


def prepare(args: argparse.Namespace) -> Plan:
    """Check the options and the model.

    Raises:
        ValueError, OSError, ImportError, CheckpointError: something is wrong; the text says
            what, in one line.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ImportError(f"install the extras 'server' and 'demo': no {', '.join(missing)}")
    host, port = _address(args.http)
    api_key = _api_key(args.api_key)
    if not _is_loopback(host) and api_key is None:
        raise ValueError(f"--http {args.http} is beyond loopback: give --api-key as well")
    for option, value in (("--max-batch", args.max_batch), ("--max-waiting", args.max_waiting)):
        if value < 1:
            raise ValueError(f"{option} must be at least 1; got {value}")
    if not args.timeout > 0:
        raise ValueError(f"--timeout must be more than 0 seconds; got {args.timeout}")
    return Plan(
        model=read_model(args),
        name=args.served_name or (args.model.resolve().name if args.model else PACKAGED_NAME),
        host=host,
        port=port,
        api_key=api_key,
        max_batch=args.max_batch,
        max_waiting=args.max_waiting,
        timeout=args.timeout,
    )


def run(plan: Plan) -> int:
    """Serve until SIGTERM, then finish what was accepted.

    Returns:
        0; 1 if a second signal came, and what was unfinished was given up.

    Raises:
        CoordinatorError: the workers did not start.
        OSError: the address cannot be bound.
        KeyboardInterrupt: it was interrupted, which is otherwise as SIGTERM.
    """
    import uvicorn  # noqa: PLC0415

    from server.http import Face  # noqa: PLC0415
    from server.service import EmbeddingService  # noqa: PLC0415
    from server.web_server import WebServer  # noqa: PLC0415

    service = EmbeddingService(
        plan.model.folder,
        partial(plan.model.start_pool, plan.timeout, batch_size=plan.max_batch),
        max_batch=plan.max_batch,
        max_waiting=plan.max_waiting,
        in_flight=plan.model.pp + 1,
        call_timeout=plan.timeout,
    )

    def end() -> None:
        server.should_exit = True

    def drop_connections() -> None:
        server.force_exit = True

    config = uvicorn.Config(
        Face(service, plan.name, plan.api_key, end).app(),
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="on",
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=math.ceil(plan.timeout),
    )
    server = WebServer(config, lambda: service.give_up(drop_connections))
    with server.hear_signals(), listen(plan.host, plan.port) as listener:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        sys.stdout.write(f"serving {plan.name} at http://{shown}:{port}\n")
        sys.stdout.flush()
        server.run(sockets=[listener])
    if service.start_failure is not None:
        raise service.start_failure
    if signal.SIGINT in server.heard:
        raise KeyboardInterrupt
    return 0 if len(server.heard) < 2 else 1


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Args:
        host: a name or an address.
        port: 0: any free one.

    Raises:
        OSError: the address cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"cannot listen at {host}, port {port}: {error.strerror}") from error
    # Connections inherit it. asyncio sets it only for listeners of its own, and without it the end
    # of each answer waits 40 ms for the client to acknowledge the beginning.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"--http must be HOST:PORT; got {text!r}")
    return host.strip("[]"), int(port)


def _api_key(given: str | None) -> str | None:
    if given is None:
        return None
    key = given
    if given.startswith("@"):
        key = Path(given[1:]).read_text(encoding="utf-8").strip()
    if not key.isascii() or not key.isprintable() or not key or " " in key:
        raise ValueError("--api-key must be one or more printable ASCII characters, no spaces")
    return key


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
