"""What a source archive holds: all that git keeps; and that a wheel comes out of it whole."""

from __future__ import annotations

import re
import zipfile
from typing import TYPE_CHECKING

from tests.packages import kept_files, source_archive, source_wheel

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

LEFT_OUT = {".gitignore"}
GENERATED = {"PKG-INFO", "setup.cfg"}
PACKAGES = ("coordinator/", "device_comm/", "server/", "shm_broadcast/")


def files_in(tree: Path) -> set[str]:
    return {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}


def test_an_archive_holds_what_git_keeps_and_no_more(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    unpacked = source_archive(tmp_path_factory)
    held = {name for name in files_in(unpacked) if ".egg-info/" not in name}
    assert held - GENERATED == kept_files() - LEFT_OUT


def test_a_wheel_of_an_archive_holds_the_packages_and_no_more(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    expected = {
        re.sub("^server/", "group_coordinator/", name)
        for name in kept_files()
        if name.startswith(PACKAGES) and not name.endswith(".c")
    }
    with zipfile.ZipFile(source_wheel(tmp_path_factory)) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".so")]
    held = {name for name in names if ".dist-info/" not in name}
    assert held == expected
