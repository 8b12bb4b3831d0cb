"""A descriptor by which any thread, or a signal handler, wakes a thread that polls."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress

from shm_broadcast.machine.system_calls import system_call


class WakeFd:
    """Readable from `ring` until `clear`. Close it.

    It takes no lock: a signal handler may ring or close it in the middle of a `ring` that it
    interrupts, and its descriptor is never written to once it could be another file's.
    """

    def __init__(self) -> None:
        with system_call("eventfd"):
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._release = weakref.finalize(self, os.close, self._fd)
        self._release.atexit = False  # threads may ring until the process has gone
        self._closed = False
        self._ringing: list[None] = []

    def fileno(self) -> int:
        """The descriptor, the same number also after `close`."""
        return self._fd

    def ring(self) -> None:
        """Wake whoever polls, or will; does nothing after `close`."""
        self._ringing.append(None)  # first: `close` sets `_closed` and looks at this afterwards
        try:
            if not self._closed:
                os.eventfd_write(self._fd, 1)
        finally:
            self._ringing.pop()
            self._release_unused()

    def clear(self) -> None:
        """Stop being readable; for the thread that polls."""
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Close the descriptor, once nobody is in `ring`; idempotent."""
        self._closed = True
        self._release_unused()

    def _release_unused(self) -> None:
        if self._closed and not self._ringing:
            self._release()
