"""Builds the project's packages as pip does, from what git keeps and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def kept_files() -> set[str]:
    """What git keeps of this tree, and what it would be told to keep."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    return {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}


def copy_kept(tree: Path) -> Path:
    """A copy of those files."""
    for name in kept_files():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    return tree


def build_sdist(tree: Path, folder: Path) -> Path:
    """A source archive of ``tree``, made in ``folder``."""
    _build("sdist", tree, folder)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def unpack(archive: Path, folder: Path) -> Path:
    """The tree that is in a source archive."""
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return tree


def build_wheel(tree: Path, folder: Path, compiler: str | None) -> Path:
    """A wheel of ``tree``, made in ``folder``; ``compiler`` stands for the C compiler."""
    more = {"CFLAGS": "-Werror"}  # what the compiler warns of leaves the extension out
    if compiler is not None:
        more["CC"] = compiler
    _build("wheel", tree, folder, more)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _build(kind: str, tree: Path, folder: Path, more: dict[str, str] | None = None) -> None:
    script = f"from setuptools import build_meta; build_meta.build_{kind}({str(folder)!r})"
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-W", "ignore", "-c", script]
    environment |= more or {}
    subprocess.run(command, cwd=tree, env=environment, capture_output=True, check=True, timeout=300)
