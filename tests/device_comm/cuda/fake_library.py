"""Compiles the libraries that stand in for the driver and for NCCL."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

COMPILER = shutil.which("gcc") or shutil.which("cc")


def compile_library(source: Path, library: Path, *options: str) -> str:
    """The path of ``library``, made of one file."""
    assert COMPILER is not None
    flags = [*options, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([COMPILER, *flags, "-o", library, source], check=True, timeout=60)
    return str(library)
