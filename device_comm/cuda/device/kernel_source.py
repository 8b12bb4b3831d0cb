"""The source of all kernels as one text.

CuPy caches compiled kernels by their source text. Included files must be part of that text: if only
an included file changed, the old kernels would run.
"""

from __future__ import annotations

import re
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "kernels"
_INCLUDE = re.compile(r"^#include <(\w+\.cuh)>$", re.MULTILINE)


def kernel_source() -> str:
    """The source of all kernels; each of our files stands where it is included first."""
    seen: set[str] = set()

    def expand(name: str) -> str:
        seen.add(name)
        return _INCLUDE.sub(
            lambda found: "" if found[1] in seen else expand(found[1]),
            (_FOLDER / name).read_text(),
        )

    return expand("collectives.cu")
