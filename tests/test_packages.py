"""Source archives and wheels: their content; builds and imports without their needs."""

from __future__ import annotations

import os
import re
import shutil
import struct
import sys
import zipfile
from pathlib import Path

import pytest

from tests.commands import run_code, run_to_end
from tests.packages import copy_kept, kept_files, make_wheels, source_archive, source_wheel

Factory = pytest.TempPathFactory

MACHINES = {"x86_64": 62, "aarch64": 183}
"""Their numbers in an ELF file's head."""
EXTENSIONS = ["device_comm/_native.abi3.so", "shm_broadcast/_native.abi3.so"]
PACKAGES = ("coordinator/", "device_comm/", "server/", "shm_broadcast/")

# An editable installation's finder would hand the checkout's extensions to the installed packages.
WITHOUT_THE_EDITABLE_INSTALLATION = """
import sys
sys.meta_path[:] = [
    finder
    for finder in sys.meta_path
    if not getattr(finder, "__module__", "").startswith("__editable__")
]
"""


# --- content ------------------------------------------------------------------------------


def test_an_archive_holds_the_files_of_git_and_no_more(tmp_path_factory: Factory) -> None:
    tree = source_archive(tmp_path_factory)
    files = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    held = {name for name in files if ".egg-info/" not in name}
    assert held - {"PKG-INFO", "setup.cfg"} == kept_files() - {".gitignore"}


def test_a_wheel_holds_the_packages_and_both_extensions(tmp_path_factory: Factory) -> None:
    wheel = source_wheel(tmp_path_factory)
    check_extensions(wheel, os.uname().machine)
    expected = {
        re.sub("^server/", "group_coordinator/", name)
        for name in kept_files()
        if name.startswith(PACKAGES) and not name.endswith(".c")
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not re.search(r"\.dist-info/|/$", name)}
    assert names - {*EXTENSIONS} == expected


def check_extensions(wheel: Path, machine: str) -> None:
    """A wheel is for every distribution, and holds code of its machine."""
    tags = f"cp311-abi3-manylinux2014_{machine}.manylinux_2_17_{machine}"
    assert wheel.name.endswith(f"-{tags}.whl")
    with zipfile.ZipFile(wheel) as opened:
        assert sorted(name for name in opened.namelist() if name.endswith(".so")) == EXTENSIONS
        for name in EXTENSIONS:
            assert struct.unpack_from("<H", opened.read(name), 18) == (MACHINES[machine],)


# --- make wheels --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tree(tmp_path_factory: Factory) -> Path:
    return copy_kept(tmp_path_factory.mktemp("tree"))


def test_a_wheel_is_made_for_another_machine(tree: Path) -> None:
    (machine,) = {*MACHINES} - {os.uname().machine}
    if not shutil.which(f"{machine}-linux-gnu-gcc"):
        pytest.skip(f"no cross compiler: Debian's gcc-{machine}-linux-gnu")
    done = make_wheels(tree, machine)
    if "headers" in done.stderr and "could not be fetched" in done.stderr:
        pytest.skip(f"no network: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    archive, wheel = (Path(line) for line in done.stdout.splitlines())
    assert archive.exists() and wheel.name.startswith(archive.name.removesuffix(".tar.gz"))
    check_extensions(wheel, machine)


def test_a_machine_without_a_compiler_is_refused_with_the_cure(tree: Path) -> None:
    done = make_wheels(tree, "nowhere")
    assert done.returncode == 1
    assert "no nowhere-linux-gnu-gcc: install gcc-nowhere-linux-gnu" in done.stderr


# --- builds and imports without their needs -----------------------------------------------

NO_HEADERS = (
    "import setuptools, distutils.sysconfig as s; s.get_python_inc = lambda *_, **__: '/nowhere'; "
)
BUILD = "import runpy, sys; sys.argv[1:] = ['-q', 'build_ext']; runpy.run_path('setup.py')"


@pytest.mark.parametrize(
    ("compiler", "before", "text"),
    [
        ("no-such-cc", "", "group-coordinator needs a C compiler; no-such-cc is missing. "),
        ("cc", NO_HEADERS, "group-coordinator needs Python's headers; Python.h is not in "),
    ],
)
def test_a_build_without_compiler_or_headers_ends_with_the_cure(
    tmp_path_factory: Factory, compiler: str, before: str, text: str
) -> None:
    tree = shutil.copytree(source_archive(tmp_path_factory), tmp_path_factory.mktemp("t") / "t")
    code, environment = ("-W", "ignore", "-c", before + BUILD), {**os.environ, "CC": compiler}
    done = run_to_end(sys.executable, *code, cwd=tree, env=environment, status=1)
    assert done.stderr.startswith(text)
    assert "apt-get install gcc python3-dev" in done.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: Factory) -> Path:
    """A folder with the content of a wheel, without its extensions."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(source_wheel(tmp_path_factory)) as archive:
        archive.extractall(folder)
    for extension in folder.rglob("*.so"):
        extension.unlink()
    (folder / "sitecustomize.py").write_text(WITHOUT_THE_EDITABLE_INSTALLATION)
    return folder


def errors_of(packages: Path, code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    return run_code(code, cwd=packages.parent, env=environment, status=1).stderr


@pytest.mark.parametrize(
    ("package", "name"), [("shm_broadcast", "Board"), ("group_coordinator", "WorkerPool")]
)
def test_an_import_without_the_extension_fails_with_the_cure(
    installed: Path, package: str, name: str
) -> None:
    errors = errors_of(installed, f"from {package} import {name}")
    assert "ImportError: the C extension of shm_broadcast was not built. Inst" in errors
    assert "pip install --force-reinstall --no-deps --no-cache-dir" in errors


def test_an_import_on_another_system_names_the_system(installed: Path) -> None:
    code = "import sys; sys.platform = 'darwin'; import shm_broadcast"
    errors = errors_of(installed, code)
    assert "ImportError: group-coordinator works on Linux only; this is darwin" in errors
