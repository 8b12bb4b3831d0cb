"""What is said of system calls that containers, old kernels and limits refuse."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_REFUSED: Final = (errno.EPERM, errno.ENOSYS)
"""What is raised for a system call that a seccomp filter forbids, or that the kernel lacks."""


_LIMITS: Final = {
    errno.EFBIG: " (RLIMIT_FSIZE, ulimit -f)",
    errno.EMFILE: " (RLIMIT_NOFILE, ulimit -n)",
}


def why(error: OSError) -> str:
    """What the system says, and which limit that is of, if it is a limit of this process."""
    return f"{error.strerror or error}{_LIMITS.get(error.errno or 0, '')}"


@contextmanager
def system_call(name: str) -> Iterator[None]:
    """Where the one system call inside fails, the error names it.

    Raises:
        OSError: as inside.
    """
    try:
        yield
    except OSError as error:
        says = " is refused here" if error.errno in _REFUSED else ""
        raise OSError(error.errno, f"{name}{says}: {error.strerror}") from error
