"""System calls that containers and old kernels refuse."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

REFUSED: Final = (errno.EPERM, errno.ENOSYS)
"""What is raised for a system call that a seccomp filter forbids, or that the kernel lacks."""


@contextmanager
def system_call(name: str) -> Iterator[None]:
    """Where the one system call inside is refused, the error names it.

    Raises:
        OSError: as inside.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        raise OSError(error.errno, f"{name} is refused here: {error.strerror}") from error
