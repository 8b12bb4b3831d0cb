"""Many collectives on CUDA devices, each checked: ``python -m benchmarks.gpu_soak``.

Every call has new input and is checked on the device itself, against the sum that every rank
knows: eager calls of many sizes, and graphs of several sizes replayed with eager calls between
them. At the end the host reads how many numbers were wrong. Ends with 1 if any was.

With ``--seconds`` it makes as many calls as fit, by what the first ones took; the report says how
many.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu_environment import run_side_by_side
from benchmarks.gpu_fit import TimeLeft, fits
from benchmarks.gpu_pace import Pace
from benchmarks.gpu_world import WAYS, WORLD_SECONDS, Rank, device_facts, require_gpu, run_world
from device_comm import Communicator
from device_comm.backend import LoopbackBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

SIZES = (1, 7, 1_000, 16_384, 40_001, 300_000)
"""Numbers in a tensor: packets, one shot, two shots, and odd ones."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STEP_KERNELS = 16
"""Kernels of a checked call, at most."""

_TRIED = 100
"""Calls by which the others' cost is known."""

_LOOK = 500
"""Calls between two meetings of the ranks."""


class Checked:
    """An all-reduce with new input each time, and the count of its wrong numbers."""

    def __init__(self, comm: Communicator, numel: int, dtype: torch.dtype) -> None:
        self._comm = comm
        self._x = torch.zeros(numel, dtype=dtype, device=comm.device)
        self._turn = torch.zeros(1, device=comm.device)
        self.wrong = torch.zeros(1, dtype=torch.int64, device=comm.device)

    def step(self) -> None:
        """The next input is ``turn % 8 + rank``, so the sum is known, and exact in any dtype."""
        n = self._comm.world_size
        self._turn.add_(1)
        base = self._turn.remainder(8)
        self._x.copy_((base + self._comm.rank).expand_as(self._x))
        total: Tensor = self._comm.all_reduce(self._x)
        expected = (n * base + n * (n - 1) / 2).to(total.dtype)
        self.wrong.add_((total != expected).sum())


def checks_of(comm: Communicator) -> list[Checked]:
    """One of each size and dtype."""
    return [Checked(comm, numel, dtype) for numel in SIZES for dtype in DTYPES]


def load_kernels() -> None:
    """Have torch load all that steps use: once a rank's kernels wait, that may wait, too."""
    with Communicator(LoopbackBackend("cuda:0")) as alone:
        for check in checks_of(alone):
            check.step()
    torch.cuda.synchronize()


def many(rank: Rank, call: Callable[[int], object], wanted: int, seconds: float) -> int:
    """``call(0)``, ``call(1)`` and so on, as often as wanted or as fits. Returns how often."""
    pace = Pace(rank.stream.synchronize, rank.n)

    def go(numbers: range) -> None:
        for number in numbers:
            pace.launching(STEP_KERNELS)
            call(number)
            if number % _LOOK == _LOOK - 1:
                rank.meet()
        rank.meet()

    tried = min(_TRIED, wanted)
    began = time.monotonic()
    go(range(tried))
    count = rank.least(fits(wanted, tried, time.monotonic() - began, seconds))
    go(range(tried, count))
    return count


def soak(rank: Rank, replays: int, eager: int, profile: bool, seconds: float) -> dict[str, float]:
    """The body of every rank."""
    checks = checks_of(rank.comm)
    for check in checks:
        check.step()
    rank.meet()
    began = time.perf_counter()
    eager = many(rank, lambda number: checks[number % len(checks)].step(), eager, seconds / 2)
    after_eager = time.perf_counter()
    graphs = [rank.capture(check.step) for check in checks]

    def replay(number: int) -> None:
        graphs[number % len(graphs)].replay()
        if number % 50 == 49:  # an eager call between two replays
            checks[number % len(checks)].step()

    if profile:
        torch.cuda.profiler.start()
    replayed_from = time.perf_counter()
    replays = many(rank, replay, replays, seconds / 2)
    ended = time.perf_counter()
    if profile:
        torch.cuda.profiler.stop()
    graphs.clear()
    return {
        "replays": replays,
        "eager": eager,
        "wrong": float(sum(int(check.wrong) for check in checks)),
        "eager_seconds": after_eager - began,
        "replay_seconds": ended - replayed_from,
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--ways", default=",".join(WAYS))
    options.add_argument("--ranks", default="2")
    options.add_argument("--replays", type=int, default=10_000)
    options.add_argument("--eager", type=int, default=10_000)
    options.add_argument("--seconds", type=float, default=math.inf, help="for all of it")
    options.add_argument("--profile", action="store_true", help="let a profiler see the replays")
    options.add_argument("--json", type=Path, help="write the report there")
    arguments = options.parse_args()
    run_side_by_side()
    missing = require_gpu()
    if missing:
        print(f"benchmarks.gpu_soak: error: {missing}", file=sys.stderr)
        return 2
    left = TimeLeft(arguments.seconds)
    worlds = [
        (way, n) for way in arguments.ways.split(",") for n in map(int, arguments.ranks.split(","))
    ]
    if "streams" in arguments.ways:
        load_kernels()
    report: dict[str, object] = {**device_facts()}
    wrong = 0.0
    for place, (way, n) in enumerate(worlds):
        seconds = left.part(len(worlds) - place, WORLD_SECONDS)
        counts = (arguments.replays, arguments.eager)
        body = (soak, *counts, arguments.profile, seconds)
        results = run_world(way, n, *body, seconds=left.limit())
        wrong += sum(each["wrong"] for each in results)
        report[f"{n} {way}"] = results[0]
        report["wrong"] = wrong
        print(f"{n} ranks as {way}: {results[0]}", flush=True)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
