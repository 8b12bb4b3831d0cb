"""What pyproject.toml cannot say: names of packages, and tags of wheels.

The folder ``server`` is installed as ``group_coordinator``: users have a server.py of their own.

The extensions are optional. A wheel that has them is for every CPython from 3.11 on, and for one
platform; one that was built without a compiler has none, and says so by its name.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel


class Wheel(bdist_wheel):
    """Tags ``cp311-abi3-PLATFORM`` with all extensions, ``py3-none-any`` with none of them."""

    def run(self) -> None:
        """Build first, then decide."""
        extensions = self.reinitialize_command("build_ext")
        extensions.inplace = False
        self.run_command("build")
        due = [Path(extensions.get_ext_fullpath(each.name)) for each in extensions.extensions]
        built = [path for path in due if path.exists()]
        if built == due:
            self.py_limited_api = "cp311"
        else:
            for path in built:
                path.unlink()
            self.distribution.ext_modules = []
            self.root_is_pure = True
        super().run()


FLOORS = ("shm_broadcast*", "device_comm*", "coordinator*", "server*")

setup(
    packages=[
        re.sub("^server", "group_coordinator", each) for each in find_packages(include=FLOORS)
    ],
    package_dir={"group_coordinator": "server"},
    cmdclass={"bdist_wheel": Wheel},
)
