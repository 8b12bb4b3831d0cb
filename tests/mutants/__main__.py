"""Apply each mutant to a copy of the tree and see its tests fail: ``python -m tests.mutants``.

Ends with 1 if a mutant survives or no longer applies. Names of promises as arguments pick mutants:
``python -m tests.mutants Q4``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from tests.mutants.catalogue import MUTANTS, Mutant
from tests.mutants.devices import DEVICE_MUTANTS
from tests.mutants.fuzzed import FUZZED_MUTANTS
from tests.mutants.kernels import KERNEL_MUTANTS

ROOT = Path(__file__).parents[2]
LIMIT = 180.0
"""Seconds for one mutant's tests; one that hangs them is caught."""


def main(wanted: list[str]) -> int:
    survived = 0
    for mutant in (*MUTANTS, *KERNEL_MUTANTS, *DEVICE_MUTANTS, *FUZZED_MUTANTS):
        if wanted and not mutant.promise.startswith(tuple(wanted)):
            continue
        verdict = judge(mutant)
        survived += verdict != "caught"
        sys.stdout.write(f"{verdict:<16} {mutant.promise}\n")
        sys.stdout.flush()
    return 1 if survived else 0


def judge(mutant: Mutant) -> str:
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        copy_to(tree)
        source = tree / mutant.file
        text = source.read_text()
        if text.count(mutant.old) != 1:
            return "does not apply"
        if not passes_unbroken(mutant.tests):
            return "fails unbroken"
        source.write_text(text.replace(mutant.old, mutant.new))
        if mutant.file.endswith((".c", ".h")) and not build(tree):
            return "does not build"
        return "SURVIVED" if run(tree, mutant.tests) == "passed" else "caught"


@cache
def passes_unbroken(tests: tuple[str, ...]) -> bool:
    with tempfile.TemporaryDirectory(prefix="unbroken-") as folder:
        copy_to(Path(folder))
        return run(Path(folder), tests) == "passed"


def copy_to(tree: Path) -> None:
    """What git tracks, as it is in the working tree, and the extensions that were built."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = [name for name in listed.stdout.decode().split("\0") if name]
    names += [str(path.relative_to(ROOT)) for path in ROOT.glob("*/_native*.so")]
    for name in names:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def build(tree: Path) -> bool:
    command = [sys.executable, "setup.py"]
    return not run_in(tree, [*command, "-q", "build_ext", "--inplace", "--force"]).returncode


def run(tree: Path, tests: tuple[str, ...]) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    try:
        ended = run_in(tree, [*command, *tests]).returncode
    except subprocess.TimeoutExpired:
        return "hung"
    return {0: "passed", 1: "failed"}.get(ended, "broken")


def run_in(tree: Path, command: list[str]) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, check=False, timeout=LIMIT
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
