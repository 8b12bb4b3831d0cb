"""What CuPy is given of the kernels: all of their source, which NVRTC compiles."""

from __future__ import annotations

from device_comm.cuda.driver import kernel_source
from device_comm.cuda.ipc.abi import KERNELS
from tests.device_comm.cuda.emulator import KERNELS as FOLDER


def test_nvrtc_compiles_them(cubin: bytes) -> None:
    assert all(kernel.encode() in cubin for kernel in KERNELS)


def test_every_file_of_kernels_is_part_of_the_source() -> None:
    source = kernel_source()
    for file in FOLDER.iterdir():
        guard = f"GC_{file.stem.upper()}_CUH"
        assert file.name == "collectives.cu" or f"#define {guard}" in source, file.name
