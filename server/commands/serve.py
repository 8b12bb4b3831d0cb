"""Serve embeddings, or completions and chats, over HTTP, from parallel pools of workers."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from .. import spans
from ..config import PACKAGED_NAME, ServiceLimits
from ..hosts.place import Hosts
from ..launchers.ray_actors import RayCluster
from ..service import listener, logs
from .read_options import (
    DecoderModel,
    HeadlessPlan,
    Model,
    ServePlan,
    decoder_path,
    read_decoder,
    read_hosts,
    read_model,
    run_headless,
)

if TYPE_CHECKING:
    import argparse


PACKAGES = ("prometheus_client", "safetensors", "starlette", "tokenizers", "uvicorn")
_COUNTS = (
    *("max_batch_tokens", "max_waiting", "max_connections", "max_restarts"),
    *("slots", "context"),
)
_TIMEOUTS = ("start", "request", "stall", "drain", "silence")
_LONGEST_KEY = 4096
"""Maximum characters of a key; the file of a key may be endless."""


def prepare(args: argparse.Namespace) -> ServePlan | HeadlessPlan:
    """Check the options and the model; of a headless host only its host options."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ImportError(f"install the extras 'server' and 'demo': no {', '.join(missing)}")
    _check_times(args)
    hosts = read_hosts(args)
    if isinstance(hosts, Hosts) and not hosts.is_head:
        return HeadlessPlan(hosts, args.start_timeout)
    host, port = listener.parse(args.http)
    api_key = _api_key(args.api_key)
    if not listener.is_loopback(host) and api_key is None:
        raise ValueError(f"--http {args.http} is beyond loopback: give --api-key as well")
    _check_counts(args)
    if args.max_restarts is not None and args.restart == "never":
        raise ValueError("--max-restarts is for a service that restarts workers: give --restart")
    if args.spans is not None:
        spans.check_exporter(args.spans)
    model = _read_model(args, _n_hosts(args, hosts))
    pool = {
        **model.arguments(args.start_timeout, args.spans),
        "restart": args.restart,
        "max_restarts": args.max_restarts,
        "stuck_after": args.stuck_after,
    }
    if hosts is not None:
        pool |= {"launcher": "hosts" if isinstance(hosts, Hosts) else "ray", "hosts": hosts}
    return ServePlan(
        model=model,
        pool=pool,
        limits=ServiceLimits(
            model.batch_tokens, args.max_waiting, args.request_timeout, args.stall_timeout
        ),
        name=args.served_name or (args.model.resolve().name if args.model else PACKAGED_NAME),
        host=host,
        port=port,
        api_key=api_key,
        max_connections=args.max_connections,
        truncate=args.truncate,
        access_log=args.access_log,
        log_json=args.log_json,
        spans=args.spans,
        drain_timeout=args.drain_timeout,
    )


def _check_times(args: argparse.Namespace) -> None:
    for name in ("stuck_after", *(f"{what}_timeout" for what in _TIMEOUTS)):
        seconds = getattr(args, name)
        if seconds is not None and not 0 < seconds < math.inf:
            raise ValueError(
                f"{_option(name)} must be a finite number of seconds, more than 0; got {seconds}"
            )


def _check_counts(args: argparse.Namespace) -> None:
    for name in _COUNTS:
        count = getattr(args, name)
        if count is not None and count < 1:
            raise ValueError(f"{_option(name)} must be at least 1; got {count}")


def run(plan: ServePlan | HeadlessPlan) -> int:
    """Serve until SIGTERM, then finish accepted requests; a headless host runs workers.

    Returns:
        0; 1 if accepted requests were abandoned: at a second signal, or after the drain timeout.

    Raises:
        CoordinatorError: the workers did not start, or the pool has broken.
        OSError: the address cannot be bound.
        KeyboardInterrupt: SIGINT ended the service.
    """
    if isinstance(plan, HeadlessPlan):
        logs.configure("off")
        listener.raise_limit()
        return run_headless(plan.hosts, plan.start_timeout)
    from .served import serve  # noqa: PLC0415 - its imports need the extra 'server'

    return serve(plan)


def _read_model(args: argparse.Namespace, nnodes: int) -> Model | DecoderModel:
    path = decoder_path(args.model)
    if path is None:
        if args.slots is not None or args.context is not None:
            raise ValueError("--slots and --context are for models that complete and chat")
        return read_model(args, nnodes, args.max_batch_tokens)
    if args.truncate:
        raise ValueError("--truncate is for models that embed")
    return read_decoder(args, path, nnodes)


def _n_hosts(args: argparse.Namespace, hosts: Hosts | RayCluster | None) -> int:
    """Return the number of hosts that share the workers; with Ray, one per stage."""
    if hosts is None:
        return 1
    return hosts.nnodes if isinstance(hosts, Hosts) else int(args.pp)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _api_key(given: str | None) -> str | None:
    if given is None:
        return None
    key = given
    if given.startswith("@"):
        with Path(given[1:]).open(encoding="utf-8") as file:
            key = file.read(_LONGEST_KEY + 2)  # a line end, and one character too many
        if len(key) <= _LONGEST_KEY + 1:
            key = key.strip()
    plain = key.isascii() and key.isprintable() and " " not in key
    if not plain or not 1 <= len(key) <= _LONGEST_KEY:
        allowed = f"1 to {_LONGEST_KEY} printable ASCII characters, no spaces"
        raise ValueError(f"--api-key must be {allowed}")
    return key
