"""Framed messages over a socket pair."""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from server.control.channel import Channel, ChannelClosedError
from server.control.protocol import Failed, FromWorker, Hello, Resume, WorkProgress
from shm_broadcast import Deadline, GroupTimeoutError, MessageDecodeError
from tests.forked import in_a_child

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
    begun = (("tp", (0, 1), b"\0", b"\1\0\377", (0, 1)),)
    failed = Failed(3, begun, "E", "m", "t", exception=b"\0")
    messages = [Hello(7), WorkProgress(1, 2, "weights: é"), failed]
    for message in messages:
        worker.send(message)
    assert [driver.receive(), driver.receive(), driver.receive()] == messages
    assert driver.take() is None


def test_a_message_larger_than_the_socket_holds_waits_for_its_reader(
    ends: tuple[Channel, Channel],
) -> None:
    driver, worker = ends
    large = WorkProgress(0, 0, "x" * (4 << 20))
    sender = threading.Thread(target=worker.send, args=(large,))
    sender.start()
    assert driver.receive(Deadline.after(30)) == large
    sender.join(30)


def test_sending_gives_up_at_the_deadline(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(GroupTimeoutError, match="control channel send"):
        ends[1].send(WorkProgress(0, 0, "x" * (4 << 20)), Deadline.after(0.05))


def test_an_end_that_was_closed_sends_no_more(ends: tuple[Channel, Channel]) -> None:
    ends[1].close()
    with pytest.raises(ChannelClosedError):
        ends[1].send(Hello(7))


def test_receiving_gives_up_at_the_deadline(ends: tuple[Channel, Channel]) -> None:
    with pytest.raises(GroupTimeoutError, match="control channel receive"):
        ends[0].receive(Deadline.after(0.05))


def test_what_was_sent_comes_before_the_end(ends: tuple[Channel, Channel]) -> None:
    driver, worker = ends
    worker.send(Hello(7))
    worker.close()
    assert driver.receive() == Hello(7)
    with pytest.raises(ChannelClosedError):
        driver.receive()
    with pytest.raises(ChannelClosedError):
        driver.send(Resume(1))


def test_a_process_that_lets_broken_pipes_end_it_does_not_end_by_a_channel(
    ends: tuple[Channel, Channel],
) -> None:
    ends[0].close()

    def send() -> None:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        with pytest.raises(ChannelClosedError):
            ends[1].send(Hello(7))

    in_a_child(send)


@pytest.mark.parametrize(
    "written",
    [
        b"a line that a library has printed\n",
        b"\0\0\0\5hello",
        b'\0\0\0\x0f{"type":"Other"}',
        b'\0\0\0\x22{"type":"Hello","pid":"no number"}',
        b"\0\0\0\2\xff\xfe",
    ],
)
def test_what_is_no_message_is_said_to_be_none(
    ends: tuple[Channel, Channel], written: bytes
) -> None:
    driver, worker = ends
    worker.send(Hello(7))
    os.write(worker.fileno(), written)
    assert driver.receive() == Hello(7)
    with pytest.raises(MessageDecodeError, match="control channel"):
        driver.receive(Deadline.after(10))
