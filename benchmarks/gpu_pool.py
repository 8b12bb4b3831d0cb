"""A pool of an encoder's workers on CUDA: ``python -m benchmarks.gpu_pool --tp 2``.

Checks the embeddings against one process on the CPU, then has every rank capture the model's
step, with its all-reduces, in a CUDA graph and replay it, as a decoding loop would. Ends with 1
if anything differs by more than the dtype allows.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_environment import run_side_by_side
from benchmarks.gpu_model import TinyWorker, inputs, reference
from benchmarks.gpu_world import device_facts, require_gpu
from server.config import TOLERANCES
from server.pool import WorkerPool

TIMEOUT = 120.0
SENTENCES = 32


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tp", type=int, default=2)
    options.add_argument("--dtype", choices=tuple(TOLERANCES), default="float32")
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--json", type=Path, help="write the report there")
    arguments = options.parse_args()
    run_side_by_side()
    missing = require_gpu()
    if missing:
        print(f"benchmarks.gpu_pool: error: {missing}", file=sys.stderr)
        return 2
    tokens = inputs(SENTENCES)
    expected = reference(tokens)
    with WorkerPool(
        TinyWorker,
        tp=arguments.tp,
        device="cuda",
        share_gpu=True,
        worker_kwargs={"dtype": arguments.dtype},
        start_timeout=TIMEOUT,
    ) as pool:
        vectors = pool.call("embed", tokens, timeout=TIMEOUT)
        steps: list[dict[str, float]] = pool.collective_rpc(
            "steps", TIMEOUT, (tokens, arguments.steps)
        )
        explained = pool.call("explained", timeout=TIMEOUT)
    allowed = TOLERANCES[arguments.dtype]
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
