"""Loads a package's C extension, or warns what its absence costs and how to build it.

Importing fails with the reason where the package cannot work: on systems other than Linux, and
without the extension on machines other than x86-64, where its Python replacement would be incorrect
because they reorder stores (see `atomics`).
"""

from __future__ import annotations

import importlib
import platform
import sys
import warnings
from functools import cache
from types import ModuleType
from typing import Final

from shm_broadcast.cpu import GIVEN_CORES, share_a_cache

COST: Final = (
    "small collectives and messages take about 25 times as long (1 KiB: 17 to 34 times, 64 KiB: 4 "
    "to 5, 1 MiB: 3 to 6; two ranks on a two-core x86-64 virtual machine, CPython 3.11)"
)

_CURE: Final = (
    "Install a C compiler and Python's headers, then build again: pip install --force-reinstall "
    "--no-deps --no-cache-dir and what was installed (pip may have kept the wheel without it)."
)


_ORDERED_MACHINES: Final = ("x86_64", "i686")
"""Those that keep stores in order, and loads."""


class MissingExtensionWarning(RuntimeWarning):
    """A C extension is missing: everything works, slower."""


def extension_of(package: str) -> ModuleType | None:
    """The C extension of ``package``; None, and one warning for all packages, if it is missing.

    Raises:
        ImportError: nothing works on this system, or on this machine without the extension.
    """
    if sys.platform != "linux":
        raise ImportError(f"group-coordinator works on Linux only, and this is {sys.platform}")
    try:
        extension = importlib.import_module(f"{package}._native")
        extension.write_past_caches(not share_a_cache(GIVEN_CORES))
        return extension
    except ImportError as error:
        why = "was not built" if isinstance(error, ModuleNotFoundError) else f"fails: {error}"
        machine = platform.machine()
        if machine not in _ORDERED_MACHINES:
            raise ImportError(
                f"group-coordinator's C extension {why}, and nothing works without it on "
                f"{machine}. {_CURE}"
            ) from error
        _warn(f"group-coordinator's C extension {why}, so {COST}. {_CURE}")
        return None


@cache
def _warn(text: str) -> None:
    # Cached: once per process. Python's own record of shown warnings is cleared whenever anybody
    # changes the filters.
    warnings.warn(text, MissingExtensionWarning, stacklevel=1)
