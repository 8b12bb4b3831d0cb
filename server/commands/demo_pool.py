"""The part of the demo that needs a pool: start it, embed some lines, end it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from ..defaults import REQUEST_LINES
from ..pool import WorkerPool
from . import demo_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import tqdm

    from ..workers.minilm import EncodedText, Placed
    from .read_model import Model

WARM_UP_LINES = 64


@dataclass(frozen=True, slots=True)
class DemoEmbeddings:
    """The embeddings of the lines, and how long they took.

    Attributes:
        places: what each worker computes, by rank.
        vectors: the embeddings, float32 [lines, hidden].
        tokens: the number of tokens of each line, special ones included; int64 [lines].
        truncated: the indexes of the lines that were longer than the model takes.
        start_seconds: how long the workers took to start.
        seconds: how long all lines took, after a warm-up.
    """

    places: list[Placed]
    vectors: np.ndarray
    tokens: np.ndarray
    truncated: list[int]
    start_seconds: float
    seconds: float


def embed(
    model: Model, lines: Sequence[str], timeout: float, say: Callable[[str], None]
) -> DemoEmbeddings:
    """Start the pool, embed the lines, end the pool.

    Args:
        model: what the workers compute, on how many ranks.
        lines: what they embed.
        timeout: seconds that the start, and each call, may take.
        say: shows the grid of ranks, once they are ready.

    Raises:
        CoordinatorError: a worker failed, was lost or took too long; none is left running.
    """
    began = time.perf_counter()
    with (
        _bar("loading weights", model.workers.tp * model.workers.pp) as bar,
        WorkerPool(**model.arguments(timeout), on_progress=_Loading(bar).report) as pool,
    ):
        bar.close()
        ready = time.perf_counter()
        places: list[Placed] = pool.collective_rpc("placed", timeout=timeout)
        say(demo_text.grid(places, ready - began))
        tokenizer = model.tokenizer

        def embed_from(start: int, count: int) -> tuple[EncodedText, np.ndarray]:
            chunk = lines[start : start + count]
            encoded = tokenizer.encode(chunk, truncate=True, first=start)
            return encoded, pool.call("embed", encoded.tokens, timeout=timeout)

        embed_from(0, WARM_UP_LINES)
        warm = time.perf_counter()
        parts = []
        with _bar("embedding", len(lines)) as bar:
            for start in range(0, len(lines), REQUEST_LINES):
                parts.append(embed_from(start, REQUEST_LINES))
                bar.update(len(parts[-1][1]))
        seconds = time.perf_counter() - warm
    return DemoEmbeddings(
        places,
        np.concatenate([vectors for _, vectors in parts]),
        np.array([len(tokens) for encoded, _ in parts for tokens in encoded.tokens]),
        [line for encoded, _ in parts for line in encoded.truncated],
        ready - began,
        seconds,
    )


class _Loading:
    """Shows on a progress bar how much of their weights the workers have read, on average."""

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
