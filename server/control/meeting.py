"""The rendezvous store of a pool on one host: the driver keeps it, the workers ask it.

Each worker inherits one end of a socket pair (its seat), so nobody else can ask or answer: there is
no address to connect to, and no file.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from coordinator.stores.asked_store import AskedStore
from coordinator.stores.key_values import Answer, KeyValues, Question
from shm_broadcast import Deadline, GroupTimeoutError, MessageDecodeError

from .channel import Channel, ChannelClosedError

if TYPE_CHECKING:
    from torch.distributed import Store

_ANSWER_SECONDS = 1.0
"""How long to wait until a worker takes an answer.

An answer fits into the socket's buffer, so only a worker that asks and asks without reading answers
makes this wait; it gets no more answers.
"""


class WorkerMeeting:
    """The driver's end: answers the workers in a thread of its own. Close it.

    Attributes:
        seats: the workers' ends, by rank, for them to inherit; see `seated`.
    """

    def __init__(self, n_workers: int) -> None:
        """Make a seat for each of ``n_workers`` workers and start the thread."""
        with ExitStack() as undo:
            self._channels: dict[int, Channel] = {}
            self.seats: list[socket.socket] = []
            for _ in range(n_workers):
                ours, theirs = socket.socketpair()
                self.seats.append(undo.enter_context(theirs))
                channel = Channel(ours, Question)
                undo.callback(channel.close)
                self._channels[channel.fileno()] = channel
            self._end = os.eventfd(0, os.EFD_CLOEXEC)
            undo.callback(os.close, self._end)
            self._values = KeyValues()
            self._thread = threading.Thread(target=self._serve, name="pool-meeting", daemon=True)
            self._thread.start()
            self._undo = undo.pop_all()

    def seated(self) -> None:
        """Close the driver's copies of the seats, once every worker has inherited its own."""
        for seat in self.seats:
            seat.close()

    def close(self) -> None:
        """End the thread and close everything; idempotent."""
        if self._thread.is_alive():
            os.eventfd_write(self._end, 1)
            self._thread.join()
        self._undo.close()

    def _serve(self) -> None:
        asking = select.poll()
        for fd in (self._end, *self._channels):
            asking.register(fd, select.POLLIN)
        while True:
            for fd, _ in asking.poll():
                if fd == self._end:
                    return
                if not self._answers(self._channels[fd]):
                    asking.unregister(fd)

    def _answers(self, channel: Channel) -> bool:
        """Answer a worker's questions that have arrived; False if it is gone or misbehaves."""
        try:
            while (question := channel.take()) is not None:
                channel.send(self._values.answer(question), Deadline.after(_ANSWER_SECONDS))
        except (ChannelClosedError, GroupTimeoutError, MessageDecodeError):
            return False
        return True


def take_seat(seat: int, timeout: float | None) -> Store:
    """In a worker: the store that all workers of the pool share.

    Args:
        seat: the inherited descriptor.
        timeout: seconds to wait for each answer; None: for ever.
    """
    connection = socket.socket(fileno=seat)
    connection.set_inheritable(False)
    channel = Channel(connection, Answer)

    def ask(question: Question, deadline: Deadline) -> Answer:
        channel.send(question, deadline)
        while True:
            answer: Answer = channel.receive(deadline)
            # Another number: the answer to a question whose asker was interrupted while waiting.
            if answer.number == question.number:
                return answer

    return AskedStore(ask, timeout)
