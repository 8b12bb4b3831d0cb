"""Embed sentences with MiniLM on a pool of workers, and compare with one process.

    python examples/demo.py [--tp N] [--pp N] [--input FILE] [--model DIR] [--out FILE.npy]

Each worker holds a part of every layer (tp) of some layers (pp). The reference is
sentence-transformers.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from group_coordinator import PoolConfig, WorkerPool
from group_coordinator.config import TOLERANCES
from group_coordinator.workers.minilm import (
    MiniLMWorker,
    ModelFolder,
    Placed,
    SentenceTokenizer,
    packaged_model,
)

from shm_broadcast import CoordinatorError

AT_ONCE = 1024
"""Sentences of one call."""


def main(argv: Sequence[str] | None = None) -> int:
    """Embed, print, compare; return 0 if the vectors equal the reference's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--tp", type=int, default=2, help="parts of every layer (default 2)")
    add("--pp", type=int, default=2, help="pipeline stages (default 2)")
    add("--model", type=Path, help="a BERT-type sentence-transformers folder (default: MiniLM)")
    add("--input", type=Path, default=Path(__file__).with_name("sentences.txt"),
        help="UTF-8 text, one sentence a line")  # fmt: skip
    add("--out", type=Path, help="file for the embeddings, float32 [sentences, hidden]")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--share-gpu", action="store_true", help="let workers share GPUs")
    add("--dtype", choices=tuple(TOLERANCES), default="float32")
    try:
        return run(parser.parse_args(argv))
    except (CoordinatorError, ImportError, OSError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def run(options: argparse.Namespace) -> int:
    """Start the pool, embed the lines, and print the results."""
    folder = ModelFolder.open(options.model or packaged_model())
    folder.bert.check_parallel(options.tp, options.pp)
    lines = [
        text for line in options.input.read_text("utf-8").split("\n") if (text := line.strip())
    ]
    if not lines:
        raise ValueError(f"{options.input}: holds no text")
    tokenizer, workers = SentenceTokenizer(folder), options.tp * options.pp
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    print(f"model  {folder.path}\npool   tp={options.tp} x pp={options.pp}: {workers} workers on "
          f"{options.device}, threads of each: {threads}", flush=True)  # fmt: skip
    began = time.perf_counter()
    with WorkerPool(
        MiniLMWorker,
        tp=options.tp,
        pp=options.pp,
        device=options.device,
        share_gpu=options.share_gpu,
        worker_kwargs={"model": str(folder.path), "threads": threads, "dtype": options.dtype},
        config=PoolConfig(preload=(MiniLMWorker.__module__,)),
    ) as pool:
        show_ranks(pool.collective_rpc("placed"), options.tp, time.perf_counter() - began)
        pool.call("embed", tokenizer.encode(lines[:64], truncate=True).tokens)  # warm up
        began = time.perf_counter()
        encoded = tokenizer.encode(lines, truncate=True)
        calls = [encoded.tokens[at : at + AT_ONCE] for at in range(0, len(lines), AT_ONCE)]
        vectors = np.concatenate([pool.call("embed", tokens) for tokens in calls])
        seconds = time.perf_counter() - began
    print(f"embedded {len(lines)} sentences ({sum(map(len, encoded.tokens))} tokens) in "
          f"{seconds:.3f} s: {len(lines) / seconds:.1f} sentences/s")  # fmt: skip
    for line in encoded.truncated:
        print(f"sentence {line + 1} is longer than {folder.max_length} tokens: it was cut")
    show_neighbours(lines, vectors)
    if options.out is not None:
        np.save(options.out, vectors)
    difference = float(np.abs(vectors - reference(folder.path, lines)).max())
    limit = TOLERANCES[options.dtype]
    equal = difference <= limit
    print(f"max_abs_diff={difference:.3e}\n{'equal' if equal else 'NOT equal'} to "
          f"sentence-transformers in one process, within {limit:g}")  # fmt: skip
    return 0 if equal else 1


def show_ranks(places: Sequence[Placed], tp: int, seconds: float) -> None:
    """Print a row per pipeline stage, a column per tensor-parallel rank."""
    print(f"\n{'':<26}" + "".join(f"{f'tp {part}':<22}" for part in range(tp)).rstrip())
    for stage in range(0, len(places), tp):
        first, end = places[stage].layers
        cells = [f"rank {each.rank}, pid {each.pid}" for each in places[stage : stage + tp]]
        name = f"stage {stage // tp}, layers {first}-{end - 1}"
        print(f"  {name:<24}" + "".join(f"{cell:<22}" for cell in cells).rstrip())
    size = sum(place.parameter_bytes for place in places) / 2**20
    print(f"ready after {seconds:.1f} s, {size:.1f} MiB of weights in all", flush=True)


def show_neighbours(lines: Sequence[str], vectors: np.ndarray) -> None:
    """Print five lines, each with the two nearest others by cosine."""
    width = max(40, shutil.get_terminal_size((100, 24)).columns - 12)
    shown = [
        "".join(char if char.isprintable() else "?" for char in line)[:width] for line in lines
    ]
    directions = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    print("\nnearest neighbours, by cosine")
    for row in np.linspace(0, len(lines), min(5, len(lines)), endpoint=False).astype(int):
        print(f"  {shown[row]}")
        cosines = directions @ directions[row]
        cosines[row] = -np.inf
        for other in np.argsort(-cosines)[: min(2, len(lines) - 1)]:
            print(f"     {cosines[other]:5.2f}  {shown[other]}")


def reference(model: Path, lines: Sequence[str]) -> np.ndarray:
    """Compute the embeddings with sentence-transformers, in one process, on the CPU."""
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kind = {"dtype": torch.float32}
    model = SentenceTransformer(str(model), device="cpu", local_files_only=True, model_kwargs=kind)
    return model.encode(list(lines), show_progress_bar=False)


if __name__ == "__main__":
    gc.disable()  # sentence-transformers is imported more quickly
    sys.exit(main())
