"""What CuPy is given of the kernels: all of their source, which NVRTC compiles."""

from __future__ import annotations

import importlib.util

import pytest

from device_comm.cuda.device import cupy_driver
from device_comm.cuda.device.kernel_source import kernel_source
from device_comm.cuda.launches.launch import KERNELS
from tests.device_comm.cuda.emulator import KERNELS as FOLDER
from tests.device_comm.cuda.emulator import cccl


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
