"""What tests of the CUDA kernels share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.built_once import built_once
from tests.device_comm.cuda.emulator import Emulation, build, why_not
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LIBRARY = "libemulation.so"


@pytest.fixture(scope="session")
def emulation_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels built for the host, once a run; for `tests.device_comm.cuda.emulator`."""
    if why_not():
        pytest.skip(why_not())

    def make(folder: Path) -> None:
        build("emulate.cpp", folder / LIBRARY, ("-O2", "-fPIC", "-shared"))

    return built_once(tmp_path_factory, "emulation", make) / LIBRARY


@pytest.fixture(scope="session")
def emulation(emulation_library: Path) -> Emulation:
    return Emulation(emulation_library)


@pytest.fixture
def run_ipc(emulation_library: Path, store_path: str) -> Callable[..., list[Any]]:
    """Runs ``body(rank, n, library, path, board, *args)`` in n processes."""

    def run(n: int, body: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
        return run_ranks(n, body, str(emulation_library), store_path, NEW_BOARD, *args, **how)

    return run
