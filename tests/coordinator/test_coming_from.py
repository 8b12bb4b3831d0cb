"""What docs/from-colossalai-bagua.md says is here, is here."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import coordinator
from coordinator.pipeline import Stage

PAGE = Path(__file__).parents[2] / "docs" / "from-colossalai-bagua.md"
ROWS = [
    cells
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| there")
    for cells in [line.strip("| ").split(" | ")]
]
NAMED = sorted({name for row in ROWS for name in re.findall(r"`([\w.]+\.\w+)`", row[1])})
HOMES = {"GroupCoordinator": coordinator.GroupCoordinator, "Stage": Stage}


def test_every_line_says_what_is_here() -> None:
    assert ROWS
    assert [row for row in ROWS if "`" not in row[1] and not row[1].startswith("the same")] == []


@pytest.mark.parametrize("name", NAMED)
def test_what_is_said_to_be_here(name: str) -> None:
    home, _, last = name.rpartition(".")
    if home.startswith("group."):
        with coordinator.init(rank=0) as groups:
            assert hasattr(groups.tp.hierarchy, last)
    else:
        assert callable(getattr(HOMES.get(home) or importlib.import_module(home), last))
