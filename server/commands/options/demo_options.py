"""Embed the lines of a text with a tensor- and pipeline-parallel pool of workers.

Show nearest neighbours, and compare the result with sentence-transformers in one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ...config import REQUEST_LINES
from . import shared_options

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    shared_options.add_model_arguments(parser, tp=2, pp=2)
    parser.set_defaults(dp=1)
    add("--input", type=Path, metavar="FILE", help="UTF-8 text, one sentence a line; blank "
        "lines are skipped (default: a text that ships with the project)")  # fmt: skip
    add("--out", type=Path, metavar="FILE.npy", help="write the embeddings, float32 "
        "[sentences, hidden]")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object on stdout and nothing else")
    add("--timeout", type=float, default=300.0, metavar="S", help="seconds for the pool to "
        f"start, and for each {REQUEST_LINES} lines (default 300)")  # fmt: skip
