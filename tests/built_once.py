"""What several processes of one test run need, built by the first of them."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest


def built_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], object]) -> Path:
    """Return the folder ``name`` of this run, filled by ``build`` in the first process to ask.

    If ``build`` raises, so does this, and the next process tries again.
    """
    run = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        run = run.parent
    with (run / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = run / name
        if not built.exists():
            building = factory.mktemp(name)
            build(building)
            building.rename(built)
    return built
