"""MiniLM at tp=2 over shared memory beside torch's gloo: python -m benchmarks.minilm [--quick].

Two ranks hold a half of every layer each and embed batches of 1, 8 and 64 sentences.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.beside_gloo import Model, compare_transports
from benchmarks.harness import Report, machine, parser
from server.workers.minilm import MiniLMWorker, ModelFolder, SentenceTokenizer, packaged_model

if TYPE_CHECKING:
    import torch

    from server.worker import WorkerContext

BATCHES = (1, 8, 64)
SENTENCES = Path(__file__).parents[1] / "examples" / "sentences.txt"


class MiniLM(Model):
    """Embeds a batch of sentences at a time."""

    def __init__(self, context: WorkerContext) -> None:
        self._worker = MiniLMWorker(context, packaged_model(), threads=1)
        self._tokenizer = SentenceTokenizer(ModelFolder.open(packaged_model()))

    @property
    def layers(self) -> torch.nn.Module:
        return self._worker._stage

    def prepare(self, size: int) -> None:
        self._sentences = batch(size)

    def work(self) -> np.ndarray | None:
        return self._worker.embed(self._tokenizer.encode(self._sentences, truncate=True).tokens)

    def compare(self, other: Any, answer: Any) -> None:
        if answer is not None:  # this rank has the answer
            np.testing.assert_allclose(answer, other, atol=1e-5)


def batch(size: int) -> list[str]:
    """``size`` sentences, the first ones again if there are too few."""
    lines = SENTENCES.read_text().splitlines()
    sentences = [line for line in lines if line.strip()]
    return [sentences[index % len(sentences)] for index in range(size)]


def main() -> None:
    options = parser(__doc__ or "").parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    report = Report(machine())
    counts = {size: max((20 if options.quick else 100) // size, 3) for size in BATCHES}
    compare_transports(report, MiniLM, "embed", "batch {size}, 2 ranks", counts)
    report.finish(options)


if __name__ == "__main__":
    main()
