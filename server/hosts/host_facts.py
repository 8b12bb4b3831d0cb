"""What must be the same on all hosts of a pool; otherwise they would hang, or worse."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING

from shm_broadcast import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping

_PACKAGES = ("torch", "msgspec", "pyzmq")


def facts_here(given: Mapping[str, str]) -> dict[str, str]:
    """This host's facts, by name: versions, and what it was ``given``.

    torch's build for CPU or CUDA is not part of its version here: that may differ.
    """
    versions = {name: version(name).partition("+")[0] for name in _PACKAGES}
    python = ".".join(map(str, sys.version_info[:2]))
    return {
        "group-coordinator": __version__,
        "python": python,
        "byte order": sys.byteorder,
        "system": platform.system(),
        **versions,
        **given,
    }


def differing_fact(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """The first fact that both sides state and that differs, as text; ``""`` if there is none."""
    for name, value in here.items():
        if name in there and there[name] != value:
            return f"{name} is {there[name]} there, and {value} on the head"
    return ""
