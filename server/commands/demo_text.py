"""The demo's output as text: pure functions of its results."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np

from shm_broadcast.errors import counted

from .terminal import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..workers.minilm import ModelFolder, Placed

Neighbours = list[tuple[int, list[tuple[int, float]]]]
"""For some lines: the line, and its nearest others with their cosine, nearest first."""


def title(folder: ModelFolder, tp: int, pp: int, device: str, threads: int) -> str:
    """The model, and how it is divided among the workers."""
    bert = folder.bert
    return (
        f"model  {folder.path}\n"
        f"       {bert.num_hidden_layers} layers, {bert.num_attention_heads} heads, "
        f"hidden size {bert.hidden_size}, at most {folder.max_length} tokens\n"
        f"pool   tp={tp} x pp={pp}: {counted(tp * pp, 'worker')} on {device}, "
        f"{counted(threads, 'thread')} each"
    )


def grid(places: Sequence[Placed], seconds: float) -> str:
    """A table of the ranks: a row for each pipeline stage, a column for each tp rank."""
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
    """The number of sentences and tokens, the time, and the speed."""
    return (
        f"embedded {counted(len(tokens), 'sentence')} ({counted(int(tokens.sum()), 'token')}) in "
        f"{seconds:.3f} s: {len(tokens) / seconds:.1f} sentences/s"
    )


def truncation(line: int, limit: int) -> str:
    """A note about one line, ended by a newline."""
    return f"note: sentence {line + 1} is longer than {limit} tokens; the rest was left out\n"


def verdict(difference: float, tolerance: float) -> str:
    """The outcome of the check."""
    word = "equal to" if difference <= tolerance else "NOT equal to"
    return (
        f"max_abs_diff={difference:.3e}\n"
        f"{word} sentence-transformers in one process, within {tolerance:g}"
    )


def find_neighbours(vectors: np.ndarray, lines: int, nearest: int) -> Neighbours:
    """The ``nearest`` others, by cosine, of ``lines`` rows spread evenly over ``vectors``."""
    n = len(vectors)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    directions = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    found: Neighbours = []
    for row in np.linspace(0, n, min(lines, n), endpoint=False).astype(int).tolist():
        cosines = directions @ directions[row]
        cosines[row] = -np.inf
        order = np.argsort(-cosines)[: min(nearest, n - 1)]
        found.append((row, [(int(other), float(cosines[other])) for other in order]))
    return found


def neighbours(lines: Sequence[str], found: Neighbours) -> str:
    """Some lines with their nearest neighbours below."""
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
