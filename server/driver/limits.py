"""Errors for limits of the driver's process: open files, processes, threads of the system."""

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

from ..errors import DescriptorLimitError, ProcessLimitError, WorkerStartError

_OF_A_POOL = 18
_OF_A_WORKER = 8
"""Descriptors of the driver during a start: for a pool, and for each worker on its host.

Afterwards 9 fewer, and 7 for each worker."""
_NO_THREAD = "can't start new thread"
"""Python's text for EAGAIN of pthread_create."""
_OF_HOSTS = 40
_OF_A_REMOTE_WORKER = 14
"""Further descriptors with other hosts, and for each worker there."""


def open_files() -> int:
    """Return the number of descriptors of this process, or raise OSError if none is left."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) - 1


def check_has_system_threads() -> None:
    """Raise RuntimeError if threads are coroutines of gevent or eventlet.

    One blocking call would block all of them, also the supervisor.
    """
    primitives = threading.get_ident, queue.SimpleQueue, select.select
    replaced = {each.__module__ for each in primitives} - {"_thread", "_queue", "select"}
    if replaced:
        raise RuntimeError(
            "a pool needs threads of the system; here Python's own modules were patched by "
            f"{', '.join(sorted(replaced))}: make the pool in a process without that"
        )


@contextmanager
def translated_limit_errors(n_here: int, n_elsewhere: int | None) -> Iterator[None]:
    """Wrap a block that starts workers; raise DescriptorLimitError or ProcessLimitError.

    The block must close its files if it fails. With ``n_elsewhere`` workers on other hosts, the
    limit of open files is checked before the block: libzmq ends the process where it can open no
    file.
    """
    more = _OF_A_POOL + _OF_A_WORKER * n_here
    try:
        if n_elsewhere is not None:
            more += _OF_HOSTS + _OF_A_REMOTE_WORKER * n_elsewhere
            if open_files() + more > _limit(resource.RLIMIT_NOFILE):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        yield
    except (OSError, RuntimeError, SharedMemoryError, WorkerStartError) as error:
        numbers = [getattr(each, "errno", 0) for each in (error, error.__cause__)]
        if errno.EAGAIN in numbers or str(error) == _NO_THREAD:
            raise ProcessLimitError(_limit(resource.RLIMIT_NPROC)) from error
        # A worker, which has the same limit, reports the text.
        if errno.EMFILE not in numbers and os.strerror(errno.EMFILE) not in str(error):
            raise
        limit = others = _limit(resource.RLIMIT_NOFILE)
        with suppress(OSError):
            others = open_files()
        raise DescriptorLimitError(limit, max(others + more, limit + 1)) from error


def _limit(kind: int) -> int:
    return resource.getrlimit(kind)[0]
