"""Reads the options of `serve` that say which hosts there are, and which of them this one is."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..hosts.host_supervisor import serve_host
from ..hosts.place import Hosts
from ..launchers.ray_actors import RayCluster

if TYPE_CHECKING:
    import argparse


def read_hosts(args: argparse.Namespace) -> Hosts | RayCluster | None:
    """The hosts that the options name, or else the launcher; ``None``: this one alone.

    Raises:
        ValueError: they do not say who is who, or contradict each other.
        SecretError: there is no secret that all hosts have.
        ImportError: Ray is to find the hosts, and is not installed.
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
        raise ValueError(f"--launcher {launcher} says itself which hosts there are, so name none")
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
        raise ValueError("--headless: this is host 0, the one that serves")
    facts = {
        f"--{name}": str(getattr(args, name))
        for name, default in args.defaults.items()
        if getattr(args, name) != default
    }
    return replace(hosts, facts=facts, **silence)


def run_headless(hosts: Hosts, timeout: float) -> int:
    """Run this host's workers until the pool is shut down; SIGTERM ends them at once.

    Raises:
        HostError: the head did not come, refused this host, or was lost.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    serve_host(hosts, timeout)
    return 0
