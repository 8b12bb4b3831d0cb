"""The kernels compile for the devices they are for, without any of them."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from device_comm.cuda.device import cupy_driver
from device_comm.cuda.device.kernel_source import kernel_source
from device_comm.cuda.launches.launch import KERNELS
from tests.device_comm.cuda.emulator import KERNELS as FOLDER
from tests.device_comm.cuda.emulator import cccl

if TYPE_CHECKING:
    from pathlib import Path

ARCHITECTURES = (80, 90, 100)
MAX_REGISTERS = 128
"""With which a block of 512 threads fits on a multiprocessor."""
COMPILE_SECONDS = 400.0


def test_nvcc_compiles_them_without_spills(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc")
    source = tmp_path / "kernels.cu"
    source.write_text(kernel_source())
    command = ["nvcc", "-std=c++17", "-fatbin", "-Werror", "all-warnings", "--ptxas-options=-v"]
    command += [f"-gencode=arch=compute_{number},code=sm_{number}" for number in ARCHITECTURES]
    command += ["--threads=0", "-o", str(tmp_path / "kernels.fatbin"), str(source)]
    # CuPy adds this one to our options, and nothing can be said against it.
    command += ["-ftz=true", "--keep", f"--keep-dir={tmp_path}"]
    done = subprocess.run(
        command, capture_output=True, check=False, text=True, timeout=COMPILE_SECONDS
    )
    assert done.returncode == 0, done.stderr[-4000:]
    compiled = re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", done.stderr)
    expected = [(kernel, f"sm_{number}") for kernel in KERNELS for number in ARCHITECTURES]
    assert sorted(compiled) == sorted(expected)
    used = [int(count) for count in re.findall(r"Used (\d+) registers", done.stderr)]
    assert len(used) == len(expected) and max(used) <= MAX_REGISTERS
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert spilled and set(spilled) == {("0", "0")}
    texts = [text.read_text() for text in tmp_path.glob("*.ptx")]
    assert len(texts) == len(ARCHITECTURES)
    for text in texts:
        assert "div.rn.f32" in text
        flushing = set(re.findall(r"(\S+)\.ftz\b", text))
        assert flushing <= {"setp.nan"}, "small numbers become zeros"


def test_nvrtc_compiles_them() -> None:
    """With the options that CuPy makes of those of `device_comm.cuda.device.cupy_driver`."""
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    from cupy.cuda import nvrtc

    try:
        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"no NVRTC: {error}")
    options = (*cupy_driver._OPTIONS, f"-I{cccl()}", "-arch=sm_80", "-ftz=true")
    program = nvrtc.createProgram(kernel_source(), "kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*options, "--device-as-default-execution-space"))
    except nvrtc.NVRTCError as error:
        raise AssertionError(nvrtc.getProgramLog(program)) from error
    code = bytes(nvrtc.getCUBIN(program))
    assert all(kernel.encode() in code for kernel in KERNELS)


def test_every_file_of_kernels_is_part_of_the_source() -> None:
    source = kernel_source()
    for file in FOLDER.iterdir():
        guard = f"GC_{file.stem.upper()}_CUH"
        assert file.name == "collectives.cu" or f"#define {guard}" in source, file.name
