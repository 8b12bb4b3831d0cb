"""The driver's end of a channel from another host: what it gives, and when it says so."""

from __future__ import annotations

import math
import os
import select
import threading
from typing import Any, cast

import pytest

from server.control.channel import ChannelClosedError
from server.control.protocol import Detached
from server.hosts.remote_hosts import RemoteChannel, RemoteWorker
from shm_broadcast.eventcount import WakeFd
from tests.shm_broadcast.leaks import open_descriptors


def says_so(channel: RemoteChannel) -> bool:
    return bool(select.select([channel], [], [], 0)[0])


def test_messages_come_in_order_and_then_the_end() -> None:
    messages: list[Any] = ["one", "two"]
    channel = RemoteChannel(messages.append)
    assert channel.take() is None
    for message in tuple(messages):
        channel.put(message)
    channel.end()
    for message in messages:
        assert says_so(channel)
        assert channel.take() == message
    for _ in range(2):
        assert says_so(channel)
        with pytest.raises(ChannelClosedError):
            channel.take()
    channel.close()


def test_a_message_that_was_taken_before_it_is_announced_is_taken_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever takes all there is may look between its two steps."""
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
