"""The kernels compiled for devices by nvcc, and by NVRTC as CuPy has it: what ptxas says of them,
and their instructions.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from device_comm.cuda import cupy_driver
from device_comm.cuda.driver import kernel_source

ARCHITECTURES = (80, 90, 100)
_COMPILE_SECONDS = 400.0
_DISASSEMBLE_SECONDS = 60.0


@dataclass(frozen=True)
class Compiled:
    """All kernels for all architectures.

    Attributes:
        said: what ptxas says of each.
        ptx: by architecture and kernel, its text; functions that it calls are not in it.
        sass: the same of machine code, with what it calls; empty without ``cuobjdump``.
    """

    said: str
    ptx: dict[int, dict[str, str]]
    sass: dict[int, dict[str, str]]


def compile_kernels(folder: Path) -> Compiled:
    """Compile in ``folder``."""
    source, target = folder / "kernels.cu", folder / "kernels.fatbin"
    source.write_text(kernel_source())
    command = ["nvcc", "-std=c++17", "-fatbin", "-Werror", "all-warnings", "--ptxas-options=-v"]
    command += [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES]
    command += ["--threads=0", "-o", str(target), str(source)]
    # CuPy adds this one to our options, and nothing can be said against it.
    command += ["-ftz=true", "--keep", f"--keep-dir={folder}"]
    said = _run(command, _COMPILE_SECONDS).stderr
    ptx = {
        number: _pieces(text, r"^\.visible \.entry (\w+)\(")
        for number in ARCHITECTURES
        for text in [next(folder.glob(f"*compute_{number}.ptx")).read_text()]
    }
    return Compiled(said, ptx, disassemble(target))


def compile_as_cupy_does(architecture: int) -> bytes:
    """The machine code that NVRTC makes for `CupyDriver.load`; takes CuPy and NVRTC, no device."""
    from cupy._core.core import assemble_cupy_compiler_options
    from cupy.cuda import nvrtc

    options = assemble_cupy_compiler_options(cupy_driver._OPTIONS)
    options += ("-ftz=true", f"-arch=sm_{architecture}", "--device-as-default-execution-space")
    program = nvrtc.createProgram(kernel_source(), "kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(nvrtc.getProgramLog(program)) from error
    return bytes(nvrtc.getCUBIN(program)) + b"\0"  # CuPy leaves the last byte to Python's strings


def disassemble(binary: Path) -> dict[int, dict[str, str]]:
    """Machine code by architecture and kernel; empty without ``cuobjdump``."""
    tool = _disassembler()
    if tool is None:
        return {}
    text = _run([tool, "-sass", str(binary)], _DISASSEMBLE_SECONDS).stdout
    return {
        int(number): _pieces(code, r"^\s*Function : (\w+)$")
        for number, code in _pieces(text, r"^\s*code for sm_(\d+)$").items()
    }


def _disassembler() -> str | None:
    """The ``cuobjdump`` of `nvcc`'s toolkit, or of the path, or the one that pip installed."""
    beside = Path(shutil.which("nvcc") or "").resolve().parent
    found = shutil.which("cuobjdump", path=str(beside)) or shutil.which("cuobjdump")
    if found is not None:
        return found
    try:
        installed = files("nvidia-cuda-cuobjdump") or []
    except PackageNotFoundError:
        return None
    return next((str(each.locate()) for each in installed if each.name == "cuobjdump"), None)


def _pieces(text: str, title: str) -> dict[str, str]:
    """What follows each title, by what its group has matched."""
    _, *parts = re.split(title, text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _run(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=seconds)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    return done
