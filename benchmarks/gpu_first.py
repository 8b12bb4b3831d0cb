"""The first looks at a GPU, some seconds each: ``python -m benchmarks.gpu_first LOOK``.

device      torch computes on it
memory      a process reads what another one wrote into device memory (CUDA IPC)
kernels     ours compile, and are loaded
streams     the smallest collectives are right, 2 ranks on streams of one process
processes   the same, 2 ranks as processes
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu_environment import run_side_by_side
from benchmarks.gpu_world import Rank, device_facts, require_gpu, run_world
from device_comm.cuda.cupy_driver import CupyDriver
from device_comm.cuda.ipc.abi import KERNELS

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

SECONDS = 40.0
"""How long ranks, or the other process, may take."""

KERNEL_WAIT = 10.0
"""How long a kernel waits for those of other ranks: whether that works at all is to be seen."""

SIZES = (1, 7, 1000)
WRITTEN = b"written by another process"


def device() -> dict[str, Any]:
    """torch computes on it."""
    total = int(torch.arange(1000, device="cuda").sum())
    if total != 499_500:
        raise RuntimeError(f"the sum of 0 to 999 is {total}")
    return device_facts()


def memory() -> dict[str, Any]:
    """A process reads what another one wrote into device memory."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=lend, args=(theirs,), daemon=True)
    other.start()
    theirs.close()
    try:
        if not ours.poll(SECONDS):
            raise RuntimeError("the other process has no memory to lend")
        handle, offset = ours.recv()
        driver = CupyDriver(0)
        base = driver.map(handle)
        read = driver.read(base + offset, len(WRITTEN))
        driver.unmap(base)
        driver.close()
        ours.send("done")
        other.join(SECONDS)
    finally:
        other.kill()
        other.join()
    if read != WRITTEN:
        raise RuntimeError(f"read {read!r}, not {WRITTEN!r}")
    return {"read": read.decode()}


def lend(pipe: Connection) -> None:
    """The other process: writes, and keeps the memory until it was read."""
    driver = CupyDriver(0)
    pointer = driver.allocate(1 << 20)
    driver.write(pointer, WRITTEN)
    exported = driver.export(pointer)
    pipe.send((exported.handle, exported.offset))
    pipe.poll(SECONDS)
    driver.free(pointer)
    driver.close()


def kernels() -> dict[str, Any]:
    """Ours compile, and are loaded."""
    driver = CupyDriver(0)
    began = time.monotonic()
    driver.load(KERNELS)
    seconds = time.monotonic() - began
    driver.close()
    return {"kernels": len(KERNELS), "seconds": seconds}


def smallest(rank: Rank) -> dict[str, float]:
    """The body of a rank: seconds from here on by verb, eager and captured."""
    comm, n = rank.comm, rank.n
    took: dict[str, float] = {}
    total = n * (n + 1) / 2
    for size in SIZES:
        x = torch.full((size * n,), rank.rank + 1.0, device=comm.device)
        part = x[:size].clone()
        calls: dict[str, tuple[Callable[[], Any], float | list[float]]] = {
            "all_reduce": (partial(comm.all_reduce, x), total),
            "all_gather": (partial(comm.all_gather, part), [each + 1.0 for each in range(n)]),
            "reduce_scatter": (partial(comm.reduce_scatter, x), total),
            "broadcast": (partial(comm.broadcast, x), 1.0),
        }
        for verb, (call, expected) in calls.items():
            began = time.monotonic()
            check(rank, f"{verb} of {size}", call(), expected)
            took[f"{verb} {size}"] = time.monotonic() - began
    began = time.monotonic()
    comm.barrier()
    rank.stream.synchronize()
    took["barrier"] = time.monotonic() - began
    found: list[Any] = []
    graph = rank.capture(lambda: found.append(comm.all_reduce(x)))
    began = time.monotonic()
    for _ in range(20):
        graph.replay()
    check(rank, "a captured all_reduce", found[0], total)
    took["20 replays"] = time.monotonic() - began
    rank.meet()
    del graph
    return took


def check(rank: Rank, what: str, found: torch.Tensor, expected: float | list[float]) -> None:
    """Raise if a result is not what it should be: the same number throughout, or by rank."""
    by_rank = expected if isinstance(expected, list) else [expected]
    numbers = found.view(len(by_rank), -1).tolist()
    if any(set(row) != {right} for row, right in zip(numbers, by_rank, strict=True)):
        raise RuntimeError(f"{what} on rank {rank.rank} gives {numbers}, not {expected}")


def ranks(way: str) -> dict[str, Any]:
    """The smallest collectives, with 2 ranks."""
    results = run_world(way, 2, smallest, seconds=SECONDS, kernel_wait=KERNEL_WAIT)
    took: dict[str, Any] = results[0]
    return took


LOOKS: dict[str, Callable[[], dict[str, Any]]] = {
    "device": device,
    "memory": memory,
    "kernels": kernels,
    "streams": lambda: ranks("streams"),
    "processes": lambda: ranks("processes"),
}


def main() -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("look", nargs="?", choices=LOOKS, default="device", metavar="LOOK")
    options.add_argument("--json", type=Path, help="write what was found there")
    arguments = options.parse_args()
    run_side_by_side()
    missing = require_gpu()
    if missing:
        print(f"benchmarks.gpu_first: error: {missing}", file=sys.stderr)
        return 2
    found = LOOKS[arguments.look]()
    print(json.dumps(found, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
