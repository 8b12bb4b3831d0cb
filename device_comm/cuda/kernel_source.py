"""The kernels as one text.

Compiled kernels are cached by their text, so what is included must be part of it: else a new
version of this package would run kernels of the old one.
"""

from __future__ import annotations

import re
from pathlib import Path

_FOLDER = Path(__file__).parent / "kernels"
_INCLUDE = re.compile(r"^#include <(\w+\.cuh)>$", re.MULTILINE)


def kernel_source() -> str:
    """All kernels, with each file of ours in the place where it is included first."""
    seen: set[str] = set()

    def expand(name: str) -> str:
        seen.add(name)
        return _INCLUDE.sub(
            lambda found: "" if found[1] in seen else expand(found[1]),
            (_FOLDER / name).read_text(),
        )

    return expand("collectives.cu")


__all__ = ["kernel_source"]
