"""What docs/tutorial.md shows works as it stands there, one file beside the other."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.server.test_readme import output

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


def test_the_files(tmp_path: Path) -> None:
    files = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert [name for name, _ in files] == ["mlp.py", "stages.py", "failing.py"]
    for name, code in files:
        (tmp_path / name).write_text(code)
        expected = re.findall(r"print\(.*\)  # (.*)", code)
        assert expected
        assert output(sys.executable, str(tmp_path / name)).splitlines() == expected
