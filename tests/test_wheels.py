"""The name and content of a wheel; a build, and an import, without what they need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from tests.packages import ROOT, source_archive, source_wheel

if TYPE_CHECKING:
    from pathlib import Path

# An editable installation's finder would hand the checkout's extensions to the installed packages.
WITHOUT_THE_EDITABLE_INSTALLATION = """
import sys
sys.meta_path[:] = [
    finder
    for finder in sys.meta_path
    if not getattr(finder, "__module__", "").startswith("__editable__")
]
"""


def extensions(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if name.endswith(".so")]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of a wheel, without its extensions."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(source_wheel(tmp_path_factory)) as archive:
        archive.extractall(folder)
    for extension in folder.rglob("*.so"):
        extension.unlink()
    (folder / "sitecustomize.py").write_text(WITHOUT_THE_EDITABLE_INSTALLATION)
    return folder


def test_a_wheel_has_both_extensions_and_names_the_platform(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    wheel = source_wheel(tmp_path_factory)
    assert re.search(r"-cp311-abi3-linux_\w+\.whl$", wheel.name)
    assert sorted(extensions(wheel)) == [
        "device_comm/_native.abi3.so",
        "shm_broadcast/_native.abi3.so",
    ]


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
    tmp_path_factory: pytest.TempPathFactory, compiler: str, before: str, text: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", before + BUILD],
        cwd=shutil.copytree(source_archive(tmp_path_factory), tmp_path_factory.mktemp("t") / "t"),
        env={**os.environ, "CC": compiler},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(text)
    assert "apt-get install gcc python3-dev" in done.stderr


def run(installed: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=installed.parent,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("package", "name"), [("shm_broadcast", "Board"), ("group_coordinator", "WorkerPool")]
)
def test_an_import_without_the_extension_fails_with_the_cure(
    installed: Path, package: str, name: str
) -> None:
    done = run(installed, "-c", f"from {package} import {name}")
    assert done.returncode == 1
    assert "ImportError: the C extension of shm_broadcast was not built. Inst" in done.stderr
    assert "pip install --force-reinstall --no-deps --no-cache-dir" in done.stderr


def test_an_import_on_another_system_names_the_system(installed: Path) -> None:
    done = run(installed, "-c", "import sys; sys.platform = 'darwin'; import shm_broadcast")
    assert done.returncode == 1
    text = "ImportError: group-coordinator works on Linux only; this is darwin"
    assert text in done.stderr


def test_an_import_warns_of_nothing() -> None:
    done = run(ROOT, "-W", "error", "-c", "import coordinator, group_coordinator")
    assert (done.returncode, done.stderr) == (0, "")
