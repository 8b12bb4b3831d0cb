"""A model at tp=2 whose two ranks do the same work over shared memory and over torch's gloo.

Reported are the seconds of each piece of work, and the share of them that is spent in collectives,
waiting for the other rank included.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import coordinator
from benchmarks.harness import Figure
from benchmarks.rank_processes import RankProcesses
from server.worker import WorkerContext
from server.workers.parallel import regroup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from benchmarks.harness import Report
    from coordinator import GroupCoordinator

TRANSPORTS = {"ours": False, "gloo": True}
"""Whether only torch's groups are used."""
REPEATS = 5


@dataclass
class TimedGroup:
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


class Model(ABC):
    """One rank's half of a model, over one transport."""

    @abstractmethod
    def __init__(self, context: WorkerContext) -> None:
        """Load the rank's half."""

    @property
    @abstractmethod
    def layers(self) -> torch.nn.Module:
        """What does the collectives."""

    @abstractmethod
    def prepare(self, size: int) -> None:
        """Make ready for pieces of work of ``size``."""

    @abstractmethod
    def work(self) -> Any:
        """Do the next piece of work; give the answer."""

    def use(self, tp: TimedGroup) -> None:
        """Do collectives through ``tp``."""
        regroup(self.layers, tp)

    @abstractmethod
    def compare(self, other: Any, answer: Any) -> None:
        """Raise if two transports' answers differ."""


class OverOneTransport:
    """One rank's half of a model, and the group that it uses."""

    def __init__(self, kind: type[Model], rank: int, path: str, *, torch_only: bool) -> None:
        store = dist.FileStore(path, 2)
        groups = coordinator.init(
            tp=2, rank=rank, world_size=2, store=store, backend="gloo", torch_only=torch_only
        )
        self.model = kind(WorkerContext(groups, torch.device("cpu"), lambda *_: None))
        self._tp = TimedGroup(groups.tp)
        self.model.use(self._tp)

    def measure(self, size: int, count: int) -> tuple[list[float], float]:
        """Seconds of each of ``count`` pieces of work, and the share of collectives in them."""
        self.model.prepare(size)
        samples = []
        self._tp.seconds = 0.0
        for _ in range(count):
            self._tp.group.barrier()
            started = time.perf_counter()
            self.model.work()
            samples.append(time.perf_counter() - started)
        return samples, self._tp.seconds / sum(samples)

    def answer(self, size: int) -> Any:
        self.model.prepare(size)
        return self.model.work()


def serve(rank: int, kind: type[Model], path: str, requests: Connection) -> None:
    """A rank's process: measure what is asked for, until nothing is."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    over = {
        name: OverOneTransport(kind, rank, f"{path}-{name}", torch_only=torch_only)
        for name, torch_only in TRANSPORTS.items()
    }
    ours, other = (each.answer(8) for each in over.values())
    over["ours"].model.compare(other, ours)
    while (request := requests.recv()) is not None:
        transport, size, count = request
        requests.send(over[transport].measure(size, count))


def compare_transports(
    report: Report, kind: type[Model], work: str, params: str, counts: dict[int, int]
) -> None:
    """Measure a model over both transports.

    Args:
        report: gets rows, and the shares of collectives as notes.
        kind: the model.
        work: the rows' name.
        params: the rows' parameters, with ``{size}``.
        counts: how many pieces of work are timed at once, by their size.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        RankProcesses(2, serve, kind, f"{folder}/s") as ranks,
    ):
        for size, count in counts.items():
            shares: dict[str, list[float]] = {name: [] for name in TRANSPORTS}
            asks = {
                name: partial(_ask, ranks, shares[name], (name, size, count)) for name in TRANSPORTS
            }
            named = params.format(size=size)
            report.measure(Figure(work, named, asks, unit="ms", repeats=REPEATS))
            told = {name: statistics.median(each) for name, each in shares.items()}
            print("  in collectives:", *(f"{name} {100 * x:.1f} %" for name, x in told.items()))
            report.notes[f"share of collectives, {named}"] = told


def _ask(ranks: RankProcesses, shares: list[float], request: tuple[Any, ...]) -> Sequence[float]:
    samples, share = ranks.ask(*request)
    shares.append(share)
    return list(samples)
