"""What it costs that every operation is written down: on and off, in turn, between two processes.

    entry        nanoseconds of writing down the begin and the end of one operation from Python
    all_reduce_  of 1 KiB over shared memory, by the short cut in C
    all_gather   of 1 KiB with another output's layout, by the long way in Python
    send         of 1 KiB, there and back
    queue        a message of 100 bytes through a queue and back through another

Each work runs in blocks, one with and one without a history, in turn; the ratio is that of the
medians of all blocks, the spread that of the ratios of ten parts of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.harness import machine
from benchmarks.rank_processes import RankProcesses
from device_comm import Communicator
from device_comm.shm.shm_backend import ShmBackend
from shm_broadcast import Board, MessageQueue, layout

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from shm_broadcast.state.board import BoardHandle

WORKS = ("all_reduce_", "all_gather", "send", "queue")
SIDES = ("on", "off")
BLOCK = 200
PARTS = 10


@dataclass(frozen=True)
class Cost:
    """Microseconds of one operation with and without a history."""

    on: float
    off: float
    ratio: float
    lowest: float
    highest: float


class Side:
    """One rank's group and queues on one board."""

    def __init__(self, board: Board, path: str) -> None:
        self._rank = board.member
        self._comm = Communicator(ShmBackend.create(board, (0, 1), _share(f"{path}-group")))
        self._ends = {}
        for writer in (0, 1):
            mine = (
                MessageQueue.on_board(board, writer, [1 - writer])
                if board.member == writer
                else None
            )
            share = _share(f"{path}-queue-{writer}")
            handle = share(mine and pickle.dumps(mine.export_handle()))
            self._ends[writer] = mine or MessageQueue.attach(pickle.loads(handle), board)
        self._x = torch.ones(256)
        self._columns = torch.ones(16, 16)
        self._message = bytes(100)

    def call(self, work: str) -> Callable[[], object]:
        """One operation of a work."""
        return {
            "all_reduce_": lambda: self._comm.all_reduce_(self._x),
            "all_gather": lambda: self._comm.all_gather(self._columns, dim=1),
            "send": self._send,
            "queue": self._echo,
        }[work]

    def _send(self) -> None:
        for rank in (0, 1):
            if rank == self._rank:
                self._comm.send(self._x)
            else:
                self._comm.recv(out=self._x)

    def _echo(self) -> None:
        for rank, queue in self._ends.items():
            if rank == self._rank:
                queue.enqueue(self._message)
            else:
                queue.dequeue(60)


def serve(rank: int, boards: dict[str, BoardHandle], path: str, requests: Connection) -> None:
    """A rank's process: run the works that the driver asks for, until it asks for nothing."""
    torch.set_num_threads(1)
    sides = {name: Side(Board.attach(boards[name], rank), f"{path}/{name}") for name in SIDES}
    gc.disable()
    while (request := requests.recv()) is not None:
        (work, blocks) = request
        calls = {name: side.call(work) for name, side in sides.items()}
        samples: dict[str, list[float]] = {name: [] for name in SIDES}
        for block in range(blocks):
            for name in SIDES if block % 2 else SIDES[::-1]:
                call = calls[name]
                started = time.perf_counter()
                for _ in range(BLOCK):
                    call()
                samples[name].append((time.perf_counter() - started) / BLOCK * 1e6)
        requests.send(samples)


def compare(samples: dict[str, list[float]]) -> Cost:
    """What the samples of one work say."""
    on, off = (statistics.median(samples[name]) for name in SIDES)
    size = len(samples["on"]) // PARTS
    ratios = [
        statistics.median(samples["on"][at : at + size])
        / statistics.median(samples["off"][at : at + size])
        for at in range(0, size * PARTS, size)
    ]
    return Cost(on, off, on / off, min(ratios), max(ratios))


def entry_ns(batches: int, size: int = 2000) -> float:
    """Nanoseconds that the begin and the end of an entry take, above the stamp itself."""
    with Board.create(1, 0) as board:
        words, slot, history = board.words, board.slot_offset(0), board.history
        stamp, leave, best = words.stamp, words.leave, [float("inf")] * 2
        for _ in range(batches):
            started = time.perf_counter_ns()
            for _ in range(size):
                stamp(slot, 2, "tp all_reduce")
            plain = time.perf_counter_ns()
            for _ in range(size):
                number = stamp(
                    slot, 2, "tp all_reduce", history, "tp", 2, 1024, 1, layout.NO_PEER, 3
                )
                leave(history, number, layout.OUTCOME_DONE, 0, 0)
            ended = time.perf_counter_ns()
            best = [min(best[0], plain - started), min(best[1], ended - plain)]
        return (best[1] - best[0]) / size


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="end within 20 s")
    options.add_argument("--json", metavar="FILE", type=Path, help="write the costs as JSON")
    arguments = options.parse_args()
    blocks = 200 if arguments.quick else 2000
    entry = entry_ns(50 if arguments.quick else 500)
    print(f"an entry: {entry:.0f} ns")
    found = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        Board.create(2, None) as on,
        Board.create(2, None, histories=False) as off,
        RankProcesses(2, serve, {"on": on.handle(), "off": off.handle()}, folder) as ranks,
    ):
        print(f"{'work':<14}{'on, us':>9}{'off, us':>9}{'ratio':>8}   of parts")
        for work in WORKS:
            ranks.ask(work, 20)
            cost = found[work] = compare(ranks.ask(work, blocks))
            print(
                f"{work:<14}{cost.on:9.2f}{cost.off:9.2f}{cost.ratio:8.3f}"
                f"   {cost.lowest:.3f} to {cost.highest:.3f}"
            )
    if arguments.json is not None:
        costs = {name: asdict(cost) for name, cost in found.items()}
        report: dict[str, Any] = {"machine": machine(), "entry_ns": entry, "costs": costs}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def _share(path: str) -> Callable[[bytes | None], bytes]:
    """Hands bytes from rank 0 to both, by a file."""

    def share(payload: bytes | None) -> bytes:
        there = Path(path)
        if payload is not None:
            there.with_suffix(".part").write_bytes(payload)
            there.with_suffix(".part").rename(there)
        while not there.exists():
            time.sleep(0.001)
        return there.read_bytes()

    return share


if __name__ == "__main__":
    main()
