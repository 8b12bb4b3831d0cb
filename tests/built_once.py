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
    """The folder that ``build`` has filled, of this run; the others wait for it.

    Args:
        factory: gives this process's folder of the run.
        name: of the folder.
        build: is given a new folder; if it raises, so does this, and the next one tries again.
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
