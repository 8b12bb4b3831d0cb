"""The way of a call through the house: python -m benchmarks.call_path [--steps] [--json FILE].

    frames    functions of the project that the calling thread enters
    files     that these stand in
    changes   how often the next function stands in another file than the one before

Counted on one of two ranks on the CPU, in the second call of its kind: the first sets things up.
Rank 0 has a head start, so that rank 1 finds what it waits for. The classes with the most ancestors
of the project's own follow.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import json
import pkgutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import coordinator
from benchmarks.harness import machine
from benchmarks.rank_processes import RankProcesses

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from types import FrameType

    from shm_broadcast import MessageQueue

ROOT = Path(__file__).parents[1]
PACKAGES = ("shm_broadcast", "device_comm", "coordinator", "server")
HEAD_START = 0.05
"""Seconds by which rank 0 is ahead of rank 1."""


@dataclass(frozen=True)
class Way:
    """What one call passes through."""

    frames: int
    files: int
    changes: int
    steps: tuple[str, ...]
    """``FILE FUNCTION`` of each frame, in order."""


def traced(call: Callable[[], object]) -> Way:
    """Make a call and count what this thread enters of the project."""
    files: list[str] = []
    steps: list[str] = []
    inside = tuple(f"{ROOT / package}/" for package in PACKAGES)

    def enter(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and (name := frame.f_code.co_filename).startswith(inside):
            files.append(name)
            steps.append(f"{name.removeprefix(f'{ROOT}/')} {frame.f_code.co_name}")

    sys.setprofile(enter)
    try:
        call()
    finally:
        sys.setprofile(None)
    changes = sum(one != other for one, other in itertools.pairwise(files))
    return Way(len(files), len(set(files)), changes, tuple(steps))


def on_rank(rank: int, port: int, pipe: Connection) -> None:
    """Answer with the ways of all calls as this rank goes them."""
    torch.set_num_threads(1)
    store = coordinator.connect_store("127.0.0.1", port)
    with coordinator.init(tp=2, rank=rank, store=store) as groups:
        group = groups.tp
        queue = group.create_mq_broadcaster()
        while pipe.recv() is not None:
            pipe.send({name: asdict(way) for name, way in ways(rank, group, queue).items()})
        queue.shutdown()


def ways(rank: int, group: coordinator.GroupCoordinator, queue: MessageQueue) -> dict[str, Way]:
    """The way of each call of this rank, by the call's name."""
    x, strided = torch.ones(256), torch.ones(512)[::2]
    tensors = {"hidden": torch.ones(4, 64), "positions": torch.arange(4), "step": 7}
    calls: tuple[dict[str, Callable[[], object]], ...] = (
        {
            "all_reduce, short": lambda: group.all_reduce(x),
            "all_reduce, long": lambda: group.all_reduce(strided),
            "all_reduce, async": lambda: group.all_reduce(x, async_op=True).wait(),
            "enqueue": lambda: queue.enqueue({"step": 1}),
            "broadcast_tensor_dict, source": lambda: group.broadcast_tensor_dict(tensors),
            "send_tensor_dict": lambda: group.send_tensor_dict(tensors, 1),
        },
        {
            "all_reduce, short": lambda: group.all_reduce(x),
            "all_reduce, long": lambda: group.all_reduce(strided),
            "all_reduce, async": lambda: group.all_reduce(x, async_op=True).wait(),
            "dequeue": queue.dequeue,
            "broadcast_tensor_dict, others": lambda: group.broadcast_tensor_dict(None),
            "recv_tensor_dict": lambda: group.recv_tensor_dict(0),
        },
    )
    found = {}
    for name, call in calls[rank].items():
        for _ in range(2):
            group.barrier()
            if rank == 1:
                time.sleep(HEAD_START)
            found[name] = traced(call)
    return found


def measure() -> dict[str, dict[str, Any]]:
    """The ways of the calls of both ranks; of one that both make, rank 1's, who need not wait."""
    store = coordinator.host_store()
    with RankProcesses(2, on_rank, store.port) as ranks:
        first, second = ranks.ask_all("measure")
    return {**first, **second}


def deepest_classes() -> list[str]:
    """The longest lines of ancestors, a class and those of the project's own above it."""
    lines: list[list[str]] = []
    # The plug-ins import engines, which may be absent; compat's classes extend the deepest of ours.
    unlisted = ("coordinator.plugins.", "coordinator.compat.")
    for package in PACKAGES:
        where = importlib.import_module(package).__path__
        for module in pkgutil.walk_packages(where, f"{package}."):
            if module.name.startswith(unlisted):
                continue
            for _, kind in inspect.getmembers(
                importlib.import_module(module.name), inspect.isclass
            ):
                if kind.__module__ == module.name:
                    lines.append(_line(kind))
    longest = max(map(len, lines))
    return sorted({" < ".join(line) for line in lines if len(line) == longest})


def _line(kind: type) -> list[str]:
    """``kind`` and the longest line of its bases within the project."""
    ours = [base for base in kind.__bases__ if base.__module__.partition(".")[0] in PACKAGES]
    return [kind.__name__, *max((_line(base) for base in ours), key=len, default=[])]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", action="store_true", help="print each frame too")
    options.add_argument("--json", metavar="FILE", type=Path, help="write the counts as JSON")
    arguments = options.parse_args()
    found = measure()
    print(f"{'call':<34}{'frames':>8}{'files':>8}{'changes':>9}")
    for name, way in found.items():
        print(f"{name:<34}{way['frames']:8}{way['files']:8}{way['changes']:9}")
        if arguments.steps:
            print(*way["steps"], sep="\n")
    deepest = deepest_classes()
    print("", "deepest classes", *deepest, sep="\n")
    if arguments.json is not None:
        report = {"machine": machine(), "ways": found, "deepest": deepest}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
