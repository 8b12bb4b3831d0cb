"""What a verb costs besides moving data: python -m benchmarks.verb_cost [--quick] [--json FILE].

    group          a `GroupCoordinator`'s verb, above its communicator's verb of that name
    communicator   that verb above what a backend does: checks, arranging, and room for the result

Both in microseconds, of 256 floats, the best of many batches: nothing is moved, so that whatever
makes a batch slower is the machine's doing.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import coordinator
from benchmarks.harness import machine
from device_comm import ALL_VERBS, Backend, Capabilities, Communicator, Identity
from shm_broadcast import Board

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from device_comm import Operation

COUNT = 256


class Still(Backend):
    """Rank 0 of two, whose operations do nothing."""

    def __init__(self, board: Board) -> None:
        super().__init__(Identity.of(0, 2, watch=board), Capabilities("still", ALL_VERBS))

    def start(self, operation: Operation) -> None:
        """Nothing moves."""


@dataclass(frozen=True)
class Cost:
    """Microseconds of one verb."""

    group: float
    communicator: float


def calls(on: Any) -> Mapping[str, Callable[[], object]]:
    """The verbs of a group or of a communicator, on tensors that need no copy."""
    x, out = torch.ones(COUNT), torch.empty(COUNT)
    sizes = [COUNT // on.world_size] * on.world_size
    return {
        "all_reduce": lambda: on.all_reduce(x),
        "all_reduce_": lambda: on.all_reduce_(x),
        "all_gather": lambda: on.all_gather(x, dim=0),
        "all_gatherv": lambda: on.all_gatherv(x, dim=0, sizes=[COUNT] * on.world_size),
        "reduce_scatter": lambda: on.reduce_scatter(x, dim=0),
        "reduce_scatterv": lambda: on.reduce_scatterv(x, dim=0, sizes=sizes),
        "all_to_all": lambda: on.all_to_all(x, dim=0),
        "broadcast": lambda: on.broadcast(x, src=0),
        "broadcast_": lambda: on.broadcast_(x, src=0),
        "reduce": lambda: on.reduce(x, dst=0),
        "gather": lambda: on.gather(x, dst=0, dim=0),
        "scatter": lambda: on.scatter(x, src=0, dim=0),
        "all_reduce, async": lambda: on.all_reduce(x, out=out, async_op=True).wait(),
        "barrier": lambda: on.barrier(),
    }


def best(call: Callable[[], object], batches: int, size: int = 200) -> float:
    """Microseconds of one call in the best batch."""
    fastest = float("inf")
    for _ in range(batches):
        start = time.perf_counter()
        for _ in range(size):
            call()
        fastest = min(fastest, time.perf_counter() - start)
    return fastest / size * 1e6


def measure(batches: int = 50) -> dict[str, Cost]:
    """The cost of each verb."""
    found = {}
    gc.disable()
    with coordinator.init(rank=0) as groups, Board.create(2, 0) as board:
        above, below = calls(groups.tp), calls(groups.tp.device_communicator)
        empty = calls(Communicator(Still(board)))
        for verb in above:
            base = best(below[verb], batches)
            found[verb] = Cost(best(above[verb], batches) - base, best(empty[verb], batches))
    gc.enable()
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="end within 10 s")
    options.add_argument("--json", metavar="FILE", type=Path, help="write the costs as JSON")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    found = measure(50 if arguments.quick else 300)
    print(f"{'verb':<20}{'group':>8}{'communicator':>15}")
    for name, cost in found.items():
        print(f"{name:<20}{cost.group:8.2f}{cost.communicator:15.2f}")
    if arguments.json is not None:
        costs = {name: asdict(cost) for name, cost in found.items()}
        report = {"machine": machine(), "unit": "us", "costs": costs}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
