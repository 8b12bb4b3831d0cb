"""The part of the demo that needs a pool: start it, embed some lines, end it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from server import demo_text

if TYPE_CHECKING:
    from collections.abc import Callable

    import tqdm

    from server.demo import Plan
    from server.workers.minilm import Placed

REQUEST_LINES = 1024
WARM_UP_LINES = 64


@dataclass(frozen=True, slots=True)
class Embedded:
    """What the pool made of the lines.

    Attributes:
        places: the workers, by rank.
        vectors: float32 [lines, hidden].
        tokens: int64 [lines], special tokens included.
        start_seconds: from nothing to every worker ready.
        seconds: for all lines, after a warm-up.
    """

    places: list[Placed]
    vectors: np.ndarray
    tokens: np.ndarray
    start_seconds: float
    seconds: float


def embed(plan: Plan, say: Callable[[str], None]) -> Embedded:
    """Start the pool, embed the lines, end the pool.

    Args:
        plan: what to run.
        say: shows the grid of ranks, once they are ready.

    Raises:
        CoordinatorError: a worker failed, was lost or took too long; none is left running.
    """
    model = plan.model
    began = time.perf_counter()
    with (
        _bar("loading weights", model.tp * model.pp) as bar,
        model.start_pool(plan.timeout, on_progress=_Loading(bar).report) as pool,
    ):
        bar.close()
        ready = time.perf_counter()
        places: list[Placed] = pool.collective_rpc("placed", timeout=plan.timeout)
        say(demo_text.grid(places, ready - began))
        pool.call("embed", plan.lines[:WARM_UP_LINES], timeout=plan.timeout)
        warm = time.perf_counter()
        parts = []
        with _bar("embedding", len(plan.lines)) as bar:
            for start in range(0, len(plan.lines), REQUEST_LINES):
                lines = plan.lines[start : start + REQUEST_LINES]
                parts.append(pool.call("embed_counted", lines, timeout=plan.timeout))
                bar.update(len(lines))
        seconds = time.perf_counter() - warm
    vectors, tokens = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Embedded(places, vectors, tokens, ready - began, seconds)


class _Loading:
    """How much of their weights all workers have read, each counting the same, on a bar."""

    def __init__(self, bar: tqdm.tqdm[NoReturn]) -> None:
        self._bar = bar
        self._shares: dict[int, float] = {}

    def report(self, rank: int, done: int, total: int, _what: str) -> None:
        self._shares[rank] = done / total if total else 1.0
        self._bar.update(sum(self._shares.values()) - self._bar.n)


def _bar(what: str, total: int) -> tqdm.tqdm[NoReturn]:
    """A progress bar on stderr, if that is a terminal; it goes away when closed."""
    import tqdm  # noqa: PLC0415

    return tqdm.tqdm(
        total=total,
        disable=None,
        leave=False,
        bar_format=f"{what} {{percentage:3.0f}}%|{{bar}}| {{elapsed}}",
    )
