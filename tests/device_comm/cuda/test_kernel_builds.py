"""The kernels compile for the devices they are for, without any of them."""

from __future__ import annotations

import importlib.util
import re
from typing import TYPE_CHECKING

import pytest

from device_comm.cuda.device import cupy_driver
from device_comm.cuda.device.kernel_source import kernel_source
from device_comm.cuda.launches.launch import KERNELS
from tests.device_comm.cuda.compiled import ARCHITECTURES
from tests.device_comm.cuda.emulator import KERNELS as FOLDER
from tests.device_comm.cuda.emulator import cccl

if TYPE_CHECKING:
    from tests.device_comm.cuda.compiled import Compiled

MAX_REGISTERS = 128
"""With which a block of 512 threads fits on a multiprocessor."""


def test_nvcc_compiles_them_with_all_they_have_in_registers(compiled: Compiled) -> None:
    named = re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", compiled.said)
    expected = [(kernel, f"sm_{number}") for kernel in KERNELS for number in ARCHITECTURES]
    assert sorted(named) == sorted(expected)
    used = [int(count) for count in re.findall(r"Used (\d+) registers", compiled.said)]
    assert len(used) == len(expected) and max(used) <= MAX_REGISTERS
    kinds = "bytes stack frame", "bytes spill stores", "bytes spill loads"
    for kind in kinds:
        counts = re.findall(rf"(\d+) {kind}", compiled.said)
        assert len(counts) >= len(expected) and set(counts) == {"0"}, kind


def test_small_numbers_do_not_become_zeros(compiled: Compiled) -> None:
    for kernels in compiled.ptx.values():
        text = "".join(kernels.values())
        assert "div.rn.f32" in text
        flushing = set(re.findall(r"(\S+)\.ftz\b", text))
        assert flushing <= {"setp.nan"}


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
