"""The rendezvous store of a pool on one host: the driver keeps it, the workers ask it (`seat`).

Each worker inherits one end of a socket pair (its seat), so nobody else can ask or answer: there is
no address to connect to, and no file.
"""

from __future__ import annotations

import select
import socket
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from coordinator.stores.key_values import KeyValues, Question
from shm_broadcast import Deadline, GroupTimeoutError, MessageDecodeError
from shm_broadcast.remote.wake_fd import WakeFd

from .channel import Channel, ChannelClosedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ANSWER_SECONDS = 1.0
"""How long to wait until a worker takes an answer.

An answer fits into the socket's buffer, so only a worker that asks and asks without reading answers
makes this wait; it gets no more answers.
"""


class WorkerMeeting:
    """The driver's end: answers the workers in a thread of its own. Close it."""

    def __init__(self) -> None:
        """Nobody is invited yet; see `convene`."""
        self._channels: dict[int, Channel] = {}
        self._end = WakeFd()
        self._closed = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def convene(self, newcomers: Iterable[int]) -> Iterator[dict[int, socket.socket]]:
        """Empty the store for another meeting, and make a seat for each newcomer.

        The seats of the other ranks, who have left the meeting before, stay theirs. Inside, the
        newcomers' processes can inherit their seats; at the end they are closed in this process.

        Args:
            newcomers: the ranks whose processes are new.

        Yields:
            Their seats, by rank.
        """
        self._adjourn()
        self._values = KeyValues()
        with ExitStack() as seats:
            made = {}
            for rank in newcomers:
                ours, theirs = socket.socketpair()
                made[rank] = seats.enter_context(theirs)
                if rank in self._channels:
                    self._channels[rank].close()
                self._channels[rank] = Channel(ours, Question)
            self._thread = threading.Thread(target=self._serve, name="pool-meeting", daemon=True)
            self._thread.start()
            yield made

    def close(self) -> None:
        """End the thread and close everything; idempotent."""
        if not self._closed:
            self._closed = True
            self._adjourn()
            for channel in self._channels.values():
                channel.close()
            self._end.close()

    def _adjourn(self) -> None:
        if self._thread is not None:
            self._end.ring()
            if self._thread.is_alive():  # it may not have been started
                self._thread.join()
            self._thread = None
            self._end.clear()

    def _serve(self) -> None:
        channels = {channel.fileno(): channel for channel in self._channels.values()}
        asking = select.poll()
        for fd in (self._end.fileno(), *channels):
            asking.register(fd, select.POLLIN)
        while True:
            for fd, _ in asking.poll():
                if fd == self._end.fileno():
                    return
                if not self._answers(channels[fd]):
                    asking.unregister(fd)

    def _answers(self, channel: Channel) -> bool:
        """Answer a worker's questions that have arrived; False if it is gone or misbehaves."""
        try:
            while (question := channel.take()) is not None:
                channel.send(self._values.answer(question), Deadline.after(_ANSWER_SECONDS))
        except (ChannelClosedError, GroupTimeoutError, MessageDecodeError):
            return False
        return True
