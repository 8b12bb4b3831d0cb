"""Read the launcher's secret, with which the processes of a job authenticate each other.

All processes have the same secret, in a file that only its user can read. An environment variable
holds the file's name, not the secret: child processes inherit the environment.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from shm_broadcast import CoordinatorError
from shm_broadcast.net.derived_key import MIN_SECRET_BYTES

SECRET_FILE = "GROUP_COORDINATOR_SECRET_FILE"
"""The environment variable with the file's name."""

_LONGEST_FILE = 4096
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class SecretError(CoordinatorError, ValueError):
    """The launcher's secret cannot be read, is readable by other users, or is too short."""


def launcher_secret(
    given: bytes | None = None, environ: Mapping[str, str] = os.environ
) -> bytes | None:
    """Return ``given``, else the secret in the file that the environment names, else None.

    Raises:
        SecretError: the file cannot be read, other users may read it, or the secret is too short.
    """
    if given is not None:
        return checked_secret(given, "the secret")
    path = environ.get(SECRET_FILE, "")
    return read_secret(path) if path else None


def read_secret(path: str) -> bytes:
    """Read the secret in a file, without trailing line ends, or raise `SecretError`."""
    try:
        # O_NONBLOCK: opening a named pipe would otherwise block.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _refused(path, f"cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _refused(path, "is not a regular file")
        if status.st_uid != os.geteuid():
            raise _refused(path, f"belongs to user {status.st_uid}, not to user {os.geteuid()}")
        if status.st_mode & _OTHERS:
            mode = stat.S_IMODE(status.st_mode)
            raise _refused(path, f"is open to other users (mode {mode:04o}, wanted 0600)")
        return checked_secret(os.read(fd, _LONGEST_FILE).rstrip(b"\r\n"), _named(path))
    finally:
        os.close(fd)


def checked_secret(secret: bytes, what: str) -> bytes:
    """Return ``secret``, or raise `SecretError` naming ``what`` if it is too short."""
    if len(secret) < MIN_SECRET_BYTES:
        problem = f"{what} must have {MIN_SECRET_BYTES} or more bytes; got {len(secret)}"
        raise SecretError(f"{problem}; {ADVICE}")
    return secret


def _named(path: str) -> str:
    return f"{path!r}, which {SECRET_FILE} names,"


def _refused(path: str, why: str) -> SecretError:
    return SecretError(f"{_named(path)} {why}; {ADVICE}")


ADVICE = (
    "make one with `(umask 077; head -c 32 /dev/urandom | base64 > FILE)`, "
    "and give every host a copy"
)
"""How to make a secret, for error messages."""
