"""An NCCL communicator that several threads may use, and any thread may end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from device_comm.cuda.nccl.library import NcclError, NcclResult
from shm_broadcast.errors import GroupClosedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from device_comm.cuda.nccl.library import NcclLibrary
    from device_comm.cuda.nccl.nccl_memory import NcclMemory

_STUCK = 1.0
"""Seconds after which `NcclHandle.abort` no longer waits for a call to return."""


class NcclHandle:
    """A blocking communicator. It is freed exactly once, and never used afterwards.

    Attributes:
        windows: its windows, with their memory.
        ended: set once NCCL has freed it.
    """

    def __init__(self, library: NcclLibrary, comm: int) -> None:
        """Own ``comm``."""
        self._library = library
        self._comm: int | None = comm
        self._lock = threading.Lock()
        self.ended = threading.Event()
        self.windows: list[tuple[int, NcclMemory]] = []

    def issue(self, enqueue: Callable[[NcclLibrary, int], None]) -> None:
        """Run ``enqueue(library, comm)``, in which NCCL may wait for peers until `abort`.

        Raises:
            NcclError: NCCL refused, or the communicator was aborted meanwhile.
            GroupClosedError: the communicator was finished or aborted before.
        """
        with self._lock:
            if self._comm is None:
                raise GroupClosedError("this communicator of NCCL has been ended")
            enqueue(self._library, self._comm)

    def register(self, memory: NcclMemory, nccl: NcclLibrary, comm: int) -> None:
        """Make a window of ``memory``, in `issue`.

        Collective: yes, every member.
        """
        self.windows.append((nccl.window_register(comm, memory.address, memory.size), memory))

    def check(self) -> None:
        """Look for errors of what NCCL does in the background; not while a call is under way.

        Raises:
            NcclError: something has failed there, such as a connection.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._comm is None:
                return
            result = self._library.async_result(self._comm)
            if result not in (NcclResult.SUCCESS, NcclResult.IN_PROGRESS):
                raise self._library.error("background work", result, self._comm)
        finally:
            self._lock.release()

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
            self.ended.set()

    def finish(self) -> None:
        """Complete all issued operations and free the communicator; idempotent.

        Takes as long as the peers need for their part. If there are windows, the device must have
        done all operations.
        """
        with self._lock:
            comm, self._comm = self._comm, None
        if comm is None:
            return
        try:
            for window, _ in self.windows:
                self._library.window_deregister(comm, window)
            self._library.finalize(comm)
            self._library.destroy(comm)
        except NcclError:
            self._library.abort(comm)
        self.ended.set()
        self.drop_windows(free=True)

    def drop_windows(self, *, free: bool) -> None:
        """Give up the windows' memory, after the end. ``free``: the device does not use it."""
        while self.windows:
            _, memory = self.windows.pop()
            if free:
                memory.free()
            else:
                memory.keep()
