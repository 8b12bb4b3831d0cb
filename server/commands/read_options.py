"""Read the options of `serve`: model, workers, hosts, and the plan of a service."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import (
    BATCH_TOKENS,
    CHUNK_TOKENS,
    CONTEXT,
    PACKAGED_DECODER,
    SLOTS,
    PoolConfig,
    ServiceLimits,
)
from ..driver.binding import (
    MOST_THREADS,
    assign,
    bound_here,
    count_gpus,
    share_of_a_host,
    worker_threads,
)
from ..hosts.host_supervisor import serve_host
from ..hosts.place import Hosts
from ..launchers.ray_actors import RayCluster
from ..workers.decoder import DecoderFolder, DecoderText, DecoderWorker, is_decoder, smollm2
from ..workers.minilm import MiniLMWorker, ModelFolder, SentenceTokenizer, packaged_model

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Checked options about workers of any kind; see `options.shared_options`."""

    dp: int
    tp: int
    pp: int
    device: str
    share_gpu: bool
    dtype: str
    threads: int
    bind: str

    @classmethod
    def read(cls, args: argparse.Namespace, nnodes: int = 1) -> WorkerOptions:
        """Check the options; ``nnodes``: number of hosts that share the workers."""
        if args.threads is not None and not 1 <= args.threads <= MOST_THREADS:
            raise ValueError(f"--threads must be 1 to {MOST_THREADS}; got {args.threads}")
        if args.dp < 1:
            raise ValueError(f"--dp must be at least 1; got {args.dp}")
        n_workers = args.dp * args.tp * args.pp
        assign(args.device, n_workers, count_gpus(args.device), args.share_gpu)
        shared = max(share_of_a_host(n_workers, nnodes), 1)
        return cls(
            dp=args.dp,
            tp=args.tp,
            pp=args.pp,
            device=args.device,
            share_gpu=args.share_gpu,
            dtype=args.dtype,
            threads=args.threads or worker_threads(shared, bound_here(args.bind, shared)),
            bind=args.bind,
        )

    def pool_arguments(
        self, worker: type, folder: Path, timeout: float, spans: str | None, **more: Any
    ) -> dict[str, Any]:
        """Return the arguments for `WorkerPool` or `Replicas`; ``more``: those of ``worker``."""
        options = {"model": str(folder), "threads": self.threads, "dtype": self.dtype}
        return {
            "worker": worker,
            "tp": self.tp,
            "pp": self.pp,
            "worker_kwargs": {**options, **more},
            "device": self.device,
            "share_gpu": self.share_gpu,
            "start_timeout": timeout,
            "config": PoolConfig(preload=(worker.__module__,), spans=spans, bind=self.bind),
        }


@dataclass(frozen=True, slots=True)
class Model:
    """Embedding model, its tokenizer and workers; ``batch_tokens`` are computed at once."""

    folder: ModelFolder
    tokenizer: SentenceTokenizer
    workers: WorkerOptions
    batch_tokens: int

    def arguments(self, timeout: float, spans: str | None = None) -> dict[str, Any]:
        """Return the arguments for a pool; see `WorkerOptions.pool_arguments`."""
        return self.workers.pool_arguments(
            *(MiniLMWorker, self.folder.path, timeout, spans), batch_tokens=self.batch_tokens
        )


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """Decoder model, its tokenizer and workers.

    Attributes:
        batch_tokens: tokens computed at once.
        slots: sequences computed at once.
        context: maximum tokens of a sequence.
    """

    folder: DecoderFolder
    text: DecoderText
    workers: WorkerOptions
    batch_tokens: int
    slots: int
    context: int

    def arguments(self, timeout: float, spans: str | None = None) -> dict[str, Any]:
        """Return the arguments for a pool; see `WorkerOptions.pool_arguments`."""
        return self.workers.pool_arguments(
            *(DecoderWorker, self.folder.path, timeout, spans),
            slots=self.slots,
            length=self.context,
        )


def read_model(args: argparse.Namespace, nnodes: int = 1, batch_tokens: int | None = None) -> Model:
    """Check the options about an embedding model, and its folder."""
    workers = WorkerOptions.read(args, nnodes)
    folder = ModelFolder.open(args.model or packaged_model())
    folder.bert.check_parallel(args.tp, args.pp)
    return Model(folder, SentenceTokenizer(folder), workers, batch_tokens or BATCH_TOKENS)


def decoder_path(given: Path | None) -> Path | None:
    """Return the folder of the decoder that ``--model`` names; ``None``: another model."""
    if given == Path(PACKAGED_DECODER) and not given.exists():
        return smollm2()
    return given if given is not None and is_decoder(given) else None


def read_decoder(args: argparse.Namespace, path: Path, nnodes: int = 1) -> DecoderModel:
    """Check the options about a decoder, and its folder ``path``."""
    workers = WorkerOptions.read(args, nnodes)
    folder = DecoderFolder.open(path)
    folder.config.check_parallel(args.tp, args.pp)
    if args.dp != 1:
        raise ValueError(f"--dp must be 1 with a model that completes; got {args.dp}")
    if args.context == 1:
        raise ValueError("--context must be at least 2: a token of the prompt, one of the answer")
    context = min(args.context or CONTEXT, folder.config.max_position_embeddings)
    text, slots = DecoderText(folder), args.slots or SLOTS
    batch_tokens = args.max_batch_tokens or CHUNK_TOKENS
    if batch_tokens < slots:
        raise ValueError(f"--max-batch-tokens must be at least {slots}, the slots")
    return DecoderModel(folder, text, workers, batch_tokens, slots, context)


def read_hosts(args: argparse.Namespace) -> Hosts | RayCluster | None:
    """Return the hosts or the Ray cluster that the options name; ``None``: this host alone.

    Raises:
        ValueError: the options are incomplete or contradictory.
        SecretError: the hosts share no secret.
        ImportError: Ray is not installed.
    """
    given = (args.nnodes, args.node_rank, args.master_addr)
    named = any(value is not None for value in given)
    launcher = args.launcher or ("hosts" if named or args.headless else "local")
    if launcher == "local":
        if named or args.headless:
            raise ValueError("--launcher local: this host is alone, but options name others")
        for name in ("master_port", "silence_timeout"):
            if getattr(args, name) is not None:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} is for several hosts, and no other option names any")
        return None
    if args.dp != 1:
        raise ValueError(f"--dp must be 1 over several hosts; got {args.dp}")
    if launcher != "hosts" and (named or args.master_port is not None):
        raise ValueError(
            f"--launcher {launcher} defines the hosts itself: give none of --nnodes, --node-rank, "
            "--master-addr, --master-port"
        )
    silence: dict[str, Any] = {}
    if args.silence_timeout is not None:
        silence["silence_seconds"] = args.silence_timeout
    if launcher == "ray":
        if args.headless:
            raise ValueError("--launcher ray: Ray starts the others, so none is --headless")
        if find_spec("ray") is None:
            raise ImportError("--launcher ray: install the extra 'ray'")
        return RayCluster(**silence)
    hosts = Hosts.of_torchrun() if launcher == "torchrun" else Hosts.read(*given, args.master_port)
    if args.headless and hosts.is_head:
        raise ValueError("--headless: this is host 0, which serves")
    facts = {
        f"--{name}": str(getattr(args, name))
        for name, default in args.defaults.items()
        if getattr(args, name) != default
    }
    return replace(hosts, facts=facts, **silence)


def run_headless(hosts: Hosts, timeout: float) -> int:
    """Run this host's workers until the pool is shut down; SIGTERM ends them at once.

    Raises:
        HostError: host 0 did not answer, refused this host, or was lost.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    serve_host(hosts, timeout)
    return 0


@dataclass(frozen=True, slots=True)
class ServePlan:
    """Checked options of a server; ``pool``: arguments for the pool, or for each replica."""

    model: Model | DecoderModel
    pool: dict[str, Any]
    limits: ServiceLimits
    name: str
    host: str
    port: int
    api_key: str | None
    max_connections: int
    truncate: bool
    access_log: str
    log_json: bool
    spans: str | None
    drain_timeout: float


@dataclass(frozen=True, slots=True)
class HeadlessPlan:
    """Checked options of a host that runs workers for host 0."""

    hosts: Hosts
    start_timeout: float
