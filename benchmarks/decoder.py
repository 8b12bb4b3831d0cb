"""SmolLM2-135M at tp=2, over shared memory beside torch's gloo: python -m benchmarks.decoder.

Both transports take turns in two measurements:

- *decoder step*: the worker alone. Two ranks hold a half of every layer (6 and 3 of 9 heads) and
  compute a token of 1 and of 8 sequences.
- *engine*: the whole loop, `Engine` on a `WorkerPool`, one call for each step, 1 and 8 answers
  under way. Pool, engine and calls are the same; only the collectives of the layers differ. The
  notes have the tokens a second, and the share of the time in which no worker computes: calls,
  replies, scheduling.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

import coordinator
from benchmarks.beside_gloo import REPEATS, Model, TimedGroup, compare_transports
from benchmarks.harness import Figure, Report, machine, parser
from server.pool import WorkerPool
from server.workers.decoder import DecoderWorker, Engine, Sampling, smollm2
from server.workers.decoder.decoder_cache import SampleRequest, ScheduledSequence

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from coordinator import GroupCoordinator
    from server.worker import WorkerContext

STEP, LOOP = "decoder step", "engine, ms a token"
SEQUENCES = (1, 8)
PROMPT = 32
"""Tokens that a sequence has when its steps are timed."""
GREEDY = SampleRequest(Sampling(), 0.0)


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
            rows.append(ScheduledSequence(slot, slot, span.start, tokens, GREEDY))
        return self._worker.step(rows)


class TimedWorker(DecoderWorker):
    """Counts the seconds that it computes steps."""

    seconds = 0.0

    def step(self, rows: Sequence[ScheduledSequence]) -> list[int] | None:
        started = time.perf_counter()
        drawn = super().step(rows)
        self.seconds += time.perf_counter() - started
        return drawn

    def spent(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class OverGloo(TimedWorker):
    """Adds up over torch's gloo."""

    def __init__(self, context: WorkerContext, path: str, **arguments: Any) -> None:
        rank = context.groups.world.rank_in_group
        store = dist.FileStore(path, 2)
        groups = coordinator.init(
            tp=2, rank=rank, world_size=2, store=store, backend="gloo", torch_only=True
        )
        super().__init__(replace(context, groups=groups), **arguments)


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


class Loop:
    """An engine on a pool of two workers, and the shares of the time in which none computes."""

    def __init__(self, stack: ExitStack, kind: type[TimedWorker], **arguments: Any) -> None:
        given = {"model": str(smollm2()), "threads": 1, **arguments}
        self._pool = stack.enter_context(WorkerPool(kind, tp=2, worker_kwargs=given))
        self._engine = stack.enter_context(Engine(self._pool))
        self.shares: list[float] = []

    def measure(self, size: int, count: int) -> list[float]:
        """Measure the seconds of a token, with ``size`` answers of ``count`` tokens under way."""
        seconds, share = through_a_pool(self._engine, self._pool, size, count)
        self.shares.append(share)
        return [seconds / size]


def compare_loops(report: Report, loops: dict[str, Loop], size: int, count: int) -> None:
    """Measure the engine over both transports, in turns."""
    label = f"{size} answers, tp=2"
    asks = {name: partial(loop.measure, size, count) for name, loop in loops.items()}
    report.measure(Figure(LOOP, label, asks, unit="ms", repeats=REPEATS))
    for row in report.rows[-len(loops) :]:
        share = statistics.median(loops[row.system].shares)
        loops[row.system].shares.clear()
        told = {"tokens/s": 1e3 / row.median, "share outside of steps": share}
        print(f"  {row.system}:", *(f"{key} {value:.3g}" for key, value in told.items()))
        report.notes[f"engine, {label}, {row.system}"] = told


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    smollm2()
    report = Report(machine())
    count = 10 if options.quick else 60
    works = dict.fromkeys(SEQUENCES, count)
    if options.only in STEP:
        compare_transports(report, Decoder, STEP, "{size} sequences, 2 ranks", works)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        loops = {
            "ours": Loop(stack, TimedWorker),
            "gloo": Loop(stack, OverGloo, path=f"{folder}/store"),
        }
        for size in SEQUENCES:
            if options.only in f"{LOOP} {size} answers":
                compare_loops(report, loops, size, count)
    report.finish(options)


if __name__ == "__main__":
    main()
