"""Serve a model over HTTP: check the options, then run workers, service and web server."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from .. import spans
from ..config import (
    BATCH_TOKENS,
    CHUNK_TOKENS,
    CONTEXT,
    PACKAGED_DECODER,
    PACKAGED_NAME,
    SLOTS,
    PoolConfig,
    ServiceLimits,
)
from ..driver.binding import assign, bound_here, count_gpus, share_of_a_host
from ..hosts.host_supervisor import serve_host
from ..hosts.place import Hosts
from ..launchers.ray_cluster import RayCluster
from ..pool import WorkerPool
from ..replicas import Replicas
from ..service import listener, logs
from ..service.api import ServedModel
from ..service.app import names_of
from ..service.completions import CompletionApp, CompletionService
from ..service.embeddings import EmbeddingApp, EmbeddingService
from ..service.web_server import WebServer
from ..workers.decoder import DecoderFolder, DecoderText, DecoderWorker, is_decoder, smollm2
from ..workers.minilm import MiniLMWorker, ModelFolder, SentenceTokenizer, packaged_model
from .options import ServeOptions, option_name
from .progress import ProgressBar

_SAME: Final = ("model", "tp", "pp", "device", "dtype")
"""Options that must be the same on all hosts."""


@dataclass(frozen=True, slots=True)
class ServePlan:
    """A checked service.

    Attributes:
        options: the options of the command.
        app: the application; on a headless host the hosts.
        pool: the arguments of the pool, or of `Replicas`.
    """

    options: ServeOptions
    app: EmbeddingApp | CompletionApp | Hosts
    pool: dict[str, Any] = field(default_factory=dict)


def prepare(options: ServeOptions) -> ServePlan:
    """Check the hosts and the model; of a headless host only the hosts.

    Raises:
        ValueError: the options contradict each other, the hosts or the model.
        SecretError: the hosts share no secret.
        ImportError: Ray is not installed.
    """
    hosts = read_hosts(options)
    if isinstance(hosts, Hosts) and not hosts.is_head:
        return ServePlan(options, hosts)
    path = decoder_path(options.model)
    if path is None:
        return _embeddings(options, hosts)
    return _completions(options, hosts, path)


def run(plan: ServePlan) -> int:
    """Serve until SIGTERM, then finish accepted requests; a headless host runs workers.

    Returns:
        0; 1 if accepted requests were abandoned: at a second signal, or after the drain timeout.

    Raises:
        CoordinatorError: the workers did not start, or the pool has broken.
        HostError: host 0 did not answer, refused this host, or was lost.
        OSError: the address cannot be bound.
        KeyboardInterrupt: SIGINT ended the service.
    """
    options, app = plan.options, plan.app
    logs.configure(options.access_log, as_json=options.log_json)
    spans.record()
    listener.raise_limit()
    if isinstance(app, Hosts):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        serve_host(app, options.start_timeout)
        return 0
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the workers use the cores
    service = app.service
    # Without a key, the host is a loopback address.
    asgi = app.app(names_of(options.host)) if options.api_key is None else app.app()
    server = WebServer(asgi, options.max_connections, service.give_up, options.drain_timeout)
    app.on_failure = partial(setattr, server, "should_exit", True)
    with server.handle_signals(), listener.listen(options.host, options.port) as listening:
        print(f"serving {app.model.name} at {listener.url(listening)}", flush=True)
        bar = plan.pool["on_progress"]
        bar.begin()
        service.on_ready = partial(bar.end, "ready; Ctrl-C stops the service")
        server.run(sockets=[listening])
    if service.failure is not None:
        raise service.failure
    if signal.SIGINT in server.received:
        raise KeyboardInterrupt
    return 1 if server.gave_up else 0


def read_hosts(options: ServeOptions) -> Hosts | RayCluster | None:
    """Return the hosts or the Ray cluster that the options name; ``None``: this host alone.

    Raises:
        ValueError: the options are incomplete or contradictory.
        SecretError: the hosts share no secret.
        ImportError: Ray is not installed.
    """
    given = (options.nnodes, options.node_rank, options.master_addr)
    named = any(value is not None for value in given) or options.headless
    launcher = options.launcher or ("hosts" if named else "local")
    if launcher == "local":
        if named:
            raise ValueError("--launcher local: this host is alone, but options name others")
        for name in ("master_port", "silence_timeout"):
            if getattr(options, name) is not None:
                raise ValueError(
                    f"{option_name(name)} is for several hosts, and no other option names any"
                )
        return None
    if options.dp != 1:
        raise ValueError(f"--dp must be 1 over several hosts; got {options.dp}")
    if launcher == "ray" and options.headless:
        raise ValueError("--launcher ray: Ray starts the others, so none is --headless")
    if launcher != "hosts" and (given != (None,) * 3 or options.master_port is not None):
        raise ValueError(
            f"--launcher {launcher} defines the hosts itself: give none of --nnodes, --node-rank, "
            "--master-addr, --master-port"
        )
    silence: dict[str, Any] = {}
    if options.silence_timeout is not None:
        silence["silence_seconds"] = options.silence_timeout
    if launcher == "ray":
        if find_spec("ray") is None:
            raise ImportError("--launcher ray: install the extra 'ray'")
        return RayCluster(**silence)
    torchrun = launcher == "torchrun"
    hosts = Hosts.of_torchrun() if torchrun else Hosts.read(*given, options.master_port)
    if options.headless and hosts.is_head:
        raise ValueError("--headless: this is host 0, which serves")
    facts = {
        option_name(each.name): str(getattr(options, each.name))
        for each in fields(options)
        if each.name in _SAME and getattr(options, each.name) != each.default
    }
    return replace(hosts, facts=facts, **silence)


def decoder_path(given: Path | None) -> Path | None:
    """Return the folder of the decoder that ``--model`` names; ``None``: another model."""
    if given == Path(PACKAGED_DECODER) and not given.exists():
        return smollm2()
    return given if given is not None and is_decoder(given) else None


def pool_arguments(
    options: ServeOptions, hosts: Hosts | RayCluster | None, worker: type, **worker_kwargs: Any
) -> dict[str, Any]:
    """Return the arguments for `WorkerPool` or `Replicas`; check devices and cores."""
    nnodes = 1
    if hosts is not None:  # with Ray, a host per stage
        nnodes = hosts.nnodes if isinstance(hosts, Hosts) else options.pp
    n_workers = options.dp * options.tp * options.pp
    assign(options.device, n_workers, count_gpus(options.device), options.share_gpu)
    bound_here(options.bind, max(share_of_a_host(n_workers, nnodes), 1))
    arguments: dict[str, Any] = {
        "worker": worker,
        "on_progress": ProgressBar(),
        "worker_kwargs": {"dtype": options.dtype, **worker_kwargs},
        "config": PoolConfig(
            threads=options.threads, bind=options.bind, preload=(worker.__module__,)
        ),
    }
    same = ("tp", "pp", "device", "share_gpu", "start_timeout")
    for name in (*same, "restart", "max_restarts", "stuck_after"):
        arguments[name] = getattr(options, name)
    if hosts is not None:
        launcher = "hosts" if isinstance(hosts, Hosts) else "ray"
        arguments |= {"launcher": launcher, "hosts": hosts}
    return arguments


def _embeddings(options: ServeOptions, hosts: Hosts | RayCluster | None) -> ServePlan:
    if (options.max_num_seqs, options.max_model_len) != (SLOTS, CONTEXT):
        raise ValueError("--max-num-seqs and --max-model-len are for models that complete and chat")
    folder = ModelFolder.open(options.model or packaged_model())
    bert, batch_tokens = folder.bert, options.max_num_batched_tokens or BATCH_TOKENS
    bert.check_parallel(options.tp, options.pp)
    arguments = {"model": str(folder.path), "batch_tokens": batch_tokens}
    pool = pool_arguments(options, hosts, MiniLMWorker, **arguments)
    dp, pp = options.dp, options.pp
    make = WorkerPool if dp == 1 else partial(Replicas, dp=dp)
    service = EmbeddingService(
        SentenceTokenizer(folder),
        partial(make, **pool),
        _limits(options, batch_tokens),
        in_flight=dp * (pp + 1),
    )
    served = ServedModel(_name(options), bert.hidden_size, folder.max_length, bert.vocab_size)
    app = EmbeddingApp(service, served, api_key=options.api_key, truncate=options.truncate)
    return ServePlan(options, app, pool)


def _completions(options: ServeOptions, hosts: Hosts | RayCluster | None, path: Path) -> ServePlan:
    if options.truncate:
        raise ValueError("--truncate is for models that embed")
    folder = DecoderFolder.open(path)
    config, slots = folder.config, options.max_num_seqs
    config.check_parallel(options.tp, options.pp)
    if options.dp != 1:
        raise ValueError(f"--dp must be 1 with a model that completes; got {options.dp}")
    if options.max_model_len == 1:
        raise ValueError(
            "--max-model-len must be at least 2: a token of the prompt, one of the answer"
        )
    length = min(options.max_model_len, config.max_position_embeddings)
    batch_tokens = options.max_num_batched_tokens or CHUNK_TOKENS
    if batch_tokens < slots:
        raise ValueError(f"--max-num-batched-tokens must be at least {slots}, as --max-num-seqs")
    arguments = {"model": str(folder.path), "slots": slots, "length": length}
    pool = pool_arguments(options, hosts, DecoderWorker, **arguments)
    limits = _limits(options, batch_tokens)
    name, make = _name(options), partial(WorkerPool, **pool)
    service = CompletionService(DecoderText(folder), make, limits, name)
    served = ServedModel(name, config.hidden_size, length, config.vocab_size)
    app = CompletionApp(service, served, api_key=options.api_key)
    return ServePlan(options, app, pool)


def _limits(options: ServeOptions, batch_tokens: int) -> ServiceLimits:
    return ServiceLimits(
        batch_tokens, options.max_waiting, options.request_timeout, options.stall_timeout
    )


def _name(options: ServeOptions) -> str:
    folder = PACKAGED_NAME if options.model is None else options.model.resolve().name
    return options.served_model_name or folder
