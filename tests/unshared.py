"""Programs in namespaces of their own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_unshared(
    what: list[str], *command: str, timeout: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program by unshare with options ``what``; skip the test if that is not allowed."""
    ended = subprocess.run(
        ["unshare", *what, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if "unshare failed" in ended.stderr or "mount:" in ended.stderr:
        pytest.skip(f"no namespaces: {ended.stderr.strip()}")
    return ended
