"""``make wheels``: wheels that distributions of the last decade take, also another machine's."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packages import copy_kept

MACHINES = {"x86_64": 62, "aarch64": 183}
"""The machines, and their numbers in an ELF file's head."""
EXTENSIONS = ["device_comm/_native.abi3.so", "shm_broadcast/_native.abi3.so"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_kept(tmp_path_factory.mktemp("tree"))


def make_wheels(tree: Path, *machines: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["deploy/wheels.sh", *machines],
        cwd=tree,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("machine", MACHINES)
def test_a_wheel_is_for_every_distribution_and_holds_code_of_its_machine(
    tree: Path, machine: str
) -> None:
    if os.uname().machine != machine and not shutil.which(f"{machine}-linux-gnu-gcc"):
        pytest.skip(f"no cross compiler: Debian's gcc-{machine}-linux-gnu")
    done = make_wheels(tree, machine)
    if "headers" in done.stderr and "could not be fetched" in done.stderr:
        pytest.skip(f"no network: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    archive, wheel = (Path(line) for line in done.stdout.splitlines())
    assert archive.exists() and archive.name.endswith(".tar.gz")
    tags = f"cp311-abi3-manylinux2014_{machine}.manylinux_2_17_{machine}"
    assert wheel.name == f"{archive.name.removesuffix('.tar.gz')}-{tags}.whl"
    with zipfile.ZipFile(wheel) as opened:
        assert sorted(name for name in opened.namelist() if name.endswith(".so")) == EXTENSIONS
        for name in EXTENSIONS:
            assert struct.unpack_from("<H", opened.read(name), 18) == (MACHINES[machine],)


def test_a_machine_without_a_compiler_is_refused_with_the_cure(tree: Path) -> None:
    done = make_wheels(tree, "nowhere")
    assert done.returncode == 1
    assert "no nowhere-linux-gnu-gcc: install gcc-nowhere-linux-gnu" in done.stderr
