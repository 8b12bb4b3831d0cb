"""A file that replaces another one when it is complete: readers see the old or the new one.

Until then it has no name, so a writer that is killed leaves nothing. If the file system requires a
name (as NFS does), it is called ``.RANDOM.unfinished``, in the same folder.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.layout.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator

_KINDS = {
    stat.S_IFDIR: "folder",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
}


class Replacement:
    """A new file, to be written from its beginning. Close it, or use it with ``with``.

    Args:
        path: what it replaces: a regular file, or nothing yet. A link stays; the file that it
            leads to is replaced.

    Raises:
        CheckpointError: something else is there.
        OSError: no file can be written there; names ``path``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._errors_name_the_path():
            self._target = Path(os.path.realpath(path))
            self._check_target()
            self._unfinished = self._target.with_name(f".{secrets.token_hex(8)}.unfinished")
            descriptor, self._has_name = _open(self._unfinished)
            self._file = os.fdopen(descriptor, "wb")

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``.

        Raises:
            OSError: it does not fit; names the path.
        """
        with self._errors_name_the_path():
            self._file.write(data)

    def finish(self) -> None:
        """Put the file where it belongs; it is on the disk then.

        Raises:
            OSError: it cannot be done; names the path.
        """
        with self._errors_name_the_path():
            self._file.flush()
            os.fsync(self._file.fileno())
            if not self._has_name:
                _give_name(self._file.fileno(), self._unfinished)
                self._has_name = True
            self._unfinished.replace(self._target)
            self._has_name = False

    def close(self) -> None:
        """Drop what was not finished. Idempotent."""
        with suppress(OSError):
            self._file.close()
        if self._has_name:
            with suppress(OSError):
                self._unfinished.unlink()

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_target(self) -> None:
        try:
            mode = self._target.stat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISREG(mode):
            kind = _KINDS[stat.S_IFMT(mode)]
            raise CheckpointError(str(self._path), f"a {kind} is there, and no file to replace")

    @contextmanager
    def _errors_name_the_path(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = str(self._path)
            del error.filename2  # of a name that is not there yet: None would be shown
            raise


def _open(name: Path) -> tuple[int, bool]:
    """The descriptor of a new file, and whether it is called ``name``."""
    with suppress(OSError):
        # An empty one is tried first: not everywhere can a file be given a name later.
        trial = _open_nameless(name.parent)
        try:
            _give_name(trial, name)
        finally:
            os.close(trial)
        name.unlink()
        return _open_nameless(name.parent), False
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), True


def _open_nameless(folder: Path) -> int:
    return os.open(folder, os.O_WRONLY | os.O_TMPFILE, 0o666)


def _give_name(descriptor: int, name: Path) -> None:
    # A folder, here one that is not used, has Python call linkat, which follows the first link.
    folder = os.open(name.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.link(f"/proc/self/fd/{descriptor}", name.name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)
