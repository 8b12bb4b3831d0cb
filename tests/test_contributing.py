"""What CONTRIBUTING.md says is so: its test passes, and its files are there."""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import TYPE_CHECKING

from tests.packages import kept_files
from tests.pages.blocks import block_of, read

if TYPE_CHECKING:
    from pathlib import Path

TEXT = read("CONTRIBUTING.md")


def test_its_test_runs_on_four_ranks(tmp_path: Path, store_path: str) -> None:
    file = tmp_path / "test_sum.py"
    file.write_text(block_of("CONTRIBUTING.md", "def test_a_sum("))
    spec = importlib.util.spec_from_file_location("contributed_sum", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules["contributed_sum"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.test_a_sum(store_path)


def test_every_file_that_it_names_is_there() -> None:
    kept = kept_files()
    folders = {f"{name.rpartition('/')[0]}/" for name in kept}
    named = {*re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", TEXT)}
    linked = {link.partition("#")[0] for link in re.findall(r"\]\((docs/[^)]*)\)", TEXT)}
    assert len(named) > 10 and linked
    assert (named | linked) - kept - folders == set()
