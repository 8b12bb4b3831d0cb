"""What waiting costs besides time: python -m benchmarks.costs [--quick] [--peers DIR].

CPU seconds of all processes, readers that wait included, for 1,000 round trips through a queue and
for 1,000 calls that do nothing, at three rates: back to back; ten, and a hundred times as seldom as
a round trip of ours takes. Then the memory of a pool that does nothing: each shared page counted
once, and what lies in shared memory.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING

import psutil
import torch

from benchmarks.harness import Figure, Report, machine, parser
from benchmarks.memory import shared_bytes
from benchmarks.message_queue import start_all
from benchmarks.pool import Nothing
from benchmarks.pool_peers import REQUEST, WORKERS, executor
from server import WorkerPool

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

RATES = {"back to back": 0.0, "every 0.25 ms": 0.000_25, "every 2.5 ms": 0.002_5}
SYSTEMS = ("ours", "vLLM", "SGLang", "zmq ipc (msgspec)")


class Counted(Nothing):
    """Tells how much it has computed."""

    def cpu(self) -> float:
        """Seconds of this process so far."""
        return time.process_time()


def thousand_calls(pool: WorkerPool, pause: float, count: int) -> list[float]:
    """CPU seconds of the driver and the workers for 1,000 calls."""

    def spent() -> float:
        return time.process_time() + sum(pool.collective_rpc("cpu"))

    before = spent()
    for _ in range(count):
        if pause:
            time.sleep(pause)
        pool.collective_rpc("no_op")
    return [1000 * (spent() - before) / count]


def queues(report: Report, options: argparse.Namespace, repeats: int, count: int) -> None:
    """Round trips of a dict to one reader."""
    running = start_all(report, options, 1, SYSTEMS)
    try:
        figures = []
        for params, pause in RATES.items():
            asks: dict[str, Callable[[], list[float]]] = {
                system.name: partial(system.ask, "cost", "dict", pause, count) for system in running
            }
            figures.append(Figure("1,000 round trips", params, asks, unit="s", repeats=repeats))
        report.measure(*figures)
    finally:
        for system in running:
            system.stop()


def calls(report: Report, options: argparse.Namespace, repeats: int, count: int) -> None:
    """Calls to two workers, and the pool's memory."""
    remotes = executor(report, options)
    try:
        with WorkerPool(Counted, tp=WORKERS) as pool:
            figures = []
            for params, pause in RATES.items():
                asks: dict[str, Callable[[], list[float]]] = {
                    "ours": partial(thousand_calls, pool, pause, count)
                }
                work = ("cost", None, REQUEST, pause, count)
                asks |= {name: partial(each.ask, *work) for name, each in remotes.items()}
                figures.append(Figure("1,000 calls", params, asks, unit="s", repeats=repeats))
            report.measure(*figures)
            workers = [psutil.Process(status.pid) for status in pool.status()]
            memory: dict[str, Callable[[], list[float]]] = {
                "two workers": lambda: [sum(each.memory_full_info().pss for each in workers)],
                "shared memory": lambda: [float(shared_bytes(each.pid for each in workers))],
            }
            report.measure(Figure("memory of a pool", "two workers", memory, unit="MiB", repeats=1))
    finally:
        for each in remotes.values():
            each.stop()


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__ or "").parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    report = Report(machine(), file=options.json)
    repeats, count = (1, 100) if options.quick else (5, 1000)
    queues(report, options, repeats, count)
    calls(report, options, repeats, count)
    report.finish(options)


if __name__ == "__main__":
    main()
