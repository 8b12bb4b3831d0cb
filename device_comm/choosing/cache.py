"""Keeps measured tables between runs: one file for each kind of machine and group.

A file that is damaged, or measured for another kind, is ignored. Writing is atomic: if several
processes write at once, the file is that of one of them.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from device_comm.choosing.selection import Table

if TYPE_CHECKING:
    from collections.abc import Mapping

_FOLDER: Final = "group-coordinator"
_LARGEST: Final = 1 << 20
"""Bytes of a file that are read at most; a longer one is damaged."""


@dataclass(frozen=True, slots=True)
class Key:
    """The machine and the group for which a table was measured.

    Attributes:
        version: this project's, and that of its kernels.
        device: the device's name.
        driver: the device driver's version.
        libraries: the versions of the libraries that move data.
        world_size: the number of ranks.
        topology: where the ranks are, such as ``"2 ranks on 1 device of 1 host"``.
        candidates: the names of the candidates that were measured.
    """

    version: str
    device: str
    driver: str
    libraries: str
    world_size: int
    topology: str
    candidates: str

    def as_dict(self) -> dict[str, str]:
        """In the form of `Table.key`."""
        return {name: str(value) for name, value in asdict(self).items()}


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """The user's folder for tables (XDG_CACHE_HOME, else ~/.cache); None without a home folder."""
    given = environment.get("XDG_CACHE_HOME", "")
    if given.startswith("/"):
        return Path(given) / _FOLDER
    home = environment.get("HOME", "")
    return Path(home) / ".cache" / _FOLDER if home.startswith("/") else None


@dataclass(frozen=True, slots=True)
class TableCache:
    """The tables in one folder; with ``folder`` None nothing is loaded or stored."""

    folder: Path | None

    def load(self, key: Key) -> Table | None:
        """The table stored for ``key``; None if there is no usable one."""
        if self.folder is None:
            return None
        try:
            with self._path(self.folder, key).open("rb") as file:
                table = msgspec.json.decode(file.read(_LARGEST), type=Table)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return table if table.key == key.as_dict() and table.sound() else None

    def store(self, table: Table, key: Key) -> str:
        """Store ``table`` for ``key``. Returns ``""``, or why it could not be stored."""
        if self.folder is None:
            return "there is no cache folder"
        path = self._path(self.folder, key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        except OSError as error:
            return str(error)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(table), indent=1))
            Path(name).replace(path)
        except OSError as error:
            Path(name).unlink(missing_ok=True)
            return str(error)
        return ""

    @staticmethod
    def _path(folder: Path, key: Key) -> Path:
        words = msgspec.json.encode(key.as_dict(), order="sorted")
        return folder / "selection" / f"{hashlib.sha256(words).hexdigest()[:20]}.json"
