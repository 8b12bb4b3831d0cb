"""An NCCL communicator that several threads may use, and any thread may end."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from device_comm.cuda.nccl.library import NcclError, Result
from shm_broadcast.errors import GroupClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from device_comm.cuda.nccl.library import NcclLibrary
    from shm_broadcast.deadline import Deadline

_STUCK = 1.0
"""Seconds after which `NcclHandle.abort` no longer waits for a call to return."""

_NAP = 0.001


class NcclHandle:
    """A non-blocking communicator. It is freed exactly once, and never used afterwards."""

    def __init__(self, library: NcclLibrary, comm: int) -> None:
        """Own ``comm``."""
        self._library = library
        self._comm: int | None = comm
        self._lock = threading.Lock()

    def issue(self, enqueue: Callable[[NcclLibrary, int], bool]) -> bool:
        """Run ``enqueue(library, comm)``; whether NCCL goes on with it in the background.

        Raises:
            NcclError: NCCL refused.
            GroupClosedError: the communicator was finished or aborted.
        """
        with self._lock:
            return enqueue(self._library, self._live())

    def busy(self) -> bool:
        """Whether NCCL still works in the background, on issued operations or on the set-up.

        Raises:
            NcclError: the background work failed.
            GroupClosedError: the communicator was finished or aborted.
        """
        with self._lock:
            comm = self._live()
            result = self._library.async_result(comm)
            if result in (Result.SUCCESS, Result.IN_PROGRESS):
                return result == Result.IN_PROGRESS
            raise self._library.error("background work", result, comm)

    def abort(self) -> None:
        """End the communicator and its operations, also on the device; idempotent.

        If another thread is stuck in a call and holds the lock, this goes on after `_STUCK`: the
        abort is what makes that call return.
        """
        held = self._lock.acquire(timeout=_STUCK)
        try:
            comm, self._comm = self._comm, None
        finally:
            if held:
                self._lock.release()
        if comm is not None:
            self._library.abort(comm)

    def finish(self, deadline: Deadline) -> None:
        """Complete all issued operations and free the communicator; abort it if that takes longer
        than the deadline. Idempotent.
        """
        try:
            busy = self.issue(lambda library, comm: library.finalize(comm))
            while busy and not deadline.expired:
                time.sleep(_NAP)
                busy = self.busy()
            if busy:
                self.abort()
                return
        except NcclError:
            self.abort()
            return
        except GroupClosedError:
            return
        with self._lock:
            comm, self._comm = self._comm, None
        if comm is not None:
            self._library.destroy(comm)

    def _live(self) -> int:
        if self._comm is None:
            raise GroupClosedError("this communicator of NCCL has been ended")
        return self._comm
