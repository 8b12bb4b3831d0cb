"""Rules of the whole house: who may import whom, what is public, what may be absent."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("shm_broadcast", "device_comm", "coordinator", "server")
"""The ground floor first. A floor imports those below it, never one above."""

MODEL_LIBRARIES = {"transformers", "sentence_transformers"}

IMPORT_ALL = """
import importlib, pkgutil, sys
sys.modules["cupy"] = None
for floor in sys.argv[1:]:
    package = importlib.import_module(floor)
    for module in pkgutil.walk_packages(package.__path__, floor + "."):
        importlib.import_module(module.name)
"""


def tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.py"], cwd=ROOT, capture_output=True, check=True, text=True
    )
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).exists()]


def imported_by(path: Path) -> set[str]:
    """The top-level packages that a file imports anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("floor", FLOORS)
def test_imports_run_one_way(floor: str) -> None:
    above = {*FLOORS[FLOORS.index(floor) + 1 :], "tests", "benchmarks"}
    wrong = {
        str(path.relative_to(ROOT)): sorted(upwards)
        for path in (ROOT / floor).rglob("*.py")
        if (upwards := imported_by(path) & above)
    }
    assert wrong == {}


def test_model_libraries_are_imported_by_the_server_and_its_benchmarks_only() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in tracked()
        if not {"server", "benchmarks"} & {*path.relative_to(ROOT).parts}
        and imported_by(path) & MODEL_LIBRARIES
    ]
    assert wrong == []


@pytest.mark.parametrize("floor", FLOORS)
def test_public_names_are_sorted_and_there(floor: str) -> None:
    package = importlib.import_module(floor)
    names: list[str] = package.__all__
    assert names == sorted(set(names))
    assert [name for name in names if not hasattr(package, name)] == []


def test_every_module_imports_without_cupy() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IMPORT_ALL, *FLOORS],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
