"""The example of docs/resharding.md runs and says what it should."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.commands import run_to_end

ROOT = Path(__file__).parents[3]


def test_a_model_goes_from_two_ranks_to_four() -> None:
    done = run_to_end(
        sys.executable,
        "examples/reshard.py",
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=180,
    )
    assert "TP=2 held (125, 64)" in done.stdout
    assert "[(63, 64), (63, 64), (63, 64), (61, 64)]" in done.stdout
    assert "on a mesh of [2, 2]" in done.stdout and "measured" in done.stdout
