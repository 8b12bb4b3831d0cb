"""The example of docs/resharding.md runs and says what it should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_a_model_goes_from_two_ranks_to_four() -> None:
    done = subprocess.run(
        [sys.executable, "examples/reshard.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "TP=2 held (125, 64)" in done.stdout
    assert "[(63, 64), (63, 64), (63, 64), (61, 64)]" in done.stdout
    assert "on a mesh of [2, 2]" in done.stdout and "measured" in done.stdout
