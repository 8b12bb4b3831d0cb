"""A worker's end of the rendezvous store that its driver keeps (`meeting`)."""

from __future__ import annotations

import socket
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from coordinator.stores.asked_store import AskedStore
from coordinator.stores.key_values import Answer, Question

from .channel import Channel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import Store

    from shm_broadcast import Deadline


@contextmanager
def take_seat(seat: int, timeout: float | None) -> Iterator[Store]:
    """The store that all workers of the pool share, until the end of the block.

    Args:
        seat: the inherited descriptor; closed at the end.
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

    with closing(channel), closing(AskedStore(ask, timeout)) as store:
        yield store
