"""Builds the project's packages as pip does; nothing but what git keeps gets into them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.built_once import built_once
from tests.commands import ROOT, run_to_end

if TYPE_CHECKING:
    import pytest

JUNK = (
    *("build/lib/server/pool.py", "dist/old.whl", ".venv/pyvenv.cfg", ".hypothesis/example"),
    *("shm_broadcast/_native.abi3.so", "tests/__pycache__/old.cpython-311.pyc"),
    *("server/workers/__pycache__/old.cpython-311.pyc", ".mypy_cache/cache.json"),
)
"""What builds and tests leave in a tree."""


def kept_files() -> set[str]:
    """The files that git tracks or would add."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}


def copy_kept(tree: Path) -> Path:
    for name in kept_files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    return tree


def source_archive(factory: pytest.TempPathFactory) -> Path:
    """The tree that is in a source archive, made where there is also `JUNK`; not to be changed."""

    def build(folder: Path) -> None:
        tree = copy_kept(factory.mktemp("tree"))
        for name in JUNK:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_text("left over")
        archives = factory.mktemp("archive")
        _make_sdist(tree, archives)
        (archive,) = archives.glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")

    (tree,) = built_once(factory, "source archive", build).iterdir()
    return tree


def source_wheel(factory: pytest.TempPathFactory) -> Path:
    """The wheel of that archive that `make wheels` makes for this machine; not to be changed."""
    source = source_archive(factory)

    def build(folder: Path) -> None:
        tree = shutil.copytree(source, factory.mktemp("wheel") / "tree")
        done = make_wheels(tree, os.uname().machine)
        assert done.returncode == 0, done.stderr
        wheel = Path(done.stdout.splitlines()[-1])
        wheel.rename(folder / wheel.name)

    (wheel,) = built_once(factory, "wheel", build).iterdir()
    return wheel


def make_wheels(tree: Path, *machines: str) -> subprocess.CompletedProcess[str]:
    """Run what `make wheels` runs; the last lines of its output are the files that it has made."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    return run_to_end(
        "deploy/wheels.sh", *machines, cwd=tree, env=environment, status=None, timeout=300
    )


def _make_sdist(tree: Path, folder: Path) -> None:
    script = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    run_to_end(sys.executable, "-W", "ignore", "-c", script, cwd=tree, env=environment, timeout=300)
