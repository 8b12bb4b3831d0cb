"""How many files a pool's driver has open, and what is raised where it may not open enough."""

from __future__ import annotations

import errno
import resource
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shm_broadcast import SharedMemoryError

from ..errors import DescriptorLimitError

if TYPE_CHECKING:
    from collections.abc import Iterator

_OF_A_POOL = 18
_OF_A_WORKER = 8
"""Descriptors that the driver takes for a pool, and more for each worker on its host, while they
start; then 9 fewer, and 7 for each worker."""


def open_files() -> int:
    """How many descriptors this process has.

    Raises:
        OSError: it may have no other one, which it takes to look.
    """
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1


@contextmanager
def enough_files(n_workers: int) -> Iterator[None]:
    """A block that starts ``n_workers`` on this host; what it has opened is closed if it fails.

    Raises:
        DescriptorLimitError: it could not open as many files as it needs.
    """
    try:
        yield
    except (OSError, SharedMemoryError) as error:
        if errno.EMFILE not in (getattr(each, "errno", 0) for each in (error, error.__cause__)):
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        others = limit
        with suppress(OSError):
            others = open_files()
        needed = others + _OF_A_POOL + _OF_A_WORKER * n_workers
        raise DescriptorLimitError(limit, max(needed, limit + 1)) from error
