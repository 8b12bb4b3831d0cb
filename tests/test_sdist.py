"""What a source archive holds: all that git keeps; and that a wheel comes out of it whole."""

from __future__ import annotations

import re
import zipfile
from typing import TYPE_CHECKING

import pytest

from tests.packages import build_sdist, build_wheel, copy_kept, kept_files, unpack

if TYPE_CHECKING:
    from pathlib import Path

LEFT_OUT = {".gitignore"}
GENERATED = {"PKG-INFO", "setup.cfg"}
JUNK = (
    *("build/lib/server/pool.py", "dist/old.whl", ".venv/pyvenv.cfg", ".hypothesis/example"),
    *("shm_broadcast/_native.abi3.so", "tests/__pycache__/old.cpython-311.pyc"),
    *("server/workers/__pycache__/old.cpython-311.pyc", ".mypy_cache/cache.json"),
)
PACKAGES = ("coordinator/", "device_comm/", "server/", "shm_broadcast/")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is in an archive that was made where there is also what builds and tests leave."""
    tree = copy_kept(tmp_path_factory.mktemp("tree"))
    for name in JUNK:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("left over")
    archive = build_sdist(tree, tmp_path_factory.mktemp("archive"))
    return unpack(archive, tmp_path_factory.mktemp("unpacked"))


def files_in(tree: Path) -> set[str]:
    return {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}


def test_an_archive_holds_what_git_keeps_and_no_more(unpacked: Path) -> None:
    held = {name for name in files_in(unpacked) if ".egg-info/" not in name}
    assert held - GENERATED == kept_files() - LEFT_OUT


def test_a_wheel_of_an_archive_holds_the_packages_and_no_more(
    unpacked: Path, tmp_path: Path
) -> None:
    expected = {
        re.sub("^server/", "group_coordinator/", name)
        for name in kept_files()
        if name.startswith(PACKAGES) and not name.endswith(".c")
    }
    with zipfile.ZipFile(build_wheel(unpacked, tmp_path, "false")) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == expected
