"""A call that does nothing, on all workers of a pool: python -m benchmarks.pool [--quick].

Two workers; the driver calls them back to back, every 20 ms, and after 5 s of silence. Then pools
are started, one after another, each up to the end of its first call. vLLM's
executor cannot be built without a model, so its loop is followed over its queue: one broadcast of
``(method, args, kwargs, output_rank)``, one reply from each worker. Ray's and Monarch's actors are
called all at once, by the quickest means that each has: `benchmarks.call_peers`.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.futex import Futex
from benchmarks.harness import Figure, Report, machine, parser
from benchmarks.pool_peers import EXECUTOR, REQUEST, WORKERS, actors, executor
from benchmarks.queue_base import System, require
from server import PoolConfig, WorkerPool

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping
    from multiprocessing.connection import Connection

    from benchmarks.remote import Remote
    from server import WorkerContext

SLOWER = 10
"""How many times fewer calls actors get, to take as long as the others."""
MOST_SECONDS = 3.0
"""What a system may take for a figure before it gets no more repeats; pauses come on top."""


class Nothing:
    """A worker with a method that does nothing."""

    def __init__(self, _: WorkerContext) -> None:
        torch.set_num_threads(1)

    def no_op(self) -> None:
        """Do nothing."""


class Pipes:
    """The standard library's way: a pipe to each worker, written and read in turn."""

    def __init__(self) -> None:
        spawn = mp.get_context("spawn")
        pairs = [spawn.Pipe() for _ in range(WORKERS)]
        self._ends = [ours for ours, _ in pairs]
        self._processes = [spawn.Process(target=obey, args=(theirs,)) for _, theirs in pairs]
        for process in self._processes:
            process.start()
        self.call()

    def call(self) -> list[Any]:
        for end in self._ends:
            end.send(REQUEST)
        return [end.recv()[1] for end in self._ends]

    def stop(self) -> None:
        for end in self._ends:
            end.send(None)
        for process in self._processes:
            process.join(30)


def obey(end: Connection) -> None:
    worker = Nothing.__new__(Nothing)
    while (request := end.recv()) is not None:
        method, args, kwargs, _ = request
        end.send((True, getattr(worker, method)(*args, **kwargs)))


def ask(system: System) -> list[Any]:
    """Ask all readers for nothing."""
    system.send("echo", None)
    return system.replies()


def timed(call: Callable[[], list[Any]], idle: float, count: int) -> list[float]:
    """Seconds of each of ``count`` calls, with ``idle`` seconds before each."""
    samples = []
    for _ in range(count):
        if idle:
            time.sleep(idle)
        began = time.perf_counter()
        replies = call()
        samples.append(time.perf_counter() - began)
        require(replies == [None] * WORKERS, f"the replies are {replies}")
    return samples


def run(report: Report, options: argparse.Namespace) -> None:
    """All rhythms, all systems in turn."""
    quick = options.quick
    peers = executor(report, options) | actors(report, options)
    pipes = Pipes()
    futex = Futex()
    futex.start(WORKERS)
    try:
        with WorkerPool(Nothing, tp=WORKERS) as pool:
            calls: Mapping[str, Callable[[], list[Any]]] = {
                "ours": lambda: pool.collective_rpc("no_op"),
                "multiprocessing's pipes": pipes.call,
                futex.name: lambda: ask(futex),
            }
            repeats = 2 if quick else 5
            rhythms = (
                ("back to back", 0.0, 300 if quick else 3000),
                ("every 20 ms", 0.02, 50 if quick else 100),
                ("after idling", 0.5 if quick else 5.0, 1),
            )
            report.measure(
                *(
                    rhythm(params, idle, count, calls, peers, repeats)
                    for params, idle, count in rhythms
                    if options.only in params
                )
            )
            # While a pool is there, a fork server has been started: this is a later pool's start.
            if options.only in "started":
                ways = {"ours": lambda: starts(True), "ours, spawned": lambda: starts(False)}
                report.measure(Figure("no-op pool", "started", ways, repeats=repeats))
    finally:
        pipes.stop()
        futex.stop()
        for each in peers.values():
            each.stop()


def starts(fork: bool) -> list[float]:
    """Seconds of the start of a pool, up to the end of its first call."""
    began = time.perf_counter()
    with WorkerPool(Nothing, tp=WORKERS, config=PoolConfig(fork=fork)) as pool:
        pool.collective_rpc("no_op")
        return [time.perf_counter() - began]


def rhythm(
    params: str,
    idle: float,
    count: int,
    calls: Mapping[str, Callable[[], list[Any]]],
    peers: Mapping[str, Remote],
    repeats: int,
) -> Figure:
    """Calls in one rhythm."""

    def asking(call: Callable[[], list[Any]]) -> Callable[[], list[float]]:
        return lambda: timed(call, idle, count)

    def asking_peer(name: str) -> Callable[[], list[float]]:
        few = count if idle or name == EXECUTOR else count // SLOWER
        sent = REQUEST if name == EXECUTOR else None
        work = ("wake", None, sent, idle, few) if idle else ("echo", None, sent, few)
        return lambda: peers[name].ask(*work)

    systems = {name: asking(call) for name, call in calls.items()}
    systems |= {name: asking_peer(name) for name in peers}
    pauses = idle * count * (1 + repeats)
    seconds = MOST_SECONDS + pauses
    return Figure("no-op collective_rpc", params, systems, repeats=repeats, seconds=seconds)


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__ or "").parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    report = Report(machine(), file=options.json)
    run(report, options)
    report.finish(options)


if __name__ == "__main__":
    main()
