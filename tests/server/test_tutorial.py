"""What the tutorial and the page about pools show works as it stands there, one file beside the
other.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

from tests.pages.blocks import block_of
from tests.server.test_readme import output

if TYPE_CHECKING:
    from pathlib import Path


def test_the_files(tmp_path: Path) -> None:
    files = {
        "mlp.py": block_of("docs/tutorial.md", "# mlp.py\n"),
        "stages.py": block_of("docs/tutorial.md", "# stages.py\n"),
        "failing.py": block_of("docs/tutorial.md", "# failing.py\n"),
        "cache.py": block_of("docs/tutorial.md", "# cache.py\n"),
        "calls.py": block_of("docs/pools.md", "# calls.py\n"),
        "updates.py": block_of("docs/pools.md", "# updates.py\n"),
        "chain.py": block_of("docs/pools.md", "# chain.py\n"),
    }
    for name, code in files.items():
        (tmp_path / name).write_text(code)
        expected = re.findall(r"print\(.*\)  # (.*)", code)
        assert expected
        assert output(sys.executable, str(tmp_path / name)).splitlines() == expected
