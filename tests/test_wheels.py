"""What a wheel is called and what it holds, built with a compiler and without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from tests.packages import ROOT, build_wheel, pure_wheel, source_archive

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
WARNING = "MissingExtensionWarning: group-coordinator's C extension was not built"


def extensions(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if name.endswith(".so")]


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that was built where there is no compiler."""
    return pure_wheel(tmp_path_factory)


@pytest.fixture(scope="module")
def installed(pure: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what that wheel holds."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(pure) as archive:
        archive.extractall(folder)
    (folder / "sitecustomize.py").write_text(WITHOUT_THE_EDITABLE_INSTALLATION)
    return folder


def test_a_wheel_without_a_compiler_says_so(pure: Path) -> None:
    assert pure.name.endswith("-py3-none-any.whl")
    assert extensions(pure) == []


def test_a_wheel_has_all_extensions_or_none(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """One that fails to compile takes the others with it."""
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\ncase "$*" in *device_comm/*) exit 1;; esac\nexec cc "$@"\n')
    compiler.chmod(0o700)
    tree = shutil.copytree(source_archive(tmp_path_factory), tmp_path / "tree")
    wheel = build_wheel(tree, tmp_path, str(compiler))
    assert wheel.name.endswith("-py3-none-any.whl")
    assert extensions(wheel) == []


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


def test_an_installation_without_extensions_warns_once_with_the_cure(installed: Path) -> None:
    done = run(installed, "-c", "import shm_broadcast, device_comm, coordinator, group_coordinator")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(WARNING) == 1
    assert "25 times" in done.stderr
    assert "Install a C compiler" in done.stderr
    assert "pip install --force-reinstall --no-deps --no-cache-dir" in done.stderr


def test_the_warning_has_a_class_of_its_own(installed: Path) -> None:
    refused = run(installed, "-W", "error", "-c", "import shm_broadcast")
    assert refused.returncode == 1 and WARNING in refused.stderr
    silenced = "-W", "ignore:group-coordinator:RuntimeWarning"
    script = "import shm_broadcast; print(shm_broadcast.MissingExtensionWarning.__mro__[1])"
    done = run(installed, *silenced, "-c", script)
    assert (done.returncode, done.stderr) == (0, "")
    assert "RuntimeWarning" in done.stdout


@pytest.mark.parametrize(
    ("lie", "text"),
    [
        ("sys.platform = 'darwin'", "group-coordinator works on Linux only, and this is darwin"),
        (
            "platform.machine = lambda: 'aarch64'",
            "group-coordinator's C extension was not built, and nothing works without it on aarc",
        ),
    ],
)
def test_where_a_wheel_does_not_fit_importing_says_why(
    installed: Path, lie: str, text: str
) -> None:
    done = run(installed, "-c", f"import platform, sys; {lie}; import shm_broadcast")
    assert done.returncode == 1
    assert f"ImportError: {text}" in done.stderr


POOL = """
import torch
from group_coordinator import WorkerPool

class Adder:
    def __init__(self, context):
        self.tp = context.groups.tp

    def add(self):
        return self.tp.all_reduce(torch.ones(3)).tolist(), str(self.tp.explain())

if __name__ == "__main__":
    with WorkerPool(Adder, tp=2) as pool:
        total, told = pool.call("add")
        assert total == [2.0] * 3
        print(told)
"""


def test_a_pool_without_extensions_works_and_its_driver_alone_warns(installed: Path) -> None:
    script = installed.parent / "pool.py"
    script.write_text(POOL)
    done = run(installed, str(script))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(WARNING) == 1
    assert "not used: the C extension" in done.stdout
    assert "about 25 times as long" in done.stdout


def test_where_the_extensions_are_there_is_no_warning() -> None:
    done = run(ROOT, "-W", "error", "-c", "import coordinator, group_coordinator")
    assert (done.returncode, done.stderr) == (0, "")
