"""Tokens of a decoder on CUDA: ``python -m benchmarks.gpu_decoder --tp 1,2``.

Of SmolLM2-135M's sizes, in float16, with random weights, through a pool and the engine: each step
one operation after another, and as a CUDA graph. Ranks share a device under MPS, if it can be
started. Needs the package safetensors.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch

from benchmarks.beside_gloo import REPEATS
from benchmarks.decoder import SEQUENCES, TimedWorker, through_a_pool
from benchmarks.gpu_environment import run_side_by_side
from benchmarks.gpu_world import device_facts, mps, require_gpu
from benchmarks.harness import Report, machine, parser
from server.pool import WorkerPool
from server.workers.decoder import Engine

TIMEOUT = 120.0
TOKENS = 60
SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def make_decoder(folder: Path, spread: float = 0.05, **sizes: Any) -> Path:
    """A decoder with weights drawn from their names, in float16; its tokenizer knows no words.

    Args:
        folder: where it is written.
        spread: the standard deviation of its weights.
        sizes: other ones than SmolLM2-135M's.
    """
    from safetensors.torch import save_file

    config = SMOLLM2 | sizes
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = hidden // config["num_attention_heads"]
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    keys = (config["num_key_value_heads"] * head, hidden)
    for number in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": keys,
            "self_attn.v_proj": keys,
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    tensors = {name: _drawn(name, shape) * spread for name, shape in shapes.items()}
    norms = [
        f"model.layers.{number}.{name}.weight"
        for number in range(config["num_hidden_layers"])
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    tensors |= {name: 1 + 0.1 * _drawn(name, (hidden,)) for name in [*norms, "model.norm.weight"]}
    folder.mkdir()
    save_file({name: each.half() for name, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def _drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def add(report: Report, folder: Path, tp: int, how: str, graphs: bool) -> None:
    """Put the times of a pool into ``report``."""
    with (
        WorkerPool(
            TimedWorker,
            tp=tp,
            device="cuda",
            share_gpu=True,
            worker_kwargs={"model": str(folder), "dtype": "float16", "graphs": graphs},
            start_timeout=TIMEOUT,
        ) as pool,
        Engine(pool) as engine,
    ):
        way = "in graphs" if graphs else "eager"
        for size in SEQUENCES:
            through_a_pool(engine, pool, size, TOKENS)  # captures what it needs
            label = f"{way}, {size} sequences, {tp} ranks ({how})"
            found = [through_a_pool(engine, pool, size, TOKENS) for _ in range(REPEATS)]
            seconds, share = (statistics.median(each) for each in zip(*found, strict=True))
            told = {
                "ms/token": 1e3 * seconds,
                "tokens/s": size / seconds,
                "share outside of steps": share,
            }
            print(f"{label}:", *(f"{key} {value:.3g}" for key, value in told.items()), flush=True)
            report.notes[label] = told
            report.save()


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--tp", default="1,2", help="how many ranks, such as 1,2 (default)")
    arguments = options.parse_args()
    run_side_by_side()
    missing = require_gpu()
    if missing:
        print(f"benchmarks.gpu_decoder: error: {missing}", file=sys.stderr)
        return 2
    report = Report({**machine(), **device_facts()}, file=arguments.json)
    with tempfile.TemporaryDirectory() as parent, mps() as how:
        folder = make_decoder(Path(parent, "model"))
        for tp in arguments.tp.split(","):
            for graphs in (False, True):
                add(report, folder, int(tp), how, graphs)
    report.finish(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
