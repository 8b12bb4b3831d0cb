"""What compilers make of the kernels: all in registers, fences as wide as needed, wide accesses.

On threads of the host all of this would look the same.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from device_comm.cuda import cupy_driver
from device_comm.cuda.driver import kernel_source
from device_comm.cuda.ipc.abi import KERNELS, TRANSFER
from tests.device_comm.cuda.emulator import KERNELS as FOLDER

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_REGISTERS = 128
"""With which a block of 512 threads fits on a multiprocessor."""


class Compiled(NamedTuple):
    """The messages of ptxas; PTX by kernel, without called functions; machine code."""

    said: str
    ptx: dict[str, str]
    cubin: Path


@pytest.fixture(scope="module", params=[80, 100])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """The kernels compiled for one architecture by NVRTC, as `CupyDriver.load` has it."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        cupy.cuda.nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"no NVRTC: {error}")
    from cupy._core.core import assemble_cupy_compiler_options
    from cupy.cuda import nvrtc

    options = assemble_cupy_compiler_options(cupy_driver._OPTIONS)
    options += ("-ftz=true", f"-arch=sm_{request.param}", "--device-as-default-execution-space")
    program = nvrtc.createProgram(kernel_source(), "kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*options, "--ptxas-options=-v"))
    except nvrtc.NVRTCError as error:
        raise RuntimeError(nvrtc.getProgramLog(program)) from error
    cubin = tmp_path_factory.mktemp("compiled") / "kernels.cubin"
    # CuPy leaves the last byte to Python's strings.
    cubin.write_bytes(bytes(nvrtc.getCUBIN(program)) + b"\0")
    ptx = pieces(bytes(nvrtc.getPTX(program)).decode(), r"^\.visible \.entry (\w+)\(")
    return Compiled(nvrtc.getProgramLog(program), ptx, cubin)


@pytest.fixture(scope="module")
def sass(compiled: Compiled) -> dict[str, str]:
    """Machine code by kernel, with the functions it calls."""
    tool = shutil.which("cuobjdump")
    if tool is None:
        try:
            installed = files("nvidia-cuda-cuobjdump") or []
        except PackageNotFoundError:
            pytest.skip("no cuobjdump")
        tool = next(str(each.locate()) for each in installed if each.name == "cuobjdump")
    command = [tool, "-sass", str(compiled.cubin)]
    done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60)
    return pieces(done.stdout, r"^\s*Function : (\w+)$")


def pieces(text: str, title: str) -> dict[str, str]:
    """What follows each title, by what its group has matched."""
    _, *parts = re.split(title, text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def sends_packets(kernel: str) -> bool:
    return kernel.startswith("ipc_packets")


def releases(kernel: str) -> int:
    """How often it releases something to peers: in two meetings, with each chunk, or never."""
    return 0 if sends_packets(kernel) else 1 if kernel == TRANSFER else 2


def each(code: dict[str, str]) -> Iterator[tuple[str, str]]:
    assert set(code) == set(KERNELS)
    yield from code.items()


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def having(words: str, text: str) -> str:
    """The lines in which one of the words stands: to look for patterns in them only is quick."""
    return "\n".join(
        line for line in text.splitlines() if any(word in line for word in words.split())
    )


@pytest.mark.quick
def test_the_source_contains_each_file_once() -> None:
    text = kernel_source()
    left = re.findall(r"#include\s+(\S+)", text)
    assert left
    assert all(name.startswith("<cuda/") for name in left)
    assert all(f"KERNEL({kernel}," in text for kernel in KERNELS)
    guards = [f"GC_{file.stem.upper()}_CUH" for file in FOLDER.glob("*.cuh")]
    assert len(guards) > 5
    assert [text.count(f"#define {guard}") for guard in guards] == [1] * len(guards)


def test_all_variables_are_in_registers(compiled: Compiled) -> None:
    assert "warning" not in compiled.said
    named = re.findall(r"Compiling entry function '(\w+)'", compiled.said)
    assert sorted(named) == sorted(KERNELS)
    used = [int(count) for count in re.findall(r"Used (\d+) registers", compiled.said)]
    assert len(used) == len(named) and max(used) <= MAX_REGISTERS
    transfer = used[named.index(TRANSFER)]
    assert transfer <= MAX_REGISTERS // 2, "`Limits.for_ranks` counts on two blocks"
    for kind in ("bytes stack frame", "bytes spill stores", "bytes spill loads"):
        counts = re.findall(rf"(\d+) {kind}", compiled.said)
        assert len(counts) >= len(named) and set(counts) == {"0"}, kind


def test_small_numbers_do_not_become_zeros(compiled: Compiled) -> None:
    text = "".join(compiled.ptx.values())
    assert "div.rn.f32" in text
    flushing = set(re.findall(r"(\S+)\.ftz\b", text))
    assert flushing <= {"setp.nan"}


def test_ptx_orders_memory_for_the_whole_system_only_where_peers_load(compiled: Compiled) -> None:
    for kernel, text in each(compiled.ptx):
        assert count(r"\bst\.release\.sys\b", text) == releases(kernel), kernel
        assert bool(count(r"\bld\.acquire\.sys\b", text)) == bool(releases(kernel)), kernel
        # The tail of a block is ordered on its device alone.
        tickets = re.findall(r"\batom\.\S+", text)
        assert tickets == ["atom.add.acq_rel.gpu.u32"] * (kernel != TRANSFER), kernel
        assert count(r"\b(fence|membar)\b", text) == 0, kernel
        # The number of the kernel, or of chunks; and the tickets, which begin again.
        own = 1 if kernel == TRANSFER else 2
        assert count(r"\bld\.relaxed\.gpu\b", text) == 1, kernel
        assert re.findall(r"\bst\.\w+\.(?:gpu|cta)\b", text) == ["st.relaxed.gpu"] * own, kernel


def test_ptx_accesses_memory_in_vectors(compiled: Compiled) -> None:
    for kernel, text in each(compiled.ptx):
        order = r"relaxed\.sys\.global\." if sends_packets(kernel) else r"(?:global\.)?"
        for access in ("ld", "st"):
            assert count(rf"\b{access}\.{order}v2\.[bu]64", text) > 0, (kernel, access)


def test_machine_code_has_these_fences_only(sass: dict[str, str]) -> None:
    for kernel, whole in each(sass):
        text, give_up = having("MEMBAR", whole), 1
        assert count(r"\bMEMBAR\.\S*GPU", text) == (kernel != TRANSFER), kernel
        assert count(r"\bMEMBAR\.\S*SYS", text) == releases(kernel) + give_up, kernel
        assert count(r"\bMEMBAR\b", text) == (kernel != TRANSFER) + releases(kernel) + give_up


def test_machine_code_has_vectors_and_no_local_memory(sass: dict[str, str]) -> None:
    for kernel, whole in each(sass):
        text = having("LD ST", whole)
        assert count(r"\b(LDL|STL)\b", text) == 0, kernel
        order = r"\.STRONG\.SYS" if sends_packets(kernel) else r"(?!\.STRONG)"
        for access in ("LDG?", "STG?"):
            assert count(rf"\b{access}\.E\.128{order}", text) > 0, (kernel, access)
