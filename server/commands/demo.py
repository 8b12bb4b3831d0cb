"""Embed the lines of a text with a tensor- and pipeline-parallel pool of workers.

Show nearest neighbours, and compare the result with sentence-transformers in one process.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch

from shm_broadcast.errors import counted

from ..config import REQUEST_LINES, TOLERANCES
from ..pool import WorkerPool
from ..workers.minilm import EncodedText, ModelFolder, Placed
from .read_options import Model, read_model
from .terminal import shown

if TYPE_CHECKING:
    import argparse

    import tqdm


Neighbours = list[tuple[int, list[tuple[int, float]]]]
"""For each sampled line: its index, and its nearest lines with their cosines."""


def title(folder: ModelFolder, tp: int, pp: int, device: str, threads: int) -> str:
    """Return the model, and its division among the workers, as text."""
    bert = folder.bert
    return (
        f"model  {folder.path}\n"
        f"       {bert.num_hidden_layers} layers, {bert.num_attention_heads} heads, "
        f"hidden size {bert.hidden_size}, at most {folder.max_length} tokens\n"
        f"pool   tp={tp} x pp={pp}: {counted(tp * pp, 'worker')} on {device}, "
        f"{counted(threads, 'thread')} each"
    )


def grid(places: Sequence[Placed], seconds: float) -> str:
    """Return a table of ranks: a row per pipeline stage, a column per tp rank."""
    stages = max(place.pp_rank for place in places) + 1
    parts = max(place.tp_rank for place in places) + 1
    cells = {
        (place.pp_rank, place.tp_rank): f"rank {place.rank}, pid {place.pid}" for place in places
    }
    names = {place.pp_rank: _layers(place) for place in places}
    width = max(map(len, cells.values())) + 3
    side = max(map(len, names.values())) + 3
    rows = [" " * (side + 2) + "".join(f"{f'tp {part}':<{width}}" for part in range(parts))]
    for stage in range(stages):
        row = "".join(f"{cells[stage, part]:<{width}}" for part in range(parts))
        rows.append(f"  {names[stage]:<{side}}{row}")
    size = sum(place.parameter_bytes for place in places) / 2**20
    rows.append(f"ready after {seconds:.1f} s, {size:.1f} MiB of weights in all")
    return "\n".join(["", *(row.rstrip() for row in rows)])


def speed(tokens: np.ndarray, seconds: float) -> str:
    """Return the number of sentences and tokens, the time, and the speed, as text."""
    return (
        f"embedded {counted(len(tokens), 'sentence')} ({counted(int(tokens.sum()), 'token')}) in "
        f"{seconds:.3f} s: {len(tokens) / seconds:.1f} sentences/s"
    )


def truncation(line: int, limit: int) -> str:
    """Return a note about a line that was cut, with its line end."""
    return f"note: sentence {line + 1} is longer than {limit} tokens; the rest was left out\n"


def verdict(difference: float, tolerance: float) -> str:
    """Return the result of the check as text."""
    word = "equal to" if difference <= tolerance else "NOT equal to"
    return (
        f"max_abs_diff={difference:.3e}\n"
        f"{word} sentence-transformers in one process, within {tolerance:g}"
    )


def find_neighbours(vectors: np.ndarray, lines: int, nearest: int) -> Neighbours:
    """Return the ``nearest`` rows, by cosine, of ``lines`` evenly spaced rows of ``vectors``."""
    n = len(vectors)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    directions = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    neighbours: Neighbours = []
    for row in np.linspace(0, n, min(lines, n), endpoint=False).astype(int).tolist():
        cosines = directions @ directions[row]
        cosines[row] = -np.inf
        order = np.argsort(-cosines)[: min(nearest, n - 1)]
        neighbours.append((row, [(int(other), float(cosines[other])) for other in order]))
    return neighbours


def nearest_neighbours(lines: Sequence[str], found: Neighbours) -> str:
    """Return sampled lines, each with its nearest neighbours below, as text."""
    width = max(40, shutil.get_terminal_size((100, 24)).columns - 12)
    rows = ["", "nearest neighbours, by cosine"]
    for row, nearest in found:
        rows.append(f"  {shown(lines[row], width)}")
        rows += [f"     {cosine:5.2f}  {shown(lines[other], width)}" for other, cosine in nearest]
    return "\n".join([*rows, ""])


def _layers(place: Placed) -> str:
    first, end = place.layers
    what = f"layer {first}" if end - first == 1 else f"layers {first}-{end - 1}"
    return f"stage {place.pp_rank}, {what}"


WARM_UP_LINES = 64


@dataclass(frozen=True, slots=True)
class DemoEmbeddings:
    """Embeddings of all lines, placement of the workers, and timings.

    Attributes:
        vectors: float32 [lines, hidden].
        tokens: tokens of each line, special tokens included; int64 [lines].
        truncated: indexes of lines that were cut.
        seconds: time for all lines, without the warm-up.
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
    """Start the pool, embed the lines, end the pool; ``say`` prints the table of ranks.

    ``timeout``: seconds for the start, and for each call.

    Raises:
        CoordinatorError: a worker failed, was lost or timed out; no worker is left running.
    """
    began = time.perf_counter()
    with (
        _bar("loading weights", model.workers.tp * model.workers.pp) as bar,
        WorkerPool(**model.arguments(timeout), on_progress=_Loading(bar).report) as pool,
    ):
        bar.close()
        ready = time.perf_counter()
        places: list[Placed] = pool.collective_rpc("placed", timeout=timeout)
        say(grid(places, ready - began))
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
    def __init__(self, bar: tqdm.tqdm[NoReturn]) -> None:
        self._bar = bar
        self._shares: dict[int, float] = {}

    def report(self, rank: int, done: int, total: int, _what: str) -> None:
        self._shares[rank] = done / total if total else 1.0
        self._bar.update(sum(self._shares.values()) - self._bar.n)


def _bar(what: str, total: int) -> tqdm.tqdm[NoReturn]:
    import tqdm  # noqa: PLC0415

    return tqdm.tqdm(
        total=total,
        disable=None,
        leave=False,
        bar_format=f"{what} {{percentage:3.0f}}%|{{bar}}| {{elapsed}}",
    )


PACKAGES = ("safetensors", "sentence_transformers", "tokenizers", "tqdm")
NEIGHBOURS_OF = 5
NEIGHBOURS = 2


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """Checked options of a run; see `options.demo_options`."""

    model: Model
    lines: list[str]
    timeout: float
    out: Path | None
    json: bool

    @property
    def tolerance(self) -> float:
        """Return the allowed absolute difference from the reference."""
        return TOLERANCES[self.model.workers.dtype]

    @property
    def where(self) -> str:
        """Return device and dtype as text."""
        device, dtype = self.model.workers.device, self.model.workers.dtype
        return device if dtype == "float32" else f"{device} in {dtype}"


def prepare(args: argparse.Namespace) -> DemoPlan:
    """Check the options, the model and the input."""
    missing = [package for package in PACKAGES if find_spec(package) is None]
    if missing:
        raise ImportError(f"the extra group-coordinator[demo] lacks {', '.join(missing)}")
    if not args.timeout > 0:
        raise ValueError(f"--timeout must be more than 0 seconds; got {args.timeout}")
    model = read_model(args)
    if args.out is not None and (args.out.is_dir() or not args.out.parent.is_dir()):
        raise ValueError(f"--out {args.out}: not a file in an existing folder")
    return DemoPlan(
        model=model,
        lines=read_lines(args.input or _packaged_text()),
        timeout=args.timeout,
        out=args.out,
        json=args.json,
    )


def run(plan: DemoPlan) -> int:
    """Start the pool, embed, report, check; return 1 if the result is not the reference's."""
    say: Callable[[str], None] = _quiet if plan.json else _print
    model = plan.model
    say(title(model.folder, model.workers.tp, model.workers.pp, plan.where, model.workers.threads))
    embedded = embed(plan.model, plan.lines, plan.timeout, say)
    say(speed(embedded.tokens, embedded.seconds))
    for line in embedded.truncated:
        sys.stderr.write(truncation(line, model.folder.max_length))
    neighbours = find_neighbours(embedded.vectors, NEIGHBOURS_OF, NEIGHBOURS)
    say(nearest_neighbours(plan.lines, neighbours))
    if plan.out is not None:
        with plan.out.open("wb") as file:
            np.save(file, embedded.vectors)
        say(f"embeddings written to {plan.out}: float32 {list(embedded.vectors.shape)}")
    difference = float(np.abs(embedded.vectors - reference(model.folder, plan.lines)).max())
    say(verdict(difference, plan.tolerance))
    if plan.json:
        _print(json.dumps(_report(plan, embedded, neighbours, difference)))
    return 0 if difference <= plan.tolerance else 1


def read_lines(path: Path) -> list[str]:
    """Return the stripped lines of a UTF-8 file; raise `ValueError` for another file or no text."""
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = content.count(b"\n", 0, exc.start) + 1
        byte = content[exc.start]
        raise ValueError(f"{path}: line {line} is not UTF-8 (byte 0x{byte:02x})") from exc
    lines = [line.strip() for line in text.split("\n")]
    lines = [line for line in lines if line]
    if not lines:
        raise ValueError(f"{path}: holds no text")
    return lines


def reference(folder: ModelFolder, lines: Sequence[str]) -> np.ndarray:
    """Compute the embeddings with sentence-transformers: one process, the CPU, offline."""
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415
    from transformers.utils import logging  # noqa: PLC0415

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = SentenceTransformer(
        str(folder.path),
        device="cpu",
        local_files_only=True,
        model_kwargs={"dtype": torch.float32},
    )
    vectors: np.ndarray = model.encode(list(lines), show_progress_bar=False)
    return vectors


def _report(
    plan: DemoPlan,
    embedded: DemoEmbeddings,
    neighbours: Neighbours,
    difference: float,
) -> dict[str, Any]:
    return {
        "model": str(plan.model.folder.path),
        "tp": plan.model.workers.tp,
        "pp": plan.model.workers.pp,
        "device": plan.model.workers.device,
        "dtype": plan.model.workers.dtype,
        "threads": plan.model.workers.threads,
        "ranks": [asdict(place) for place in embedded.places],
        "sentences": len(plan.lines),
        "tokens": int(embedded.tokens.sum()),
        "hidden": embedded.vectors.shape[1],
        "start_seconds": embedded.start_seconds,
        "seconds": embedded.seconds,
        "sentences_per_second": len(plan.lines) / embedded.seconds,
        "truncated": embedded.truncated,
        "neighbours": [
            {
                "sentence": row,
                "nearest": [{"sentence": other, "cosine": cosine} for other, cosine in nearest],
            }
            for row, nearest in neighbours
        ],
        "out": None if plan.out is None else str(plan.out),
        "max_abs_diff": difference,
        "tolerance": plan.tolerance,
        "ok": difference <= plan.tolerance,
    }


def _packaged_text() -> Path:
    return Path(__file__).parents[1] / "data" / "sentences.txt"


def _print(text: str) -> None:
    print(text, flush=True)


def _quiet(_text: str) -> None:
    pass
