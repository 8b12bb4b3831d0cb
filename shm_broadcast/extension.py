"""Checks that a package's C extension can be loaded: nothing works without it."""

from __future__ import annotations

import importlib
import sys
from typing import Final

from shm_broadcast.cpu import GIVEN_CORES, share_a_cache

CURE: Final = (
    "Install a C compiler and Python's headers (Debian: apt-get install gcc python3-dev), then "
    "build again: pip install --force-reinstall --no-deps --no-cache-dir group-coordinator"
)


def require_extension(package: str) -> None:
    """Load the C extension of ``package``.

    Raises:
        ImportError: this is not Linux, or the extension was not built or cannot be loaded; with
            the command that builds it.
    """
    if sys.platform != "linux":
        raise ImportError(f"group-coordinator works on Linux only; this is {sys.platform}")
    try:
        extension = importlib.import_module(f"{package}._native")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError)
        reason = "was not built" if missing else f"cannot be loaded ({error})"
        raise ImportError(f"the C extension of {package} {reason}. {CURE}") from error
    extension.write_past_caches(not share_a_cache(GIVEN_CORES))


require_extension("shm_broadcast")
