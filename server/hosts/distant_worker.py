"""The driver's handle of a worker on another host: a `launchers.worker_handle.WorkerHandle`.

The worker's host watches it and passes its messages on; here they arrive by the link's thread.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from shm_broadcast import NEVER, Deadline
from shm_broadcast.board.stacks import StackFile
from shm_broadcast.remote.wake_fd import WakeFd

from ..control.channel import ChannelClosedError
from .link_messages import SignalWorker, ToWorker

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..control.protocol import FromWorker, Resume, Start
    from .link_messages import FromHead

_BURY_SECONDS = 4.0
"""How long to wait for the word that a worker has ended which was killed."""


class RelayedChannel:
    """A control channel whose other end is on another host.

    Args:
        send: sends a message of the driver.
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self._arrived: deque[FromWorker] = deque()
        self._ended = False
        self._news = WakeFd()

    def fileno(self) -> int:
        """A descriptor that is readable if something has come since `take` gave ``None`` last."""
        return self._news.fileno()

    def send(self, message: Start | Resume, deadline: Deadline = NEVER) -> None:  # noqa: ARG002
        """Send a message soon; does not wait. Lost if the worker, or the link to it, is gone."""
        self._send(message)

    def take(self) -> FromWorker | None:
        """The next message if one has arrived, else ``None``.

        Raises:
            ChannelClosedError: there will be none.
        """
        if not self._arrived and not self._ended:
            self._news.clear()  # before the look: what comes after it is announced anew
        if self._arrived:
            return self._arrived.popleft()
        if self._ended:
            raise ChannelClosedError("the worker has ended")
        return None

    def put(self, message: FromWorker) -> None:
        """Let a message of the worker arrive; from the link's thread."""
        self._arrived.append(message)
        self._news.ring()

    def end(self) -> None:
        """No more messages will arrive."""
        self._ended = True
        self._news.ring()

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        self._news.close()


class DistantWorker:
    """One worker's process on another host; see `WorkerHandle`.

    Attributes:
        pidfd: a descriptor that becomes readable when the worker has ended, or its host is lost.

    Args:
        rank: its global rank.
        since: the generation in which it is started.
        post: sends a message to its host.
    """

    def __init__(self, rank: int, since: int, post: Callable[[FromHead], None]) -> None:
        self.rank = rank
        self.since = since
        self.pid = 0
        self.greeted = self.away = False
        self.channel = RelayedChannel(lambda message: post(ToWorker(rank, message)))
        self._gone = WakeFd()
        self.pidfd = self._gone.fileno()
        self.stack_file = StackFile()
        self._post = post
        self._how = ""
        self._over = threading.Event()
        self._closing = threading.RLock()  # a signal handler may close it, too

    def start(self, start: Start, deadline: Deadline) -> None:
        """Send the start message."""
        self.away = False
        self.channel.send(start, deadline)

    def ended(self, timeout: float = 0.0) -> bool:
        """Wait until the process has ended or is lost; False after ``timeout`` seconds."""
        if timeout > 0:
            return self._over.wait(min(timeout, threading.TIMEOUT_MAX))
        return self._over.is_set()  # takes no lock, which a signal handler could leave taken

    def signal(self, number: int) -> None:
        """Send SIGTERM, SIGKILL or `STACK_SIGNAL` to the worker, unless it has ended."""
        if not self.ended():
            self._post(SignalWorker(self.rank, number))

    def cut_off(self) -> None:
        """Nothing: its host does that."""

    def bury(self) -> str:
        """Wait for a process that has ended, or was killed, and return how it ended."""
        if not self.ended(_BURY_SECONDS):
            return "its host does not say how"
        return self._how

    def close(self) -> None:
        """Close all descriptors, after `bury`; idempotent, from any thread."""
        with self._closing:
            self.channel.close()
            self.stack_file.close()
            self._gone.close()

    def show_stack(self, text: str) -> None:
        """Let the worker's stack arrive; from the link's thread."""
        with self._closing:
            if self.stack_file.fd >= 0:
                os.write(self.stack_file.fd, text.encode())

    def end(self, how: str, stack: str = "") -> None:
        """Note that the process has ended, or its host is lost; from the link's thread."""
        if self.ended():
            return
        self._how = how
        if stack:
            self.show_stack(stack)
        self._over.set()
        self.channel.end()
        self._gone.ring()
