"""The CUDA kernels on threads of the host: built with g++ from the same sources.

Ranks are threads or processes; device memory is any memory. A launch runs one host thread for each
thread of its grid and returns when all are done, so keep grids and blocks small: see `LIMITS`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from device_comm.cuda.ipc.abi import Limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from device_comm.cuda.ipc.abi import KernelLaunch

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "device_comm/cuda/kernels"
EMULATION = Path(__file__).parent / "emulation"

LIMITS = Limits(max_blocks=2, lanes=2, threads=16, packets_up_to=1 << 10, one_shot_up_to=4 << 10)
"""What a machine of few cores runs in good time."""

_FLAGS = ("-std=c++20", "-g1", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing")
LIBRARY = "libemulation.so"
_COMPILE_SECONDS = 240.0


def cccl() -> Path | None:
    """The folder of libcu++'s headers: of the CUDA toolkit, or in CuPy's package."""
    found = [Path("/usr/local/cuda/include/cccl")]
    nvcc = shutil.which("nvcc")
    if nvcc is not None:
        found.append(Path(nvcc).resolve().parents[1] / "include/cccl")
    cupy = importlib.util.find_spec("cupy")
    if cupy is not None and cupy.submodule_search_locations:
        bundled = Path(cupy.submodule_search_locations[0]) / "_core/include/cupy/_cccl"
        found += sorted(bundled.glob("*"))
    return next((folder for folder in found if (folder / "cuda/atomic").exists()), None)


def why_not() -> str:
    """Why kernels cannot be built for the host; ``""`` if they can."""
    if shutil.which("g++") is None:
        return "no g++"
    return "" if cccl() is not None else "no headers of libcu++: neither nvcc's nor CuPy's"


def build(
    source: str, output: Path, flags: Sequence[str] = ("-O2",), kernels: Path = KERNELS
) -> Path:
    """Compile a file of the folder ``emulation`` with the kernels in it; return ``output``."""
    command = ["g++", *_FLAGS, *flags, f"-I{EMULATION}", f"-I{kernels}", "-isystem", str(cccl())]
    command += [str(EMULATION / source), "-o", str(output), "-pthread"]
    done = subprocess.run(
        command, capture_output=True, check=False, text=True, timeout=_COMPILE_SECONDS
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return output


def build_library(folder: Path) -> None:
    """Build what `Emulation` loads, `LIBRARY`."""
    build("emulate.cpp", folder / LIBRARY, ("-O2", "-fPIC", "-shared"))


class Emulation:
    """A device made of host threads. Any number of threads may launch at a time."""

    def __init__(self, library: Path) -> None:
        """Load what `build_library` has built."""
        self._emulate = ctypes.CDLL(str(library)).emulate
        self._emulate.argtypes = (
            ctypes.c_char_p,
            ctypes.c_uint32,
            ctypes.c_uint32,
            ctypes.c_char_p,
        )

    def launch(self, kernel: str, grid: int, block: int, args: bytes) -> None:
        """Run a kernel, whose parameter is ``args``, and return when it is done."""
        status = self._emulate(kernel.encode(), grid, block, args)
        if status != 0:
            raise ValueError(f"no kernel {kernel}")

    def run(self, launches: Sequence[KernelLaunch]) -> None:
        """Run what a planner has planned, one launch after the other."""
        for launch in launches:
            self.launch(launch.kernel, launch.grid, launch.block, launch.args[0])
