"""The head's links to other hosts, both ends stepped by hand: who may take whose place."""

from __future__ import annotations

import ipaddress
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from server.config import PoolConfig
from server.hosts.link import (
    HeadLink,
    HeartbeatMessage,
    HostAdmitted,
    HostHello,
    HostLink,
    HostRefused,
)
from server.hosts.place import Hosts
from tests.patience import until
from tests.refused_threads import refusing_threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from server.hosts.link import FromHead, FromHost

HERE = "127.0.0.1"
SILENCE = 1.0
HELLO = HostHello("other", HERE, 4242, 1, {}, "the first process")
ADMITTED = HostAdmitted(2, (1,), PoolConfig(), stays=True)


class Heard:
    """Either side: keeps what it hears."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.heard: list[Any] = []

    def heartbeat_message(self) -> HeartbeatMessage:
        return HeartbeatMessage(0, b"")

    def admit(self, _: HostHello) -> HostAdmitted:
        return ADMITTED

    def on_message(self, _: int, message: FromHost) -> None:
        self.heard.append(message)

    def on_lost(self, _: int, why: str) -> None:
        self.lost.append(why)

    def hear(self, message: FromHead) -> None:
        if not isinstance(message, HeartbeatMessage):
            self.heard.append(message)

    def lose(self, why: str) -> None:
        self.lost.append(why)


class Ends:
    """A head, and hosts that come. Nothing happens but in `step`."""

    def __init__(self, undo: ExitStack) -> None:
        self._undo = undo
        self.at_head = Heard()
        hosts = Hosts(2, 0, HERE, 0, b"0123456789abcdef", silence_seconds=SILENCE)
        self._hosts = hosts
        self.head = HeadLink(hosts, ipaddress.ip_address(HERE), self.at_head)
        undo.callback(self.head.close)

    def come(self, hello: HostHello) -> tuple[HostLink, Heard]:
        heard = Heard()
        link = HostLink(self._hosts, HERE, self.head.port, hello, heard)
        self._undo.callback(link.close)
        return link, heard

    def step(self, *links: HostLink) -> None:
        for each in (self.head, *links):
            each._step()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with ExitStack() as undo:
        yield Ends(undo)


def admitted(ends: Ends, hello: HostHello) -> HostLink:
    link, heard = ends.come(hello)

    def is_heard() -> bool:
        ends.step(link)
        return bool(ends.at_head.heard)

    until(is_heard)
    assert heard.heard == [ADMITTED]
    return link


def test_a_host_that_comes_again_is_not_refused_for_what_its_old_link_still_brings(
    ends: Ends,
) -> None:
    """As where packets were lost: what was sent before arrives behind the new hello."""
    old = admitted(ends, HELLO)
    new, heard = ends.come(HELLO)
    until(lambda: ends.step(new) or heard.heard or ends.head._pending)
    old.heartbeat_now()
    old._step()
    until(lambda: ends.step(new) or heard.heard)
    assert heard.heard == [ADMITTED]
    assert ends.at_head.lost == ["host other (127.0.0.1) has closed the link, and connected again"]


def test_another_process_is_refused_while_the_first_one_speaks(ends: Ends) -> None:
    first = admitted(ends, HELLO)
    other, heard = ends.come(replace(HELLO, instance_id="another process"))
    until(lambda: ends.step(first, other) or heard.heard)
    assert [type(each) for each in heard.heard] == [HostRefused]
    assert ends.at_head.lost == []


def test_who_has_waited_for_a_silent_hosts_place_may_be_silent_as_long_as_any(ends: Ends) -> None:
    admitted(ends, HELLO)
    began = time.monotonic()
    other, heard = ends.come(replace(HELLO, instance_id="another process"))
    until(lambda: ends.step(other) or heard.heard)
    assert heard.heard == [ADMITTED]
    assert time.monotonic() - began >= SILENCE / 2
    ends.step(other)
    assert len(ends.at_head.lost) == 1


def test_who_has_ended_while_it_waited_keeps_nobody_out(ends: Ends) -> None:
    """As where a process is started in the place of one that was cut off, and then once more."""
    admitted(ends, HELLO)
    second, _ = ends.come(replace(HELLO, instance_id="the second process"))
    until(lambda: ends.step(second) or ends.head._pending)
    second.close()
    third, heard = ends.come(replace(HELLO, instance_id="the third process"))
    until(lambda: ends.step(third) or heard.heard)
    assert heard.heard == [ADMITTED]
    assert len(ends.at_head.lost) == 1


def test_a_head_that_was_stopped_hears_that_the_host_has_given_it_up(ends: Ends) -> None:
    link, heard = ends.come(HELLO)
    until(lambda: ends.step(link) or heard.heard)
    until(lambda: link._step() or heard.lost)
    link.close()
    until(lambda: ends.step() or ends.at_head.lost)
    (end,), (lost,) = heard.lost, ends.at_head.lost
    seconds = end.removeprefix("the head has sent nothing for ")
    why = f"having received nothing from the head for {seconds}"
    assert lost == f"host other ({HERE}) has ended its workers, {why}"


def test_a_link_that_has_no_thread_says_so_and_can_be_closed(ends: Ends) -> None:
    with refusing_threads("pool-hosts"), pytest.raises(RuntimeError, match="new thread"):
        ends.head.begin()
    ends.head.close()
    assert ends.head._zmq.closed
