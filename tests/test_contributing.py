"""What CONTRIBUTING.md says is so: its test passes, and its files are there."""

from __future__ import annotations

import importlib.util
import re
import sys
from typing import TYPE_CHECKING

from tests.packages import ROOT, kept_files

if TYPE_CHECKING:
    from pathlib import Path

TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_its_test_runs_on_four_ranks(tmp_path: Path, store_path: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    file = tmp_path / "test_sum.py"
    file.write_text(code)
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
