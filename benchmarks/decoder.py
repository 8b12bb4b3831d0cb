"""SmolLM2-135M at tp=2 over shared memory beside torch's gloo, and through a pool and the engine:
python -m benchmarks.decoder [--quick].

Two ranks hold a half of every layer each (6 and 3 of 9 heads) and compute a token of 1 and of 8
sequences in a step; the same worker, once with each transport. Told are the share of the time that
is spent in collectives, waiting for the other rank included; and, through `Engine` and
`WorkerPool`, tokens a second, and the share of the time that no worker computes a step: calls,
replies, scheduling.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import coordinator
from benchmarks.harness import Report, machine, parser
from benchmarks.rank_processes import RankProcesses
from server.pool import WorkerPool
from server.worker import WorkerContext
from server.workers.decoder import DecoderWorker, Engine, Sampling, smollm2
from server.workers.decoder.kv_cache import Row
from server.workers.decoder.sampling import Draw
from server.workers.parallel import ShardedModule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from coordinator import GroupCoordinator

BATCHES = (1, 8)
SYSTEMS = {"ours": False, "gloo": True}
REPEATS = 5
PROMPT = 32
"""Tokens that a sequence has when its steps are timed."""
GREEDY = Draw(Sampling(), 0.0)


@dataclass
class Timed:
    """A group whose collectives are timed.

    Attributes:
        group: the group.
        seconds: spent in them so far.
    """

    group: GroupCoordinator
    seconds: float = field(default=0.0)

    def all_reduce_(self, x: torch.Tensor) -> Any:
        return self._timed(self.group.all_reduce_, x)

    def gather(self, x: torch.Tensor, dst: int) -> Any:
        return self._timed(self.group.gather, x, dst)

    def _timed(self, verb: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        answer = verb(*arguments)
        self.seconds += time.perf_counter() - started
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)


@dataclass(frozen=True)
class TimedGroups:
    """Groups with a tensor-parallel one that is timed."""

    tp: Timed
    pp: GroupCoordinator


class Model:
    """One rank's half of the model, over one transport."""

    def __init__(self, rank: int, path: str, *, torch_only: bool) -> None:
        store = dist.FileStore(path, 2)
        groups = coordinator.init(
            tp=2, rank=rank, world_size=2, store=store, backend="gloo", torch_only=torch_only
        )
        context = WorkerContext(groups, torch.device("cpu"), lambda *_: None)
        self._worker = DecoderWorker(context, smollm2(), threads=1)
        self._tp = Timed(groups.tp)
        self._worker._groups = TimedGroups(self._tp, groups.pp)
        for module in self._worker._stage.modules():
            if isinstance(module, ShardedModule):
                module.group = self._tp

    def measure(self, size: int, count: int) -> tuple[list[float], float]:
        """Seconds for each of ``count`` steps, and the share of collectives in them."""
        self.step(size, 0, PROMPT)
        samples = []
        self._tp.seconds = 0.0
        for at in range(PROMPT, PROMPT + count):
            self._tp.group.barrier()
            started = time.perf_counter()
            self.step(size, at, 1)
            samples.append(time.perf_counter() - started)
        return samples, self._tp.seconds / sum(samples)

    def step(self, size: int, start: int, count: int) -> list[int] | None:
        """Feed ``count`` tokens of each sequence, the same on all ranks."""
        tokens = range(start, start + count)
        return self._worker.step(
            [
                Row(slot, start, [(slot * 977 + 31 * at) % 40_000 for at in tokens], GREEDY)
                for slot in range(size)
            ]
        )


def serve(rank: int, path: str, requests: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    models = {
        name: Model(rank, f"{path}-{name}", torch_only=torch_only)
        for name, torch_only in SYSTEMS.items()
    }
    found = [model.step(8, 0, PROMPT) for model in models.values()]
    if found[0] != found[1]:
        raise ValueError(f"the transports lead to different tokens: {found}")
    while (request := requests.recv()) is not None:
        system, size, count = request
        requests.send(models[system].measure(size, count))


class TimedWorker(DecoderWorker):
    """Counts the seconds that it computes steps."""

    seconds = 0.0

    def step(self, rows: Sequence[Row]) -> list[int] | None:
        started = time.perf_counter()
        drawn = super().step(rows)
        self.seconds += time.perf_counter() - started
        return drawn

    def spent(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


def through_a_pool(engine: Engine, pool: WorkerPool, size: int, count: int) -> tuple[float, float]:
    """Seconds for a token of each of ``size`` answers, and the share that no worker computes."""
    asked = [
        engine.submit(range(40 * slot, 40 * slot + PROMPT), count + 1, ignore_ends=True)
        for slot in range(size)
    ]
    answers = [iter(each) for each in asked]
    for answer in answers:
        next(answer)  # the prompts have been read
    pool.collective_rpc("spent")
    started = time.perf_counter()
    for answer in answers:
        for _ in range(count):
            next(answer)
    seconds = time.perf_counter() - started
    return seconds / count, 1 - max(pool.collective_rpc("spent")) / seconds


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    smollm2()
    report = Report(machine())
    count = 10 if options.quick else 60
    with (
        tempfile.TemporaryDirectory() as folder,
        RankProcesses(2, serve, f"{folder}/s") as ranks,
    ):

        def ask(shares: list[float], *request: Any) -> list[float]:
            samples, share = ranks.ask(*request)
            shares.append(share)
            return list(samples)

        for size in BATCHES:
            params = f"{size} sequences, 2 ranks"
            shares: dict[str, list[float]] = {system: [] for system in SYSTEMS}
            asks: dict[str, Callable[[], list[float]]] = {
                system: partial(ask, shares[system], system, size, count) for system in SYSTEMS
            }
            report.measure("decoder step", params, asks, unit="ms", repeats=REPEATS)
            told = {system: statistics.median(each) for system, each in shares.items()}
            print("  in collectives:", *(f"{name} {100 * x:.1f} %" for name, x in told.items()))
            report.notes[f"share of collectives, {params}"] = told
    arguments = {"model": str(smollm2()), "threads": 1}
    with (
        WorkerPool(TimedWorker, tp=2, worker_kwargs=arguments) as pool,
        Engine(pool) as engine,
    ):
        for size in BATCHES:
            found = [through_a_pool(engine, pool, size, count) for _ in range(REPEATS)]
            seconds, share = (statistics.median(each) for each in zip(*found, strict=True))
            told = {
                "ms/token": 1e3 * seconds,
                "tokens/s": size / seconds,
                "share outside of steps": share,
            }
            print(f"through a pool, {size} sequences:", *(f"{k} {v:.3g}" for k, v in told.items()))
            report.notes[f"through a pool, {size} sequences, 2 ranks"] = told
    report.finish(options)


if __name__ == "__main__":
    main()
