"""Where measured tables are kept between runs: one file for each kind of machine and group.

A file that is broken, or that belongs to another kind, is as good as none. Writing is atomic:
of several processes that measured at once, one wins.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from device_comm.select import Table

if TYPE_CHECKING:
    from collections.abc import Mapping

_FOLDER: Final = "group-coordinator"
_LARGEST: Final = 1 << 20
"""Bytes of a file that is still read."""


@dataclass(frozen=True, slots=True)
class Key:
    """What a table is good for.

    Attributes:
        device: the device's name.
        driver: its driver's version.
        libraries: the versions of what moves data.
        world_size: how many ranks.
        topology: how they are spread, such as ``"2 ranks on 1 device"``.
        candidates: what was measured.
    """

    device: str
    driver: str
    libraries: str
    world_size: int
    topology: str
    candidates: str

    def as_dict(self) -> dict[str, str]:
        """As tables carry it."""
        return {name: str(value) for name, value in asdict(self).items()}


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """The user's folder for tables, by the XDG rules; None if there is no home either."""
    given = environment.get("XDG_CACHE_HOME", "")
    if given.startswith("/"):
        return Path(given) / _FOLDER
    home = environment.get("HOME", "")
    return Path(home) / ".cache" / _FOLDER if home.startswith("/") else None


@dataclass(frozen=True, slots=True)
class TableCache:
    """The tables in one folder; None: there is none, and nothing is kept."""

    folder: Path | None

    def load(self, key: Key) -> Table | None:
        """The table that was stored for ``key``, if there is one that can be used."""
        if self.folder is None:
            return None
        try:
            with self._path(self.folder, key).open("rb") as file:
                table = msgspec.json.decode(file.read(_LARGEST), type=Table)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return table if table.key == key.as_dict() and table.sound() else None

    def store(self, table: Table, key: Key) -> str:
        """Keep ``table`` for ``key``; why that could not be done, or ``""``."""
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
