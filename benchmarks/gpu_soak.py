"""Many collectives on CUDA devices, each checked: ``python -m benchmarks.gpu_soak``.

Every call has new input and is checked on the device itself, against the sum that every rank
knows: eager calls of many sizes, and graphs of several sizes replayed with eager calls between
them. At the end the host reads how many numbers were wrong. Ends with 1 if any was.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.gpu_environment import run_side_by_side
from benchmarks.gpu_world import WAYS, Rank, device_facts, require_gpu, run_world

if TYPE_CHECKING:
    from torch import Tensor

SIZES = (1, 7, 1_000, 16_384, 40_001, 300_000)
"""Numbers in a tensor: packets, one shot, two shots, and odd ones."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LOOK = 500
"""Calls between two waits for the device."""


class Checked:
    """An all-reduce with new input each time, and the count of its wrong numbers."""

    def __init__(self, rank: Rank, numel: int, dtype: torch.dtype) -> None:
        device = rank.comm.device
        self._rank = rank
        self._x = torch.zeros(numel, dtype=dtype, device=device)
        self._turn = torch.zeros(1, device=device)
        self.wrong = torch.zeros(1, dtype=torch.int64, device=device)

    def step(self) -> None:
        """The next input is ``turn % 8 + rank``, so the sum is known, and exact in any dtype."""
        n = self._rank.n
        self._turn.add_(1)
        base = self._turn.remainder(8)
        self._x.copy_((base + self._rank.rank).expand_as(self._x))
        total: Tensor = self._rank.comm.all_reduce(self._x)
        expected = (n * base + n * (n - 1) / 2).to(total.dtype)
        self.wrong.add_((total != expected).sum())


def soak(rank: Rank, replays: int, eager: int, profile: bool) -> dict[str, float]:
    """The body of every rank."""
    checks = [Checked(rank, numel, dtype) for numel in SIZES for dtype in DTYPES]
    began = time.perf_counter()
    for number in range(eager):
        checks[number % len(checks)].step()
        if number % _LOOK == _LOOK - 1:
            rank.meet()
    rank.meet()
    after_eager = time.perf_counter()
    graphs = [rank.capture(check.step) for check in checks]
    if profile:
        torch.cuda.profiler.start()
    for number in range(replays):
        graphs[number % len(graphs)].replay()
        if number % 50 == 49:  # an eager call between two replays
            checks[number % len(checks)].step()
        if number % _LOOK == _LOOK - 1:
            rank.meet()
    rank.meet()
    if profile:
        torch.cuda.profiler.stop()
    ended = time.perf_counter()
    graphs.clear()
    return {
        "wrong": float(sum(int(check.wrong) for check in checks)),
        "eager_seconds": after_eager - began,
        "replay_seconds": ended - after_eager,
    }


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--ways", default=",".join(WAYS))
    options.add_argument("--ranks", default="2")
    options.add_argument("--replays", type=int, default=10_000)
    options.add_argument("--eager", type=int, default=10_000)
    options.add_argument("--profile", action="store_true", help="let a profiler see the replays")
    options.add_argument("--json", type=Path, help="write the report there")
    arguments = options.parse_args()
    run_side_by_side()
    missing = require_gpu()
    if missing:
        print(f"benchmarks.gpu_soak: error: {missing}", file=sys.stderr)
        return 2
    report: dict[str, object] = {**device_facts()}
    wrong = 0.0
    for way in arguments.ways.split(","):
        for n in map(int, arguments.ranks.split(",")):
            counts = (arguments.replays, arguments.eager)
            results = run_world(way, n, soak, *counts, arguments.profile)
            wrong += sum(each["wrong"] for each in results)
            report[f"{n} {way}"] = {"replays": counts[0], "eager": counts[1], **results[0]}
            print(f"{n} ranks as {way}: {counts[0]} replays, {counts[1]} eager calls: {results[0]}")
    report["wrong"] = wrong
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
