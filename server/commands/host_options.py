"""The options of `serve` that say which hosts there are, and which of them this one is."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from ..hosts.host_supervisor import serve_host
from ..hosts.place import DEFAULT_PORT, LAUNCHERS, SILENCE_SECONDS, Hosts
from ..launchers.ray_actors import RayCluster

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
    add("--master-port", type=int, metavar="PORT", help=f"its port (default {DEFAULT_PORT})")
    add("--silence-timeout", type=float, default=SILENCE_SECONDS, metavar="S", help="seconds "
        "without a word after which another host counts as lost; more where hosts stand still "
        f"at times (default {SILENCE_SECONDS})")  # fmt: skip
    add("--headless", action="store_true", help="this host serves nothing, and runs workers for "
        "the one that does: as every host but 0")  # fmt: skip


def read_hosts(args: argparse.Namespace) -> Hosts | RayCluster | None:
    """The hosts that the options name, or else the launcher; ``None``: this one alone.

    Raises:
        ValueError: they do not say who is who, or contradict each other.
        SecretError: there is no secret that all hosts have.
    """
    given = (args.nnodes, args.node_rank, args.master_addr)
    several = args.headless or any(value is not None for value in given)
    launcher = args.launcher or ("hosts" if several else "local")
    if launcher == "local":
        if several:
            raise ValueError("--launcher local: this host is alone, but options name others")
        return None
    if launcher == "ray":
        if several:
            raise ValueError("--launcher ray: Ray says which hosts there are, so name none")
        return RayCluster()
    hosts = Hosts.of_torchrun() if launcher == "torchrun" else Hosts.read(*given, args.master_port)
    if args.headless and hosts.is_head:
        raise ValueError("--headless: this is host 0, the one that serves")
    if args.dp != 1:
        raise ValueError(f"--dp must be 1 over several hosts; got {args.dp}")
    facts = {
        f"--{name}": str(getattr(args, name))
        for name, default in args.defaults.items()
        if getattr(args, name) != default
    }
    return replace(hosts, facts=facts, silence_seconds=args.silence_timeout)


def run_headless(hosts: Hosts, timeout: float) -> int:
    """Run this host's workers until the pool is shut down; SIGTERM ends them at once.

    Raises:
        HostError: the head did not come, refused this host, or was lost.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    serve_host(hosts, timeout)
    return 0
