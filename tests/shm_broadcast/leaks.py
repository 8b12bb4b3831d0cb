"""What a test may have left behind."""

from __future__ import annotations

import gc
import os
import resource
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shm_broadcast.state.stacks import write_stacks_when_asked

if TYPE_CHECKING:
    from collections.abc import Iterator


def open_descriptors() -> int:
    """How many descriptors this process has, forgotten objects not counted."""
    gc.collect()
    write_stacks_when_asked()  # whose file a process keeps for good, so it is always counted
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Inside, this process gets no further descriptor; those that it has can be used."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # all three are open
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
