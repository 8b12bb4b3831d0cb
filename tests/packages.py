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

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[1]

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
        _build("sdist", tree, archives)
        (archive,) = archives.glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(folder, filter="data")

    (tree,) = built_once(factory, "source archive", build).iterdir()
    return tree


def source_wheel(factory: pytest.TempPathFactory) -> Path:
    """A wheel of that archive; not to be changed."""
    source = source_archive(factory)

    def build(folder: Path) -> None:
        tree = shutil.copytree(source, factory.mktemp("wheel") / "tree")
        _build("wheel", tree, folder, {"CFLAGS": "-Werror"})

    (wheel,) = built_once(factory, "wheel", build).iterdir()
    return wheel


def _build(kind: str, tree: Path, folder: Path, more: dict[str, str] | None = None) -> None:
    script = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-W", "ignore", "-c", script]
    environment |= more or {}
    subprocess.run(command, cwd=tree, env=environment, capture_output=True, check=True, timeout=300)
