"""What a pool's calls are measured beside: vLLM's executor, and actors of Ray and Monarch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.child import PeerError
from benchmarks.message_queue import started
from benchmarks.peers import Peers
from benchmarks.remote import Remote

if TYPE_CHECKING:
    import argparse

    from benchmarks.child import Child
    from benchmarks.harness import Report

WORKERS = 2
REQUEST: list[Any] = ["no_op", [], {}, None]
"""What vLLM's executor sends for a call that does nothing."""
EXECUTOR = "vLLM's executor loop"
ACTORS = {
    "Ray actors": "ray",
    "Ray's compiled graph": "ray",
    "Monarch actors": "torchmonarch",
}
"""Systems of `benchmarks.call_peers`, and the package of each."""


def executor(report: Report, options: argparse.Namespace) -> dict[str, Remote]:
    """vLLM's queue, as its executor; nothing if it is not there."""
    try:
        child = Peers(options.peers).vllm(EXECUTOR, "benchmarks.queue_peers", stopped=True)
        remote = Remote("vLLM", child, WORKERS)
    except PeerError as error:
        report.left_out[EXECUTOR] = str(error)
        return {}
    return dict(zip([EXECUTOR], started(report, [remote]), strict=False))


def actors(report: Report, options: argparse.Namespace) -> dict[str, Remote]:
    """The actors that are there; those of one package in one child."""
    peers, theirs = Peers(options.peers), []
    children: dict[str, Child] = {}
    for name, package in ACTORS.items():
        try:
            if package not in children:
                children[package] = peers.package(package, "benchmarks.call_peers")
            theirs.append(Remote(name, children[package], WORKERS))
        except PeerError as error:
            report.left_out[name] = str(error)
    return {each.name: each for each in started(report, theirs)}
