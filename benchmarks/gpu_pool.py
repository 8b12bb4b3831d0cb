"""The pool with its embeddings worker on CUDA: ``python -m benchmarks.gpu_pool --tp 2``.

Checks the embeddings against one process on the CPU, then has every rank capture the model's
step, with its all-reduces, in a CUDA graph and replay it, as a decoding loop would. Ends with 1
if anything differs by more than the dtype allows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_world import device_facts, require_gpu
from server.commands import demo
from server.defaults import BATCH_TOKENS, DTYPES
from server.pool import WorkerPool
from server.workers.minilm import (
    MiniLMWorker,
    ModelFolder,
    SentenceTokenizer,
    packaged_model,
)
from server.workers.minilm.packing import arrange, make_batches

TIMEOUT = 120.0


class StepWorker(MiniLMWorker):
    """Also captures one step of its stage, and replays it."""

    @torch.inference_mode()
    def steps(self, tokens: list[np.ndarray], count: int) -> dict[str, float]:
        """How far replays are from an eager step, and the seconds of each. One stage only."""
        batch = next(make_batches([len(each) for each in tokens], BATCH_TOKENS))
        ids = self._input(batch, tokens)
        arranged = arrange(batch.lengths, self._device)
        eager = self._stage(ids, arranged)
        graph = torch.cuda.CUDAGraph()
        with (
            self._groups.tp.graph_capture() as context,
            torch.cuda.graph(graph, stream=context.stream),
        ):
            captured = self._stage(ids, arranged)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            graph.replay()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / count
        difference = float((captured - eager).abs().max())
        del graph
        return {"difference": difference, "seconds": seconds}

    def explained(self) -> str:
        """What carries out the collectives."""
        return str(self._groups.tp.explain())


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tp", type=int, default=2)
    options.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--json", type=Path, help="write the report there")
    arguments = options.parse_args()
    missing = require_gpu()
    if missing:
        print(f"benchmarks.gpu_pool: error: {missing}", file=sys.stderr)
        return 2
    folder = ModelFolder.open(packaged_model())
    lines = demo.read_lines(demo._packaged_text())
    tokens = SentenceTokenizer(folder).encode(lines, truncate=True).tokens
    expected = demo.reference(folder, lines)
    with WorkerPool(
        StepWorker,
        tp=arguments.tp,
        device="cuda",
        share_gpu=True,
        worker_kwargs={"model": str(folder.path), "dtype": arguments.dtype},
        start_timeout=TIMEOUT,
    ) as pool:
        vectors = pool.call("embed", tokens, timeout=TIMEOUT)
        steps: list[dict[str, float]] = pool.collective_rpc(
            "steps", TIMEOUT, (tokens[:32], arguments.steps)
        )
        explained = pool.call("explained", timeout=TIMEOUT)
    allowed = DTYPES[arguments.dtype]
    found: dict[str, Any] = {
        **device_facts(),
        "tp": arguments.tp,
        "dtype": arguments.dtype,
        "max_abs_diff": float(np.abs(vectors - expected).max()),
        "allowed": allowed,
        "captured": steps,
        "explained": explained.splitlines(),
    }
    print(json.dumps(found, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    right = found["max_abs_diff"] <= allowed and all(
        each["difference"] <= allowed for each in steps
    )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
