"""What an eager call over CUDA IPC costs the host: python -m benchmarks.eager_cost [--quick].

CUDA's driver is a stub that does nothing, and torch is on the CPU: the figures hold this project's
part of a call, not CUDA's launches, torch's allocator for devices and its events. In microseconds,
the best of many batches. Calls repeat the same tensors, as those of a model's layers do.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.verb_cost import best
from device_comm.cuda.ipc import abi
from device_comm.cuda.ipc.abi import MOVE_KERNEL
from shm_broadcast import Board
from tests.device_comm.cuda.fakes import compile_cuda, rank_0_of_2, stubbed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from device_comm import Communicator
    from device_comm.cuda.driver import Driver

ROWS, WIDTH = 4, 64
LARGE = 4 << 20


def calls(comm: Communicator, driver: Driver) -> Mapping[str, Callable[[], Any]]:
    """The verbs of rank 0 of two on tensors of 1 KiB, and what is under all of them."""
    x, out = torch.ones(ROWS * WIDTH), torch.empty(ROWS * WIDTH)
    whole, half, large = torch.empty(2 * len(x)), torch.empty(len(x) // 2), torch.ones(LARGE)
    rows, weight = torch.ones(ROWS, WIDTH), torch.ones(WIDTH)
    launch = driver.prepare(MOVE_KERNEL, 1, abi.MAX_THREADS, (bytes(abi.JOB_BYTES),))
    stream = driver.current_stream()
    return {
        "all_reduce": lambda: comm.all_reduce(x),
        "all_reduce_": lambda: comm.all_reduce_(x),
        "all_reduce_, 16 MiB": lambda: comm.all_reduce_(large),
        "all_reduce_norm": lambda: comm.all_reduce_norm(rows, rows, weight),
        "all_gather": lambda: comm.all_gather(x, dim=0, out=whole),
        "reduce_scatter": lambda: comm.reduce_scatter(x, dim=0, out=half),
        "all_to_all": lambda: comm.all_to_all(x, dim=0, out=out),
        "broadcast_": lambda: comm.broadcast_(x, src=0),
        "reduce": lambda: comm.reduce(x, dst=0, out=out),
        "gather": lambda: comm.gather(x, dst=0, dim=0, out=whole),
        "scatter": lambda: comm.scatter(x, src=0, dim=0, out=half),
        "send": lambda: comm.send(x, 1),
        "recv": lambda: comm.recv(out=out, src=1),
        "barrier": comm.barrier,
        "a launch": lambda: launch(stream),
        "a look at the stream": lambda: driver.is_capturing(stream),
    }


def measure(library: str, batches: int) -> dict[str, float]:
    """The cost of each call."""
    gc.disable()
    try:
        with (
            stubbed(library) as (driver, _),
            Board.create(2, 0) as board,
            rank_0_of_2(driver, board) as comm,
        ):
            return {name: best(call, batches) for name, call in calls(comm, driver).items()}
    finally:
        gc.enable()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="end within 10 s")
    rounds = 1 if options.parse_args().quick else 6
    torch.set_num_threads(1)
    least: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = compile_cuda(Path(folder))
        for _ in range(rounds):
            for name, cost in measure(library, 20).items():
                least[name] = min(cost, least.get(name, cost))
    for name, cost in least.items():
        print(f"{name:<22}{cost:8.2f}")


if __name__ == "__main__":
    main()
