"""What qemu's emulation of /proc needs: it makes up when the process that asks has started.

Other processes see the real time, and would take it for another process. qemu knows its files by
their names, and does not know them under other ones.
"""

from __future__ import annotations

import re
from pathlib import Path

_read_bytes = Path.read_bytes


def read_bytes(self: Path) -> bytes:
    pid = re.fullmatch(r"/proc/(\d+)/stat", str(self))
    if pid is None:
        return _read_bytes(self)
    with open(f"/proc//{pid[1]}/stat", "rb") as file:  # noqa: PTH123 - a Path has no second slash
        return file.read()


Path.read_bytes = read_bytes
