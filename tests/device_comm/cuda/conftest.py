"""What tests of the CUDA kernels share."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.built_once import built_once
from tests.device_comm.cuda.compiled import compile_as_cupy_does, compile_kernels
from tests.device_comm.cuda.emulator import LIBRARY, Emulation, build_library, why_not

if TYPE_CHECKING:
    from pathlib import Path

    from tests.device_comm.cuda.compiled import Compiled


@pytest.fixture(scope="session")
def emulation_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels built for the host, once a run; for `tests.device_comm.cuda.emulator`."""
    if why_not():
        pytest.skip(why_not())
    return built_once(tmp_path_factory, "emulation", build_library) / LIBRARY


@pytest.fixture(scope="session")
def emulation(emulation_library: Path) -> Emulation:
    return Emulation(emulation_library)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The kernels compiled for devices, once a session."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    return compile_kernels(tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="session")
def cubin(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The kernels as CuPy has them compiled for an H100 or H200, once a run."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        cupy.cuda.nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"no NVRTC: {error}")

    def build(folder: Path) -> None:
        (folder / "cubin").write_bytes(compile_as_cupy_does(90))

    return (built_once(tmp_path_factory, "cubin", build) / "cubin").read_bytes()
