"""How it grows: python -m benchmarks.growth [--quick].

More ranks and readers than there are cores, groups of one process, messages of up to 4 GiB, and
calls that wait: what one more costs, and whether there is a cliff.
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import coordinator
from benchmarks.collective_ranks import serve
from benchmarks.harness import Figure, Report, drawing, machine, parser
from benchmarks.pool import Nothing
from benchmarks.pool_peers import WORKERS
from benchmarks.queue_systems import Ours
from benchmarks.rank_processes import RankProcesses
from server import WorkerPool
from shm_broadcast import Board

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.connection import Connection

    from benchmarks.harness import Row

RANKS = (2, 4, 8, 16, 32, 64)
MOST_OF_GLOO = 16
READERS = (1, 2, 4, 8, 16, 32, 64)
GROUPS = (1, 4, 16, 64, 256)
SIZES = {"64B": 64, "4KiB": 4 << 10, "256KiB": 256 << 10, "16MiB": 16 << 20, "1GiB": 1 << 30}
HUGE = {"4GiB": 4 << 30}
CALLS = (1, 100, 10_000, 100_000)
REPEATS = 5
MOST_SECONDS = 4.0
"""What a system may take for a figure before it gets no more repeats."""


def measure(
    report: Report, work: str, params: str, asks: Mapping[str, Callable[[], Sequence[float]]]
) -> None:
    """One figure of what has just been started."""
    report.measure(Figure(work, params, asks, repeats=REPEATS, seconds=MOST_SECONDS))


def ranks(report: Report, quick: bool) -> None:
    """Collectives of ever more ranks."""
    for n in RANKS[: 2 if quick else None]:
        systems = ("ours", "gloo") if n <= MOST_OF_GLOO else ("ours",)
        with (
            tempfile.TemporaryDirectory() as folder,
            Board.create(n, None) as board,
            RankProcesses(n, serve, n, board.handle(), f"{folder}/s", systems, False) as processes,
        ):
            for verb, size in (("barrier", 0), ("all_reduce_", 16 << 10)):
                asks = {
                    system: partial(processes.ask, system, verb, "fp32", size, 0.1)
                    for system in systems
                }
                measure(report, f"{verb.rstrip('_')} of n ranks", f"{n}", asks)


def readers(report: Report, quick: bool) -> None:
    """Round trips with ever more readers."""
    for n in READERS[: 2 if quick else None]:
        system = Ours()
        system.start(n)
        try:
            asks = {"ours": partial(system.echo, "a message", 200)}
            measure(report, "round trip with n readers", f"{n}", asks)
        finally:
            system.stop()


def messages(report: Report, quick: bool) -> None:
    """One way, ever larger; the largest once."""
    system = Ours()
    system.start(1)
    try:
        for name, size in {**SIZES, **({} if quick else HUGE)}.items():
            payload = torch.ones(size // 4)
            count = max(1, min(100, (256 << 20) // size))
            asks = {"ours": partial(system.one_way, payload, count)}
            measure(report, "message of n bytes", name, asks)
    finally:
        system.stop()


def hold_groups(rank: int, path: str, requests: Connection) -> None:
    """A rank with ever more groups, which does an all-reduce in the latest one."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    held: list[Any] = []
    x = torch.zeros(256)
    while (request := requests.recv()) is not None:
        wanted, count, which = request
        began = time.perf_counter()
        made = wanted - len(held)
        for number in range(len(held), wanted):
            store = dist.FileStore(f"{path}-{number}", 2)
            held.append(coordinator.init(tp=2, rank=rank, world_size=2, store=store))
        each = (time.perf_counter() - began) / made if made else 0.0
        group = held[-1].tp
        group.barrier()
        began = time.perf_counter()
        for _ in range(count):
            group.all_reduce_(x)
        requests.send([(each, (time.perf_counter() - began) / count)[which]])


def groups(report: Report, quick: bool) -> None:
    """Ever more groups in two processes."""
    with (
        tempfile.TemporaryDirectory() as folder,
        RankProcesses(2, hold_groups, f"{folder}/g") as processes,
    ):
        for n in GROUPS[: 2 if quick else None]:
            making = {"ours": partial(processes.ask, n, 100, 0)}
            work = "making one of n groups"
            report.measure(Figure(work, f"{n}", making, unit="ms", repeats=1, warm_up=False))
            asks = {"ours": partial(processes.ask, n, 2000, 1)}
            measure(report, "all_reduce in the last of n groups", f"{n}", asks)


def calls(report: Report, quick: bool) -> None:
    """Ever more calls that wait at the same time; seconds for each of them."""
    with WorkerPool(Nothing, tp=WORKERS) as pool:

        def all_at_once(n: int) -> list[float]:
            began = time.perf_counter()
            futures = [pool.submit("no_op") for _ in range(n)]
            for future in futures:
                future.result()
            return [(time.perf_counter() - began) / n]

        for n in CALLS[: 2 if quick else None]:
            measure(report, "each of n calls at once", f"{n}", {"ours": partial(all_at_once, n)})


def number(row: Row) -> int:
    """What a row's work grew to."""
    return {**SIZES, **HUGE}.get(row.params) or int(row.params)


def draw(rows: Sequence[Row], path: str) -> None:
    """A log-log panel for each work."""
    pyplot = drawing()
    works = list(dict.fromkeys(row.work for row in rows))
    figure, axes = pyplot.subplots(len(works), 1, figsize=(6, 2.6 * len(works)), squeeze=False)
    for axis, work in zip(axes[:, 0], works, strict=True):
        shown = [row for row in rows if row.work == work]
        for system in dict.fromkeys(row.system for row in shown):
            points = [(number(row), row.median) for row in shown if row.system == system]
            axis.loglog(*zip(*points, strict=True), marker="o", markersize=3, label=system)
        axis.set(title=work, xlabel="n", ylabel=shown[0].unit.replace("us", "µs"))
        ticks = {point: row.params for row in shown if (point := number(row))}
        axis.set_xticks(list(ticks), list(ticks.values()), fontsize=7)
        axis.xaxis.minorticks_off()
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__ or "").parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    report = Report(machine(), file=options.json)
    works: tuple[Callable[[Report, bool], None], ...] = (ranks, readers, messages, groups, calls)
    try:
        for work in works:
            if options.only in work.__name__:
                work(report, options.quick)
    finally:
        report.finish(options, draw)


if __name__ == "__main__":
    main()
