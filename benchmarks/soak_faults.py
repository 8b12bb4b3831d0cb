"""Faults at random moments in pools that are restarted, while callers ask for real embeddings.

    python -m benchmarks.soak_faults [--faults N] [--pool NAME] [--seed N] [--json FILE]

Four threads embed sentences and compare each answer with sentence-transformers; two of them let
their calls be made again. Meanwhile a worker is killed, stopped, crashes, exits, raises while its
peers wait for it, or loops for ever. Taken is the time from the fault to the first error of a
caller, and to the first right answer to a call that was made after it. After each tenth of the
faults, what the driver and its workers hold is counted. Ends with 1 if an answer was wrong, an
error had no type of ours, or something was left behind.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import signal
import statistics
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from benchmarks.harness import machine
from server.pool import WorkerPool
from server.replicas import Replicas
from server.workers.minilm import MiniLMWorker, ModelFolder, SentenceTokenizer, packaged_model
from shm_broadcast import CoordinatorError
from tests.server.tiny_bert import reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from server.worker import WorkerContext

GRIDS = {"tp=2": (2, 1, 1), "pp=2": (1, 2, 1), "tp=2 x pp=2": (2, 2, 1), "dp=2": (1, 1, 2)}
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV, "SIGSTOP": signal.SIGSTOP}
MISDEEDS = ("os._exit", "exception", "endless loop")
STUCK_AFTER = 1.0
SENTENCES = (
    "The harbour wakes before the sun does.",
    "Salt and wind have peeled the paint.",
    "Jupiter has dozens of moons.",
    "A short one.",
    "",
)
_FORK_SERVER = "pool-forks"
_PATIENCE = 60.0
_NOISE_MIB = 8
_TOLERANCE = 1e-5


class Faulty(MiniLMWorker):
    """The model's worker, which can be told to go wrong."""

    def __init__(self, context: WorkerContext, **options: Any) -> None:
        super().__init__(context, **options)
        self.world = context.groups.world

    def restore(self, context: WorkerContext) -> None:
        """Go on in new groups."""
        super().restore(context)
        self.world = context.groups.world

    def misbehave(self, how: str, rank: int) -> None:
        """Go wrong on ``rank``, while the others wait for it."""
        if self.world.rank == rank:
            if how == "os._exit":
                os._exit(3)
            if how == "exception":
                raise RuntimeError("out of luck")
            while True:
                pass
        self.world.barrier()


@dataclass
class Seen:
    """What the faults of one kind have led to, in seconds from the fault."""

    errors: list[float] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Held:
    """What the driver and all that it has started hold.

    Attributes:
        processes: how many they are.
        descriptors: of all of them.
        threads: of all of them.
        driver: the driver's memory in MiB, without what it shares.
        mib: the memory of all in MiB, each shared page counted once.
    """

    processes: int
    descriptors: int
    threads: int
    driver: int
    mib: int

    @classmethod
    def now(cls) -> Held:
        """As it is once it is the same twice: what was killed may still be ending."""
        before, found = None, cls._count()
        while before is None or astuple(before)[:3] != astuple(found)[:3]:
            time.sleep(0.2)
            before, found = found, cls._count()
        return found

    @classmethod
    def _count(cls) -> Held:
        gc.collect()
        driver = psutil.Process()
        counts = []
        for each in (driver, *driver.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                pss = each.memory_full_info().pss
                counts.append((1, each.num_fds(), each.num_threads(), pss >> 20))
        processes, descriptors, threads, mib = map(sum, zip(*counts, strict=True))
        return cls(processes, descriptors, threads, driver.memory_full_info().uss >> 20, mib)


def _has_grown(held: list[Held]) -> bool:
    """Whether there always was more in the second half; workers' memory depends on their ages."""
    allowed = (0, 0, 0, _NOISE_MIB, math.inf)
    counts = [astuple(each) for each in held]
    early, late = counts[: len(counts) // 2 + 1], counts[len(counts) // 2 :]
    least, most = map(min, zip(*late, strict=True)), map(max, zip(*early, strict=True))
    return any(now > before + more for now, before, more in zip(least, most, allowed, strict=True))


class Callers:
    """Threads that ask and compare."""

    def __init__(self, pool: WorkerPool | Replicas, tokens: list[Any], expected: Any) -> None:
        self._pool = pool
        self._tokens = tokens
        self._expected = expected
        self._over = threading.Event()
        self.answered: list[tuple[float, float]] = []
        self.failed: list[float] = []
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(4)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        draw = random.Random(number)
        while not self._over.is_set():
            rows = draw.sample(range(len(self._tokens)), draw.randint(1, len(self._tokens)))
            began = time.monotonic()
            try:
                call = self._pool.submit(
                    "embed", [self._tokens[row] for row in rows], retry=number % 2 == 0
                )
                found = call.result(_PATIENCE)
            except CoordinatorError:
                self.failed.append(time.monotonic())
            except Exception as error:  # noqa: BLE001 - reported
                self.wrong.append(f"{type(error).__name__}: {error}")
            else:
                if np.abs(found - self._expected[rows]).max() > _TOLERANCE:
                    self.wrong.append(f"rows {rows} are not as expected")
                self.answered.append((began, time.monotonic()))


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=200, help="in all (default 200)")
    parser.add_argument("--pool", choices=GRIDS, help="this one only (default: a quarter each)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    folder = ModelFolder.open(packaged_model())
    expected = reference(packaged_model(), SENTENCES)
    tokens = SentenceTokenizer(folder).encode(SENTENCES, truncate=False).tokens
    draw = random.Random(arguments.seed)
    report: dict[str, Any] = {"machine": machine(), "seed": arguments.seed}
    wrong: list[str] = []
    names = [arguments.pool] if arguments.pool else [*GRIDS]
    for name in names:
        faults = max(arguments.faults // len(names), 1)
        seen, held, complaints = _soak(GRIDS[name], faults, draw, tokens, expected)
        wrong += [f"{name}: {text}" for text in complaints]
        report[name] = {kind: asdict(each) for kind, each in seen.items()}
        report[name]["held"] = [asdict(each) for each in held]
        _show(name, seen)
    for text in wrong:
        print(f"WRONG {text}")
    if arguments.json:
        arguments.json.write_text(json.dumps({**report, "wrong": wrong}, indent=1) + "\n")
    return 1 if wrong else 0


def _soak(
    grid: tuple[int, int, int], faults: int, draw: random.Random, tokens: Any, expected: Any
) -> tuple[dict[str, Seen], list[Held], list[str]]:
    tp, pp, dp = grid
    options: dict[str, Any] = {
        "tp": tp,
        "pp": pp,
        "worker_kwargs": {"model": str(packaged_model()), "threads": 1},
        "restart": "worker",
        "max_restarts": 10 * faults,
        "stuck_after": STUCK_AFTER,
    }
    make = WorkerPool if dp == 1 else partial(Replicas, dp=dp)
    seen: dict[str, Seen] = {}
    held: list[Held] = []
    with make(Faulty, **options) as pool:
        callers = Callers(pool, tokens, expected)
        # Where a rank is alone, nobody waits for it, so an exception breaks nothing.
        kinds = [kind for kind in (*SIGNALS, *MISDEEDS) if tp * pp > 1 or kind != "exception"]
        try:
            for number in range(1, faults + 1):
                kind = draw.choice(kinds)
                time.sleep(draw.uniform(0.0, 0.5))
                each = seen.setdefault(kind, Seen())
                _fault(pool, kind, draw.randrange(tp * pp * dp), callers, each)
                if number % max(faults // 10, 1) == 0:
                    held.append(Held.now())
        finally:
            callers.stop()
    if _has_grown(held):
        callers.wrong.append(f"{held[0]} became {held[-1]}")
    left = [child.name() for child in psutil.Process().children(recursive=True)]
    if {*left} - {_FORK_SERVER}:
        callers.wrong.append(f"left behind: {left}")
    print("\nprocesses, descriptors, threads, MiB of the driver, MiB of all, after each tenth:")
    for now in held:
        print(*astuple(now), sep=", ")
    return seen, held, callers.wrong


def _fault(pool: WorkerPool | Replicas, kind: str, rank: int, callers: Callers, seen: Seen) -> None:
    pools = pool.pools if isinstance(pool, Replicas) else [pool]
    victim = pools[rank % len(pools)]
    rank //= len(pools)
    generation, began = victim.generation, time.monotonic()
    failed = len(callers.failed)
    callers.answered.clear()
    if kind in SIGNALS:
        with suppress(ProcessLookupError):
            os.kill(victim.status()[rank].pid, SIGNALS[kind])
    else:
        victim.submit("misbehave", kind, rank)
    _until(lambda: victim.generation > generation)
    _until(lambda: any(asked > began for asked, _ in callers.answered[:]))
    seen.answers.append(min(at for asked, at in callers.answered[:] if asked > began) - began)
    errors = [at - began for at in callers.failed[failed:] if at > began]
    if errors:
        seen.errors.append(min(errors))


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + _PATIENCE
    while not true():
        if time.monotonic() > end:
            raise TimeoutError("the pool did not recover")
        time.sleep(0.001)


def _show(name: str, seen: dict[str, Seen]) -> None:
    print(f"\n{name:13}  faults   first error, s         first right answer, s")
    print("                        median   worst         median   worst")
    for kind in (*SIGNALS, *MISDEEDS):
        each = seen.get(kind)
        if each is None or not each.answers:
            continue
        errors = each.errors or [float("nan")]
        print(
            f"{kind:13} {len(each.answers):7d} {statistics.median(errors):8.3f} {max(errors):8.3f}"
            f"{statistics.median(each.answers):14.3f} {max(each.answers):8.3f}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
