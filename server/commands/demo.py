"""Embed the lines of a text with a tensor- and pipeline-parallel pool of workers, show their
nearest neighbours, and check the result against sentence-transformers in one process."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..defaults import TOLERANCES
from . import demo_text
from .demo_pool import DemoEmbeddings, embed
from .read_model import Model, read_model

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from ..workers.minilm import ModelFolder

PACKAGES = ("safetensors", "sentence_transformers", "tokenizers", "tqdm")
NEIGHBOURS_OF = 5
NEIGHBOURS = 2


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """The checked options of a run; see `options.demo_options`."""

    model: Model
    lines: list[str]
    timeout: float
    out: Path | None
    json: bool

    @property
    def tolerance(self) -> float:
        """The largest absolute difference from the reference that is allowed."""
        return TOLERANCES[self.model.workers.dtype]

    @property
    def where(self) -> str:
        """The device and the dtype, as text."""
        device, dtype = self.model.workers.device, self.model.workers.dtype
        return device if dtype == "float32" else f"{device} in {dtype}"


def prepare(args: argparse.Namespace) -> DemoPlan:
    """Check the options, the model and the input.

    Raises:
        ValueError, OSError, ImportError, CheckpointError: something is wrong; the text says
            what, in one line.
    """
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
    """Start the pool, embed, report, check; return 0, or 1 if the result is not the reference's.

    Raises:
        CoordinatorError: a worker failed, was lost or took too long; none is left running.
        OSError: the output cannot be written.
    """
    say: Callable[[str], None] = _quiet if plan.json else _print
    model = plan.model
    say(
        demo_text.title(
            model.folder, model.workers.tp, model.workers.pp, plan.where, model.workers.threads
        )
    )
    embedded = embed(plan.model, plan.lines, plan.timeout, say)
    say(demo_text.speed(embedded.tokens, embedded.seconds))
    for line in embedded.truncated:
        sys.stderr.write(demo_text.truncation(line, model.folder.max_length))
    neighbours = demo_text.find_neighbours(embedded.vectors, NEIGHBOURS_OF, NEIGHBOURS)
    say(demo_text.neighbours(plan.lines, neighbours))
    if plan.out is not None:
        with plan.out.open("wb") as file:
            np.save(file, embedded.vectors)
        say(f"embeddings written to {plan.out}: float32 {list(embedded.vectors.shape)}")
    difference = float(np.abs(embedded.vectors - reference(model.folder, plan.lines)).max())
    say(demo_text.verdict(difference, plan.tolerance))
    if plan.json:
        _print(json.dumps(_report(plan, embedded, neighbours, difference)))
    return 0 if difference <= plan.tolerance else 1


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file that are not blank, without their ends.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8, or holds no such line.
    """
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
    """The embeddings as sentence-transformers computes them: one process, the CPU, offline.

    Raises:
        ImportError: sentence-transformers is not installed.
    """
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
    neighbours: demo_text.Neighbours,
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
    """Say nothing."""
