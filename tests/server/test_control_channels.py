"""Control messages between the driver and a worker: framed on a socket, or relayed by a host."""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any, cast

import pytest

from server.control.channel import Channel, ChannelClosedError
from server.control.protocol import Detached, FromWorker, Hello, Resume, WorkProgress
from server.hosts.remote_hosts import RemoteChannel, RemoteWorker
from shm_broadcast import Deadline, GroupTimeoutError, MessageDecodeError
from shm_broadcast.eventcount import WakeFd
from tests.forked import in_a_child
from tests.shm_broadcast.leaks import open_descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.quick

# --- on a socket pair ---------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = socket.socketpair()
    driver, worker = Channel(ours, FromWorker), Channel(theirs, Resume)
    yield driver, worker
    driver.close()
    worker.close()


def test_an_end_gives_up_at_its_deadline(ends: tuple[Channel, Channel]) -> None:
    _, worker = ends
    with pytest.raises(GroupTimeoutError, match="control channel send"):
        worker.send(WorkProgress(0, 0, "x" * (4 << 20)), Deadline.after(0.05))
    with pytest.raises(GroupTimeoutError, match="control channel receive"):
        worker.receive(Deadline.after(0.05))


def test_what_was_sent_arrives_before_the_end(ends: tuple[Channel, Channel]) -> None:
    driver, worker = ends
    worker.send(Hello(7))
    worker.close()
    assert driver.receive() == Hello(7)
    for act in (driver.receive, lambda: driver.send(Resume(1)), lambda: worker.send(Hello(7))):
        with pytest.raises(ChannelClosedError):
            act()


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


# --- relayed by a host --------------------------------------------------------------------------


def says_so(channel: RemoteChannel) -> bool:
    return bool(select.select([channel], [], [], 0)[0])


def test_a_message_that_was_taken_before_it_is_announced_is_taken_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel, early = RemoteChannel(lambda _: None), []
    announce = os.eventfd_write

    def look_before(event: int, value: int) -> None:
        early.append(channel.take())
        announce(event, value)

    monkeypatch.setattr(os, "eventfd_write", look_before)
    message: Any = "one"
    channel.put(message)
    assert early == ["one"]
    assert says_so(channel)
    assert channel.take() is None
    assert not says_so(channel)
    channel.close()


def test_a_message_that_comes_while_all_are_taken_is_given_or_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel = RemoteChannel(lambda _: None)
    clear, message = WakeFd.clear, cast("Any", "one")

    def put_and_clear(news: WakeFd) -> None:
        channel.put(message)
        clear(news)

    with monkeypatch.context() as patch:
        patch.setattr(WakeFd, "clear", put_and_clear)
        assert channel.take() == "one"

    def clear_and_put(news: WakeFd) -> None:
        clear(news)
        channel.put(message)

    with monkeypatch.context() as patch:
        patch.setattr(WakeFd, "clear", clear_and_put)
        assert channel.take() == "one"
    assert says_so(channel)
    channel.close()


def test_what_is_told_of_a_worker_after_its_handle_was_closed_goes_nowhere() -> None:
    worker = RemoteWorker(1, 1, lambda _: None)
    before = open_descriptors()
    worker.close()
    worker.channel.put(Detached())
    worker.show_stack("a stack")
    worker.end("killed by SIGKILL", "a stack")
    worker.close()
    assert open_descriptors() == before - 3


def test_a_worker_may_have_for_ever_to_end() -> None:
    posted: list[Any] = []
    worker = RemoteWorker(1, 1, posted.append)
    ending = threading.Timer(0.1, worker.end, ["exit status 0 on host b"])
    ending.start()
    assert worker.ended(math.inf)
    assert worker.wait() == "exit status 0 on host b"
    ending.join()
    worker.close()
