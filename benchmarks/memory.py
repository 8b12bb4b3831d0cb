"""The shared memory of a family of processes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def shared_bytes(pids: Iterable[int]) -> int:
    """Bytes of shared memory, named or nameless, that processes have mapped, each piece once."""
    found: dict[tuple[str, str], int] = {}
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            where, _, offset, device, inode, *name = line.split(maxsplit=5)
            if name and name[0].startswith(("/dev/shm/", "/memfd:")):
                begin, end = (int(each, 16) for each in where.split("-"))
                size = int(offset, 16) + end - begin
                found[device, inode] = max(found.get((device, inode), 0), size)
    return sum(found.values())
