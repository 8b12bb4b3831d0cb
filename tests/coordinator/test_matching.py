"""Receives and messages that match by their tags, without any transport."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.messages.incoming import Inbox, Incoming, Receive
from coordinator.messages.wire import Kind
from device_comm import Work
from shm_broadcast import DivergenceError

WIRE: Any = SimpleNamespace(call=int)
ROUTES: Any = SimpleNamespace(cpu=SimpleNamespace(abort=lambda _: None))


class Peer:
    """One rank's messages, which arrive in the order of `arrives`, and the receives from it."""

    def __init__(self) -> None:
        self.inbox = Inbox(ROUTES, WIRE, 0)
        self.on_their_way: list[Incoming] = []

    def post(self, tag: int = 0) -> Receive:
        receive = Receive(self.inbox, Kind.OBJECT, 1, tag)
        self.inbox.post(receive)
        if receive.incoming is None:
            self.begin(receive)
        return receive

    def begin(self, receive: Receive) -> None:
        receive.incoming = Incoming(receive)
        receive.incoming.pending = Work(None)
        self.on_their_way.append(receive.incoming)

    def arrives(self, tag: int = 0, kind: Kind = Kind.OBJECT) -> Incoming:
        incoming = self.on_their_way.pop(0)
        incoming.frame.kind, incoming.frame.tag = kind, tag
        self.inbox.match(incoming)
        return incoming


def test_messages_with_one_tag_match_in_their_order() -> None:
    peer = Peer()
    receives = [peer.post(), peer.post(), peer.post()]
    messages = [peer.arrives() for _ in receives]
    assert [receive.incoming for receive in receives] == messages
    assert peer.inbox.open == []


def test_messages_of_two_tags_swap_receives() -> None:
    peer = Peer()
    forward, backward, later = peer.post(1), peer.post(2), peer.post(1)
    messages = [peer.arrives(2), peer.arrives(1), peer.arrives(1)]
    assert [backward.incoming, forward.incoming, later.incoming] == messages
    assert peer.inbox.open == []


def test_an_unexpected_message_is_kept_for_a_receive_with_its_tag() -> None:
    peer = Peer()
    third = peer.post(3)
    kept = [peer.arrives(7)]
    assert third.incoming is None
    peer.begin(third)
    kept.append(peer.arrives(7))
    peer.begin(third)
    assert [peer.post(7).incoming, peer.post(7).incoming] == kept
    assert third.incoming is peer.arrives(3)
    assert peer.inbox.unexpected == peer.inbox.open == []


def test_a_receive_without_a_message_on_its_way_is_served_first() -> None:
    peer = Peer()
    first = peer.post(1)
    peer.arrives(2)
    second = peer.post(1)
    assert first.incoming is None
    message = peer.arrives(1)
    assert (first.incoming, second.incoming) == (message, None)


def test_a_message_without_a_tag_must_match() -> None:
    peer = Peer()
    peer.post(1)
    with pytest.raises(DivergenceError):
        peer.arrives(0)


@pytest.mark.parametrize("unexpected", [False, True])
def test_a_message_of_another_kind_does_not_match(unexpected: bool) -> None:
    peer = Peer()
    peer.post(2 if unexpected else 1)
    if unexpected:
        peer.arrives(1, Kind.TREE)
    with pytest.raises(DivergenceError, match="rank 1 issued send of tree"):
        peer.post(1) if unexpected else peer.arrives(1, Kind.TREE)
