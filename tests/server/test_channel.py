"""Framed messages over a socket pair."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from server.channel import Channel, ChannelClosedError
from server.messages import Failed, FromWorker, Hello, Progress, Resume
from shm_broadcast import Deadline, GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    driver, worker = Channel(ours, FromWorker), Channel(theirs, Resume)
    yield driver, worker
    driver.close()
    worker.close()


def test_messages_come_in_order_and_whole(ends: tuple[Channel, Channel]) -> None:
    driver, worker = ends
    messages = [Hello(), Progress(1, 2, "weights: é"), Failed(3, 4, "E", "m", "t", exception=b"\0")]
    for message in messages:
        worker.send(message)
    assert [driver.receive(), driver.receive(), driver.receive()] == messages
    assert driver.take() is None


def test_a_message_larger_than_the_socket_holds_waits_for_its_reader(
    ends: tuple[Channel, Channel],
) -> None:
    driver, worker = ends
    large = Progress(0, 0, "x" * (4 << 20))
    sender = threading.Thread(target=worker.send, args=(large,))
    sender.start()
    assert driver.receive(Deadline.after(30)) == large
    sender.join(30)


def test_sending_gives_up_at_the_deadline(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(GroupTimeoutError, match="control channel send"):
        ends[1].send(Progress(0, 0, "x" * (4 << 20)), Deadline.after(0.05))


def test_receiving_gives_up_at_the_deadline(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(GroupTimeoutError, match="control channel receive"):
        ends[0].receive(Deadline.after(0.05))


def test_what_was_sent_comes_before_the_end(ends: tuple[Channel, Channel]) -> None:
    driver, worker = ends
    worker.send(Hello())
    worker.close()
    assert driver.receive() == Hello()
    with pytest.raises(ChannelClosedError):
        driver.receive()
    with pytest.raises(ChannelClosedError):
        driver.send(Resume(1))
