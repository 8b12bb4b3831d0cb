"""The instructions of which the kernels consist: all in registers, fences as wide as needed, memory
in wide accesses.

On threads of the host all of this would look the same.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from device_comm.cuda.ipc.abi import KERNELS, TRANSFER
from tests.device_comm.cuda.compiled import ARCHITECTURES, disassemble

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.device_comm.cuda.compiled import Compiled

Code = dict[int, dict[str, str]]

MAX_REGISTERS = 128
"""With which a block of 512 threads fits on a multiprocessor."""


def sends_packets(kernel: str) -> bool:
    return kernel.startswith("ipc_packets")


def releases(kernel: str) -> int:
    """How often it releases something to peers: in two meetings, with each chunk, or never."""
    return 0 if sends_packets(kernel) else 1 if kernel == TRANSFER else 2


def each(code: Code) -> Iterator[tuple[str, str]]:
    for kernels in code.values():
        assert set(kernels) == set(KERNELS)
        yield from kernels.items()


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def having(words: str, text: str) -> str:
    """The lines in which one of the words stands: to look for patterns in them only is quick."""
    return "\n".join(
        line for line in text.splitlines() if any(word in line for word in words.split())
    )


@pytest.fixture(scope="module", params=["nvcc", "NVRTC"])
def sass(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Code:
    if request.param == "nvcc":
        found: Code = request.getfixturevalue("compiled").sass
    else:
        file = tmp_path_factory.mktemp("cubin") / "kernels.cubin"
        file.write_bytes(request.getfixturevalue("cubin"))
        found = disassemble(file)
    if not found:
        pytest.skip("no cuobjdump")
    return found


def test_nvcc_compiles_them_with_all_they_have_in_registers(compiled: Compiled) -> None:
    named = re.findall(r"Compiling entry function '(\w+)' for '(\w+)'", compiled.said)
    expected = [(kernel, f"sm_{number}") for kernel in KERNELS for number in ARCHITECTURES]
    assert sorted(named) == sorted(expected)
    used = [int(count) for count in re.findall(r"Used (\d+) registers", compiled.said)]
    assert len(used) == len(expected) and max(used) <= MAX_REGISTERS
    transfer = [count for (name, _), count in zip(named, used, strict=True) if name == TRANSFER]
    assert max(transfer) <= MAX_REGISTERS // 2, "`Limits.for_ranks` counts on two blocks"
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


def test_the_tail_of_a_block_is_ordered_on_its_device_alone(compiled: Compiled) -> None:
    for kernel, text in each(compiled.ptx):
        tickets = re.findall(r"\batom\.\S+", text)
        assert tickets == ["atom.add.acq_rel.gpu.u32"] * (kernel != TRANSFER), kernel
        assert count(r"\b(fence|membar)\b", text) == 0, kernel


def test_what_peers_look_at_is_stored_for_the_whole_system(compiled: Compiled) -> None:
    for kernel, text in each(compiled.ptx):
        assert count(r"\bst\.release\.sys\b", text) == releases(kernel), kernel
        assert bool(count(r"\bld\.acquire\.sys\b", text)) == bool(releases(kernel)), kernel
        # The number of the kernel, or of chunks; and the tickets, which begin again.
        own = 1 if kernel == TRANSFER else 2
        assert count(r"\bld\.relaxed\.gpu\b", text) == 1, kernel
        assert re.findall(r"\bst\.\w+\.(?:gpu|cta)\b", text) == ["st.relaxed.gpu"] * own, kernel


def test_memory_is_accessed_in_vectors(compiled: Compiled) -> None:
    for kernel, text in each(compiled.ptx):
        order = r"relaxed\.sys\.global\." if sends_packets(kernel) else r"(?:global\.)?"
        for access in ("ld", "st"):
            assert count(rf"\b{access}\.{order}v2\.[bu]64", text) > 0, (kernel, access)


def test_machine_code_has_the_fences_that_are_meant(sass: Code) -> None:
    for kernel, whole in each(sass):
        text, give_up = having("MEMBAR", whole), 1
        assert count(r"\bMEMBAR\.\S*GPU", text) == (kernel != TRANSFER), kernel
        assert count(r"\bMEMBAR\.\S*SYS", text) == releases(kernel) + give_up, kernel
        assert count(r"\bMEMBAR\b", text) == (kernel != TRANSFER) + releases(kernel) + give_up


def test_machine_code_has_vectors_and_no_local_memory(sass: Code) -> None:
    for kernel, whole in each(sass):
        text = having("LD ST", whole)
        assert count(r"\b(LDL|STL)\b", text) == 0, kernel
        order = r"\.STRONG\.SYS" if sends_packets(kernel) else r"(?!\.STRONG)"
        for access in ("LDG?", "STG?"):
            assert count(rf"\b{access}\.E\.128{order}", text) > 0, (kernel, access)
