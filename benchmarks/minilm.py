"""MiniLM at tp=2 over shared memory beside torch's gloo: python -m benchmarks.minilm [--quick].

Two ranks hold a half of every layer each and embed batches of 1, 8 and 64 sentences; the same
model, once with each transport. The share of the time that is spent in all-reduces, waiting for the
other rank included, is told for each.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

import coordinator
from benchmarks.harness import Report, machine, parser
from benchmarks.rank_processes import RankProcesses
from server.worker import WorkerContext
from server.workers.minilm import MiniLMWorker, ModelFolder, SentenceTokenizer, packaged_model
from server.workers.parallel import ShardedModule

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from coordinator import GroupCoordinator

BATCHES = (1, 8, 64)
SYSTEMS = {"ours": False, "gloo": True}
REPEATS = 5


@dataclass
class Timed:
    """A group whose all-reduces are timed.

    Attributes:
        group: the group.
        seconds: spent in them so far.
    """

    group: GroupCoordinator
    seconds: float = field(default=0.0)

    def all_reduce_(self, x: torch.Tensor) -> Any:
        started = time.perf_counter()
        answer = self.group.all_reduce_(x)
        self.seconds += time.perf_counter() - started
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)


class Model:
    """One rank's half of the model, over one transport."""

    def __init__(self, rank: int, path: str, *, torch_only: bool) -> None:
        store = dist.FileStore(path, 2)
        groups = coordinator.init(
            tp=2, rank=rank, world_size=2, store=store, backend="gloo", torch_only=torch_only
        )
        context = WorkerContext(groups, torch.device("cpu"), lambda *_: None)
        self._worker = MiniLMWorker(context, packaged_model(), threads=1)
        self._tokenizer = SentenceTokenizer(ModelFolder.open(packaged_model()))
        self._tp = Timed(groups.tp)
        for module in self._worker._stage.modules():
            if isinstance(module, ShardedModule):
                module.group = self._tp

    def measure(self, sentences: list[str], count: int) -> tuple[list[float], float]:
        """Seconds for each of ``count`` batches, and the share of all-reduces in them."""
        samples = []
        self._tp.seconds = 0.0
        for _ in range(count):
            self._tp.group.barrier()
            started = time.perf_counter()
            self.embed(sentences)
            samples.append(time.perf_counter() - started)
        return samples, self._tp.seconds / sum(samples)

    def embed(self, sentences: list[str]) -> np.ndarray | None:
        return self._worker.embed(self._tokenizer.encode(sentences, truncate=True).tokens)


def serve(rank: int, path: str, requests: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    models = {
        name: Model(rank, f"{path}-{name}", torch_only=torch_only)
        for name, torch_only in SYSTEMS.items()
    }
    found = [model.embed(batch(8)) for model in models.values()]
    if found[0] is not None:  # the rank that has the answer
        np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    while (request := requests.recv()) is not None:
        system, size, count = request
        requests.send(models[system].measure(batch(size), count))


def batch(size: int) -> list[str]:
    """``size`` sentences, the first ones again if there are too few."""
    lines = files("server").joinpath("data", "sentences.txt").read_text().splitlines()
    sentences = [line for line in lines if line.strip()]
    return [sentences[index % len(sentences)] for index in range(size)]


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    report = Report(machine())
    with (
        tempfile.TemporaryDirectory() as folder,
        RankProcesses(2, serve, f"{folder}/s") as ranks,
    ):

        def ask(shares: list[float], *request: Any) -> list[float]:
            samples, share = ranks.ask(*request)
            shares.append(share)
            return list(samples)

        for size in BATCHES:
            count = max((20 if options.quick else 100) // size, 3)
            shares: dict[str, list[float]] = {system: [] for system in SYSTEMS}
            asks: dict[str, Callable[[], list[float]]] = {
                system: partial(ask, shares[system], system, size, count) for system in SYSTEMS
            }
            params = f"batch {size}, 2 ranks"
            report.measure("embed", params, asks, unit="ms", repeats=REPEATS)
            told = {system: statistics.median(each) for system, each in shares.items()}
            print("  in all-reduces:", *(f"{name} {100 * x:.0f} %" for name, x in told.items()))
            report.notes[f"share of all-reduces, {params}"] = told
    report.finish(options)


if __name__ == "__main__":
    main()
