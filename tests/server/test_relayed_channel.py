"""The driver's end of a channel from another host: what it gives, and when it says so."""

from __future__ import annotations

import math
import os
import select
import threading
from typing import Any

import pytest

from server.control.channel import ChannelClosedError
from server.hosts.distant_worker import DistantWorker, RelayedChannel


def says_so(channel: RelayedChannel) -> bool:
    return bool(select.select([channel], [], [], 0)[0])


def test_messages_come_in_order_and_then_the_end() -> None:
    messages: list[Any] = ["one", "two"]
    channel = RelayedChannel(messages.append)
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


def test_a_message_that_is_just_arriving_is_there_at_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever takes all there is may look between its two steps."""
    channel, early = RelayedChannel(lambda _: None), []
    announce = os.eventfd_write

    def look_before(event: int, value: int) -> None:
        early.append(channel.take())
        announce(event, value)

    monkeypatch.setattr(os, "eventfd_write", look_before)
    message: Any = "one"
    channel.put(message)
    assert early == [None]
    assert says_so(channel)
    assert channel.take() == "one"
    assert not says_so(channel)
    channel.close()


def test_a_worker_may_have_for_ever_to_end() -> None:
    posted: list[Any] = []
    worker = DistantWorker(1, 1, posted.append)
    ending = threading.Timer(0.1, worker.end, ["exit status 0 on host b"])
    ending.start()
    assert worker.ended(math.inf)
    assert worker.bury() == "exit status 0 on host b"
    ending.join()
    worker.close()
