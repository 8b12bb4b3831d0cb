"""all_reduce over two hosts: python -m benchmarks.between_hosts [--quick] [--json FILE].

The hosts are network namespaces of this machine, joined by a cable that is as quick as its kernel:
what is measured is the transport itself, at both ends on the same cores. `benchmarks.model` takes
it from there to real links. Needs root, for the namespaces.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from benchmarks.harness import Figure, Report, machine, parser
from benchmarks.rank_processes import RankProcesses
from tests.coordinator.hosts import groups_over
from tests.netns import two_hosts

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from tests.netns import Host

WORK = "all_reduce_ over two hosts"
SIZES = {"64B": 64, "1KiB": 1 << 10, "64KiB": 64 << 10, "1MiB": 1 << 20, "16MiB": 16 << 20}
LARGEST = {"64MiB": 64 << 20}
RANKS = (2, 4)
"""On both hosts together; of four, two share what is between the hosts."""


def serve(rank: int, n: int, folder: str, hosts: tuple[Host, Host], requests: Connection) -> None:
    """A rank that reduces as it is asked, and answers with seconds."""
    torch.set_num_threads(1)
    with groups_over(rank, n, folder, hosts) as groups:
        while (request := requests.recv()) is not None:
            size, hierarchical, count = request
            x = torch.zeros(size // 4)
            samples = []
            for _ in range(count):
                groups.tp.barrier()
                began = time.perf_counter()
                groups.tp.all_reduce(x, out=x, hierarchical=hierarchical)
                samples.append(time.perf_counter() - began)
            requests.send(samples)


def main() -> None:
    """Measure, and print a table."""
    options = parser(__doc__ or "").parse_args()
    report = Report(machine(), file=options.json)
    for n in RANKS:
        with (
            two_hosts("IPv4") as hosts,
            tempfile.TemporaryDirectory() as folder,
            RankProcesses(n, serve, n, folder, hosts) as processes,
        ):
            figures = []
            for name, size in {**SIZES, **({} if options.quick else LARGEST)}.items():
                count = max(3, min(200, (128 << 20) // size))
                ways = {"ours": False, **({"ours, hierarchical": True} if n > 2 else {})}
                asks = {
                    way: partial(processes.ask, size, hierarchical, count)
                    for way, hierarchical in ways.items()
                }
                repeats = 2 if options.quick else 5
                figures.append(Figure(WORK, f"{name} {n} ranks", asks, repeats=repeats))
            report.measure(*figures)
    report.finish(options)


if __name__ == "__main__":
    main()
