"""What is raised where a pool's driver may not open enough files, or start enough processes, or has
no threads of the system.
"""

from __future__ import annotations

import errno
import os
import queue
import resource
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shm_broadcast import SharedMemoryError

from ..errors import DescriptorLimitError, ProcessLimitError

_OF_A_POOL = 18
_OF_A_WORKER = 8
"""Descriptors that the driver takes for a pool, and more for each worker on its host, while they
start; then 9 fewer, and 7 for each worker."""
_NO_THREAD = "can't start new thread"
"""What Python says where the system gives it no thread."""
_OF_HOSTS = 40
_OF_A_DISTANT_WORKER = 14
"""More of them where there are other hosts, and for each worker there."""


def open_files() -> int:
    """How many descriptors this process has.

    Raises:
        OSError: it may have no other one, which it takes to look.
    """
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1


def check_has_system_threads() -> None:
    """Refuse to make a pool where threads are the coroutines of gevent or eventlet.

    A call that waits would hold up all of them, also the one that notices a worker's end.

    Raises:
        RuntimeError: they are, or what threads wait by was replaced.
    """
    used = threading.get_ident, queue.SimpleQueue, select.select
    replaced = {each.__module__ for each in used} - {"_thread", "_queue", "select"}
    if replaced:
        raise RuntimeError(
            "a pool needs threads of the system; here Python's own modules were patched by "
            f"{', '.join(sorted(replaced))}: make the pool in a process without that"
        )


@contextmanager
def translated_limit_errors(n_here: int, n_elsewhere: int | None) -> Iterator[None]:
    """A block that starts workers: where a limit keeps it from that, the error says which.

    What the block has opened is closed if it fails.

    With other hosts it is not begun if it will fail: where libzmq may open too few files, it ends
    the process.

    Args:
        n_here: how many workers on this host.
        n_elsewhere: how many on others; ``None``: there are no other hosts.

    Raises:
        DescriptorLimitError: it could not open as many files as it needs.
        ProcessLimitError: it could start no further process or thread.
    """
    more = _OF_A_POOL + _OF_A_WORKER * n_here
    try:
        if n_elsewhere is not None:
            more += _OF_HOSTS + _OF_A_DISTANT_WORKER * n_elsewhere
            if open_files() + more > _limit(resource.RLIMIT_NOFILE):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        yield
    except (OSError, RuntimeError, SharedMemoryError) as error:
        numbers = [getattr(each, "errno", 0) for each in (error, error.__cause__)]
        if errno.EAGAIN in numbers or str(error) == _NO_THREAD:
            raise ProcessLimitError(_limit(resource.RLIMIT_NPROC)) from error
        if errno.EMFILE not in numbers:
            raise
        limit = others = _limit(resource.RLIMIT_NOFILE)
        with suppress(OSError):
            others = open_files()
        raise DescriptorLimitError(limit, max(others + more, limit + 1)) from error


def _limit(kind: int) -> int:
    return resource.getrlimit(kind)[0]
