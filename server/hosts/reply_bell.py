"""Wakes the driver when a reply from another host arrives, as a ring wakes it by its doorbell."""

from __future__ import annotations

import select
import threading
from typing import TYPE_CHECKING

from shm_broadcast.remote.wake_fd import WakeFd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shm_broadcast import MessageQueue


class ReplyBell:
    """Watches queues from other hosts in a thread of its own. Close it before they are closed.

    Args:
        queues: the queues, at their readers.
        wake: called in the thread each time that something may have arrived.
    """

    def __init__(self, queues: Iterable[MessageQueue], wake: Callable[[], None]) -> None:
        self._wake = wake
        self._end = WakeFd()
        self._poll = select.epoll()
        self._poll.register(self._end.fileno(), select.EPOLLIN)
        for queue in queues:
            # By edges: the descriptor stays readable until the queue itself is looked at.
            self._poll.register(queue.fileno(), select.EPOLLIN | select.EPOLLET)
        self._thread = threading.Thread(target=self._watch, name="pool-reply-bell", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; idempotent."""
        self._end.ring()
        self._thread.join()
        self._poll.close()
        self._end.close()

    def _watch(self) -> None:
        while all(fd != self._end.fileno() for fd, _ in self._poll.poll()):
            self._wake()
