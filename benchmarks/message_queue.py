"""Our message queue beside others: python -m benchmarks.message_queue [--quick] [--peers DIR]."""

from __future__ import annotations

import math
import os
import sys
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.child import PeerError
from benchmarks.futex import Futex
from benchmarks.harness import Figure, Report, machine, parser
from benchmarks.peers import Peers
from benchmarks.queue_base import BUSY_WORKS, WORKS
from benchmarks.queue_systems import SYSTEMS
from benchmarks.remote import Local, Remote

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from benchmarks.queue_base import System

VLLM: dict[str, tuple[str, ...]] = {"vLLM": WORKS, "vLLM (arena)": BUSY_WORKS, "SGLang": WORKS}
ICEORYX: dict[str, tuple[str, ...]] = {
    "iceoryx2 (polling)": ("echo", "flood"),
    "iceoryx2 (event)": ("echo", "flood", "idle_cpu", "wake"),
}
HERE: tuple[type[System], ...] = (*SYSTEMS, Futex)
LARGE = ("1MiB", "16MiB", "64MiB", "256MiB")
MOST_SECONDS = 3.0
"""What a system may take for a figure before it gets no more repeats."""


def start_peer(peers: Peers, name: str, n_readers: int) -> Remote:
    """Start a queue that is in a child, without waiting for it.

    Raises:
        PeerError: it is not there.
    """
    if name in VLLM:
        child = peers.vllm(name, "benchmarks.queue_peers", stopped=True)
        return Remote(name, child, n_readers, VLLM[name])
    polls = "wake" not in ICEORYX[name]  # its events do not survive being stopped
    child = peers.package("iceoryx2", "benchmarks.queue_iceoryx", stopped=polls)
    return Remote(name, child, n_readers, ICEORYX[name], carries_tensors=False)


def start_all(
    report: Report, options: argparse.Namespace, n_readers: int, only: Sequence[str] = ()
) -> list[Local | Remote]:
    """Start every system that is there, or those of them that are asked for; name the missing."""
    peers, theirs = Peers(options.peers), []
    for name in (*VLLM, *ICEORYX):
        if not only or name in only:
            try:
                theirs.append(start_peer(peers, name, n_readers))
            except PeerError as error:
                report.left_out[name] = str(error)
    ours = [system for system in HERE if not only or system.name in only]
    running: list[Local | Remote] = [Local(system(), n_readers) for system in ours]
    return running + started(report, theirs)


def started(report: Report, theirs: Sequence[Remote]) -> list[Remote]:
    """Those of the peers whose readers are there in the end; name the others."""
    running = []
    for peer in theirs:
        try:
            peer.wait_started()
        except PeerError as error:
            report.left_out[peer.name] = str(error)
            peer.stop()
        else:
            running.append(peer)
    return running


def run(report: Report, options: argparse.Namespace, n_readers: int) -> None:
    """All work with ``n_readers`` readers."""
    quick = options.quick
    running = start_all(report, options, n_readers)
    figures: list[Figure] = []

    def plan(
        work: str,
        payload: str | None,
        *arguments: Any,
        label: str = "",
        unit: str = "us",
        repeats: int = 1 if quick else 5,
        warm_up: bool = True,
    ) -> None:
        params = f"{label or payload or ''}, {n_readers} reader{'s' * (n_readers > 1)}"
        if options.only not in f"{work} {params}":
            return
        large = payload in LARGE

        def asking(system: Local | Remote) -> Callable[[], list[float]]:
            return lambda: system.ask(work, payload, *arguments)

        takes_part = {
            each.name: asking(each)
            for each in running
            if work in each.works and (each.carries_tensors or not large)
        }
        seconds = MOST_SECONDS if warm_up else math.inf
        figures.append(Figure(work, params, takes_part, unit, repeats, warm_up, seconds))

    try:
        count = 300 if quick else 3000
        plan("echo", "dict", count)
        plan("echo", "ints", count)
        plan("flood", "dict", 2000 if quick else 20000)
        for size in LARGE[: 2 if quick else 4]:
            plan("one_way", size, 3 if quick or size == "256MiB" else 8, unit="ms")
        if n_readers == 1:
            idle = 0.5 if quick else 5.0
            plan("wake", "dict", idle, 1, label="after idling", warm_up=False)
            idle, label = (1.0 if quick else 10.0), "share of a core"
            plan("idle_cpu", None, idle, label=label, unit="%", repeats=2, warm_up=False)
        report.measure(*figures)
    finally:
        for system in running:
            system.stop()


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__ or "").parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    report = Report(machine(), file=options.json)
    for n_readers in (1, 3):
        run(report, options, n_readers)
    report.finish(options)
    sys.exit(0)


if __name__ == "__main__":
    main()
