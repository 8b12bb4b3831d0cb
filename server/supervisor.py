"""Watches a pool's workers: what they say on their control channels, and that they live.

The thread that makes the pool watches until the workers are ready; then a thread of the
supervisor's own does. A death is noticed at once, by pidfd, whatever anybody waits for.
"""

from __future__ import annotations

import math
import os
import select
import threading
from typing import TYPE_CHECKING, Protocol

from server.channel import ChannelClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from server.launchers.local import LocalWorker
    from server.messages import FromWorker


class Watcher(Protocol):
    """Whoever wants to know."""

    def on_message(self, rank: int, message: FromWorker) -> None:
        """A worker said ``message``."""

    def on_death(self, rank: int, how: str, stack: str) -> None:
        """A worker's process has ended; ``stack`` is what it wrote if it crashed."""


class Supervisor:
    """Watches ``workers``; close it with `stop`.

    Attributes:
        thread: the one that watches, once it was started.
    """

    def __init__(self, workers: Sequence[LocalWorker]) -> None:
        self._workers = workers
        self._poll = select.poll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake, select.POLLIN)
        self._waking = threading.Lock()
        self._stopping = False
        self.thread: threading.Thread | None = None
        self._watched = {fd for worker in workers for fd in (worker.channel.fileno(), worker.pidfd)}
        for fd in self._watched:
            self._poll.register(fd, select.POLLIN)

    def step(self, watcher: Watcher, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for something to happen, and pass it on."""
        ready = self._poll.poll(None if timeout == math.inf else timeout * 1000)
        fds = {fd for fd, _ in ready}
        if self._wake in fds:
            os.eventfd_read(self._wake)
        for worker in self._workers:
            if worker.channel.fileno() in fds or worker.pidfd in fds:
                self._read(worker, watcher)
            if worker.pidfd in fds:
                self._forget(worker.pidfd)
                self._forget(worker.channel.fileno())
                watcher.on_death(worker.rank, worker.bury(), worker.stack_file.read())

    def start(self, watcher: Watcher, tick: Callable[[], float]) -> None:
        """Watch in a thread of its own from now on.

        Args:
            watcher: who wants to know.
            tick: called after every event and `wake`; returns in how many seconds to call it again.
        """
        self.thread = threading.Thread(
            target=self._run, args=(watcher, tick), name="pool-supervisor", daemon=True
        )
        self.thread.start()

    def wake(self) -> None:
        """Let the tick be called now; nothing after `stop`."""
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Watch no more; idempotent. Not in a watcher's call."""
        self._stopping = True
        self.wake()
        if self.thread is not None:
            self.thread.join()
        with self._waking:
            if self._wake >= 0:
                os.close(self._wake)
            self._wake = -1

    def _run(self, watcher: Watcher, tick: Callable[[], float]) -> None:
        while not self._stopping:
            self.step(watcher, tick())

    def _read(self, worker: LocalWorker, watcher: Watcher) -> None:
        try:
            while (message := worker.channel.take()) is not None:
                watcher.on_message(worker.rank, message)
        except ChannelClosedError:
            self._forget(worker.channel.fileno())

    def _forget(self, fd: int) -> None:
        if fd in self._watched:
            self._watched.remove(fd)
            self._poll.unregister(fd)
