"""The options of ``serve`` that say which hosts there are, and which of them this one is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...defaults import HEAD_PORT, HOST_SILENCE_SECONDS, LAUNCHERS, RAY_SILENCE_SECONDS

if TYPE_CHECKING:
    import argparse

_SAME = ("model", "tp", "pp", "device", "dtype")
"""Options that have to be the same on all hosts that are given them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
