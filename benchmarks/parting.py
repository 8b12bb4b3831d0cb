"""How soon two ranks that share a core part when another is free: python -m benchmarks.parting.

Both ranks are tied to one core and meet in barriers; then they may run anywhere. Reported is the
time from then until a block of barriers takes less than `PARTED_SECONDS` each. Needs two cores.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import TYPE_CHECKING

from benchmarks.collective_ranks import Ours
from benchmarks.harness import Figure, Report, machine, parser
from benchmarks.rank_processes import RankProcesses
from shm_broadcast import Board, BoardHandle

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

PARTED_SECONDS = 2e-6
BLOCK = 20
MOST_SECONDS = 1.0
REPEATS = 11


def part(system: Ours, cores: set[int]) -> float:
    """Seconds until the ranks are on cores of their own; at most `MOST_SECONDS`."""
    os.sched_setaffinity(0, {min(cores)})
    for _ in range(10 * BLOCK):
        system.meet()
    os.sched_setaffinity(0, cores)
    system.meet()
    started = time.perf_counter()
    while True:
        before = time.perf_counter()
        for _ in range(BLOCK):
            system.meet()
        now = time.perf_counter()
        parted = now - before < BLOCK * PARTED_SECONDS
        if system.agree(int(parted or now - started > MOST_SECONDS)):  # rank 0 ends it
            return now - started


def serve(rank: int, board: BoardHandle, path: str, requests: Connection) -> None:
    """A rank's process: part whenever it is asked to."""
    system = Ours(Board.attach(board, rank), path)
    cores = os.sched_getaffinity(0)
    while requests.recv() is not None:
        requests.send([part(system, cores)])


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__ or "").parse_args()
    report = Report(machine(), file=options.json)
    with (
        tempfile.TemporaryDirectory() as folder,
        Board.create(2, None) as board,
        RankProcesses(2, serve, board.handle(), f"{folder}/s") as ranks,
    ):
        asks = {"ours": lambda: list(ranks.ask("part"))}
        report.measure(Figure("part", "two ranks on one core", asks, unit="ms", repeats=REPEATS))
    report.finish(options)


if __name__ == "__main__":
    main()
