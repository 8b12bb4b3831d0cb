"""Our message queue beside others: python -m benchmarks.message_queue [--quick] [--peers DIR]."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.futex import Futex
from benchmarks.harness import Report, machine, parser
from benchmarks.peers import Peers
from benchmarks.queue_base import WORKS, System, payload_for
from benchmarks.queue_systems import SYSTEMS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

QUEUES = ("vLLM", "vLLM (arena)", "SGLang")
HERE: tuple[type[System], ...] = (*SYSTEMS, Futex)
LARGE = ("1MiB", "16MiB", "64MiB", "256MiB")


class Remote:
    """A peer in its own interpreter, with the same face as `Local`."""

    def __init__(self, name: str, peers: Peers, n_readers: int) -> None:
        self.name = name
        self.carries_tensors = True
        self.works = WORKS
        self._child = peers.vllm(name, "benchmarks.queue_peers", stopped=True)
        self._child.tell({"do": "start", "system": name, "readers": n_readers})

    def wait_started(self) -> None:
        self._child.answer()

    def ask(self, work: str, payload: str | None, *arguments: Any) -> list[float]:
        samples: list[float] = self._child.ask(
            {"do": work, "payload": payload, "arguments": arguments}
        )
        return samples

    def stop(self) -> None:
        self._child.ask({"do": "stop"})
        self._child.close()


class Local:
    """A system of this interpreter."""

    def __init__(self, system: System, n_readers: int) -> None:
        self.name = system.name
        self.carries_tensors = system.carries_tensors
        self.works = system.works
        self._system = system
        system.start(n_readers)

    def ask(self, work: str, payload: str | None, *arguments: Any) -> list[float]:
        given = () if payload is None else (payload_for(payload),)
        samples: list[float] = getattr(self._system, work)(*given, *arguments)
        return samples

    def stop(self) -> None:
        self._system.stop()


def start_all(report: Report, options: argparse.Namespace, n_readers: int) -> list[Local | Remote]:
    """Start every system that is there; name those that are not."""
    peers = Peers(options.peers)
    missing = peers.why_no_vllm()
    theirs = [] if missing else [Remote(name, peers, n_readers) for name in QUEUES]
    running: list[Local | Remote] = [Local(system(), n_readers) for system in HERE]
    if missing:
        report.left_out |= dict.fromkeys(QUEUES, missing)
    for peer in theirs:
        try:
            peer.wait_started()
        except (OSError, RuntimeError) as error:
            report.left_out[peer.name] = str(error)
        else:
            running.append(peer)
    return running


def run(report: Report, options: argparse.Namespace, n_readers: int) -> None:
    """All work with ``n_readers`` readers."""
    quick = options.quick
    running = start_all(report, options, n_readers)

    def measure(
        work: str,
        payload: str | None,
        *arguments: Any,
        label: str = "",
        unit: str = "us",
        repeats: int = 1 if quick else 3,
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
        report.measure(work, params, takes_part, unit=unit, repeats=repeats, warm_up=warm_up)

    try:
        count = 300 if quick else 3000
        measure("echo", "dict", count)
        measure("echo", "ints", count)
        measure("flood", "dict", 2000 if quick else 20000)
        for size in LARGE[: 2 if quick else 4]:
            measure("one_way", size, 3 if quick or size == "256MiB" else 8, unit="ms")
        if n_readers == 1:
            idle = 0.5 if quick else 5.0
            measure("wake", "dict", idle, 3, label="after idling", repeats=1, warm_up=False)
            idle = 1.0 if quick else 20.0
            label = "share of a core"
            measure("idle_cpu", None, idle, label=label, unit="%", repeats=1, warm_up=False)
    finally:
        for system in running:
            system.stop()


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__ or "").parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    report = Report(machine())
    for n_readers in (1, 3):
        run(report, options, n_readers)
    report.finish(options)
    sys.exit(0)


if __name__ == "__main__":
    main()
