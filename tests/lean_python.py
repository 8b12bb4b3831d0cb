"""Hides all installed packages except some and their requirements, in an interpreter."""

from __future__ import annotations

import re
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

ROOT = Path(__file__).parents[1]


class LeanFinder(MetaPathFinder):
    def __init__(self, hidden: Collection[str]) -> None:
        self._hidden = hidden

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if name in self._hidden else PathFinder.find_spec(name, path, target)

    def invalidate_caches(self) -> None:
        PathFinder.invalidate_caches()


def needed(names: Collection[str]) -> set[str]:
    found: set[str] = set()
    waiting = [normal(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        try:
            lines = requires(name) or ()
        except PackageNotFoundError:
            continue
        bare = [re.match(r"[\w.-]+", line) for line in lines if "extra ==" not in line]
        waiting += [normal(each[0]) for each in bare if each]
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def hide_all_but(names: Collection[str]) -> None:
    kept = needed(names)
    owners = packages_distributions()
    hidden = {
        module
        for module, distributions in owners.items()
        if kept.isdisjoint(map(normal, distributions)) and not (ROOT / module).is_dir()
    }
    sys.meta_path[sys.meta_path.index(PathFinder)] = LeanFinder(hidden)


def lean_variables(folder: Path, names: Collection[str]) -> dict[str, str]:
    """The variables that hide the others from an interpreter, and from all that it starts."""
    (folder / "sitecustomize.py").write_text(
        f"from tests.lean_python import hide_all_but\nhide_all_but({sorted(names)})\n"
    )
    return {"PYTHONPATH": f"{folder}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
