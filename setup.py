"""Names of packages, tags of wheels and the check for a compiler, for pyproject.toml.

The folder ``server`` is installed as ``group_coordinator``: users have a server.py of their own. A
wheel is for every CPython from 3.11 on, and for one platform.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

CURE = "Install them, then build again. Debian: apt-get install gcc python3-dev"


class Extensions(build_ext):
    """Builds the extensions, or ends with one sentence where a tool for that is missing."""

    def build_extensions(self) -> None:
        """Check for a compiler and Python's headers, then build."""
        command = self.compiler.compiler_so[0]
        if shutil.which(command) is None:
            raise SystemExit(f"group-coordinator needs a C compiler; {command} is missing. {CURE}")
        folders = self.compiler.include_dirs
        if not any(Path(folder, "Python.h").is_file() for folder in folders):
            missing = f"Python.h is not in {' or '.join(folders)}"
            raise SystemExit(f"group-coordinator needs Python's headers; {missing}. {CURE}")
        super().build_extensions()


class Wheel(bdist_wheel):
    """Tags wheels ``cp311-abi3-PLATFORM``."""

    def finalize_options(self) -> None:
        """Choose the stable ABI."""
        self.py_limited_api = "cp311"
        super().finalize_options()


FLOORS = ("shm_broadcast*", "device_comm*", "coordinator*", "server*")

setup(
    packages=[
        re.sub("^server", "group_coordinator", each) for each in find_packages(include=FLOORS)
    ],
    package_dir={"group_coordinator": "server"},
    cmdclass={"bdist_wheel": Wheel, "build_ext": Extensions},
)
