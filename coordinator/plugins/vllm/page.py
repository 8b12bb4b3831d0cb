"""What an engine's processes tell: why it ended.

The first process, which the user started, keeps a page of memory without a name. The others, which
are started by it, find the page by the environment and add a line for each thing that they tell.
When the first process exits it prints why the engine ended, after all messages of vLLM's own.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Final

import msgspec

PAGE_VARIABLE: Final = "GROUP_COORDINATOR_PAGE"
"""Where the page is: a path in /proc, while the first process lives."""


def keep_page() -> None:
    """Keep a page for the processes that this one starts, unless it was started by such a one.

    Collective: no.
    """
    if PAGE_VARIABLE not in os.environ:
        fd = os.memfd_create("group-coordinator-page", os.MFD_CLOEXEC)
        os.environ[PAGE_VARIABLE] = f"/proc/{os.getpid()}/fd/{fd}"
        atexit.register(_print_the_end, os.getpid(), fd)


def tell(end: str) -> None:
    """Say why the engine ended; nothing without a page. Collective: no."""
    path = os.environ.get(PAGE_VARIABLE)
    if path is None:
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:  # the first process has gone: nobody is left to tell
        return
    try:
        os.write(fd, msgspec.json.encode(end) + b"\n")
    finally:
        os.close(fd)


def _print_the_end(owner: int, fd: int) -> None:
    if os.getpid() != owner:
        return
    text = os.pread(fd, os.fstat(fd).st_size, 0)
    if text:
        reason = msgspec.json.decode(text.splitlines()[0])
        sys.stdout.flush()
        print(f"vLLM's engine has ended: {reason}", file=sys.stderr, flush=True)  # noqa: T201
