"""SmolLM2-135M at tp=2 over shared memory beside torch's gloo, and through a pool and the engine:
python -m benchmarks.decoder [--quick].

Two ranks hold a half of every layer each (6 and 3 of 9 heads) and compute a token of 1 and of 8
sequences in a step; the same worker, once with each transport. Then, through `Engine` and
`WorkerPool`, tokens a second, and the share of the time that no worker computes a step: calls,
replies, scheduling.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.beside_gloo import REPEATS, Model, TimedGroup, compare_transports
from benchmarks.harness import Report, machine, parser
from server.pool import WorkerPool
from server.workers.decoder import DecoderWorker, Engine, Sampling, smollm2
from server.workers.decoder.kv_cache import Row
from server.workers.decoder.sampling import Draw

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from coordinator import GroupCoordinator
    from server.worker import WorkerContext

SEQUENCES = (1, 8)
PROMPT = 32
"""Tokens that a sequence has when its steps are timed."""
GREEDY = Draw(Sampling(), 0.0)


class TimedGroups(NamedTuple):
    """Groups with a tensor-parallel one that is timed."""

    tp: TimedGroup
    pp: GroupCoordinator


class Decoder(Model):
    """Computes a token of each sequence at a time."""

    def __init__(self, context: WorkerContext) -> None:
        self._worker = DecoderWorker(context, smollm2(), threads=1)

    @property
    def layers(self) -> torch.nn.Module:
        return self._worker._stage

    def use(self, tp: TimedGroup) -> None:
        super().use(tp)
        self._worker._groups = TimedGroups(tp, self._worker._groups.pp)

    def prepare(self, size: int) -> None:
        self._size, self._at = size, 0
        self._feed(PROMPT)

    def work(self) -> list[int] | None:
        return self._feed(1)

    def compare(self, other: Any, answer: Any) -> None:
        if answer != other:
            raise ValueError(f"the transports lead to different tokens: {answer}, {other}")

    def _feed(self, count: int) -> list[int] | None:
        """Feed the next ``count`` tokens of each sequence, the same on all ranks."""
        span = range(self._at, self._at + count)
        self._at += count
        rows = []
        for slot in range(self._size):
            tokens = [(slot * 977 + 31 * each) % 40_000 for each in span]
            rows.append(Row(slot, slot, span.start, tokens, GREEDY))
        return self._worker.step(rows)


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


def tell(
    report: Report, engine: Engine, pool: WorkerPool, label: str, size: int, count: int
) -> None:
    """Put what a pool of `TimedWorker` achieves into ``report``, under ``label``."""
    found = [through_a_pool(engine, pool, size, count) for _ in range(REPEATS)]
    seconds, share = (statistics.median(each) for each in zip(*found, strict=True))
    told = {
        "ms/token": 1e3 * seconds,
        "tokens/s": size / seconds,
        "share outside of steps": share,
    }
    print(f"{label}:", *(f"{key} {value:.3g}" for key, value in told.items()), flush=True)
    report.notes[label] = told


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    smollm2()
    report = Report(machine())
    count = 10 if options.quick else 60
    works = dict.fromkeys(SEQUENCES, count)
    compare_transports(report, Decoder, "decoder step", "{size} sequences, 2 ranks", works)
    arguments = {"model": str(smollm2()), "threads": 1}
    with (
        WorkerPool(TimedWorker, tp=2, worker_kwargs=arguments) as pool,
        Engine(pool) as engine,
    ):
        for size in SEQUENCES:
            label = f"through a pool, {size} sequences, 2 ranks"
            tell(report, engine, pool, label, size, count)
    report.finish(options)


if __name__ == "__main__":
    main()
