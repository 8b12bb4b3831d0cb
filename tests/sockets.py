"""The sockets of a process that somebody else could reach, as /proc shows them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_INTERNET = ("tcp", "tcp6", "udp", "udp6", "raw", "raw6")


def reachable_sockets(pid: int) -> set[str]:
    """The sockets of process ``pid`` that have an address: of the internet, or a Unix name."""
    mine = _inodes(pid)
    found = set()
    for table in _INTERNET:
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in mine:
                found.add(f"{table} {fields[1]} {fields[2]}")
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in mine and len(fields) > 7:
            found.add(f"unix {fields[7]}")
    return found


def _inodes(pid: int) -> set[str]:
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            target = str(link.readlink())
            if target.startswith("socket:["):
                inodes.add(target.removeprefix("socket:[").removesuffix("]"))
    return inodes
