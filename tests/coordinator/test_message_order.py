"""Receives match messages by their tags, and begin in their order: without any transport."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.messages.incoming import Inbox, Incoming, OrderedReceive, Receive
from coordinator.messages.wire import Kind
from device_comm import Work
from shm_broadcast import Deadline, DivergenceError, GroupTimeoutError

pytestmark = pytest.mark.quick

WIRE: Any = SimpleNamespace(call=int)
ROUTES: Any = SimpleNamespace(cpu=SimpleNamespace(abort=lambda _: None))
SOON = Deadline.after(60)

# --- tags ----------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("posted", "arriving", "matches"),
    [
        ((0, 0, 0), (0, 0, 0), (0, 1, 2)),
        ((1, 2, 1), (2, 1, 1), (1, 0, 2)),  # of two tags, they swap receives
    ],
)
def test_messages_match_receives_with_their_tag_in_order(
    posted: tuple[int, ...], arriving: tuple[int, ...], matches: tuple[int, ...]
) -> None:
    peer = Peer()
    receives = [peer.post(tag) for tag in posted]
    messages = [peer.arrives(tag) for tag in arriving]
    assert [receives[number].incoming for number in matches] == messages
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


def test_a_message_without_a_tag_or_of_another_kind_is_a_divergence() -> None:
    peer = Peer()
    peer.post(1)
    with pytest.raises(DivergenceError):
        peer.arrives(0)
    peer = Peer()
    peer.post(1)
    with pytest.raises(DivergenceError, match="rank 1 issued send of tree"):
        peer.arrives(1, Kind.TREE)
    peer = Peer()
    peer.post(2)
    peer.arrives(1, Kind.TREE)
    with pytest.raises(DivergenceError, match="rank 1 issued send of tree"):
        peer.post(1)


# --- turns ---------------------------------------------------------------------------------


class Arrival:
    """A `device_comm.Pending` that ends when the test sets ``came``."""

    def __init__(self) -> None:
        self.came = False

    def ready(self) -> bool:
        return self.came

    def wait(self, deadline: Deadline) -> None:
        if not self.came:
            raise GroupTimeoutError("recv", deadline.timeout)


class Receives:
    """Receives from one peer, and in which order each step of theirs was taken."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.on_cpu: list[Arrival] = []
        self.on_device: list[Arrival] = []
        self.last: OrderedReceive | None = None

    def add(self, *, on_cpu: bool = True) -> OrderedReceive:
        number = len(self.on_device)
        self.on_cpu.append(Arrival())
        self.on_device.append(Arrival())
        begin = partial(self._step, "begin", number, self.on_cpu[-1]) if on_cpu else None
        ask = partial(self._step, "ask", number, self.on_device[-1])
        self.last = OrderedReceive(self.last, begin, lambda: [ask()])
        return self.last

    def _step(self, what: str, number: int, arrival: Arrival) -> Work[Any]:
        self.steps.append(f"{what} {number}")
        return Work(None, cast("Any", arrival), timeout=60)


def test_a_receive_begins_once_the_one_before_has_asked() -> None:
    """It asks once its message has arrived on the CPU."""
    receives = Receives()
    first, second, third = receives.add(), receives.add(on_cpu=False), receives.add()
    assert not third.has_asked()
    assert receives.steps == ["begin 0"]
    receives.on_cpu[0].came = True
    assert not third.has_asked()
    assert receives.steps == ["begin 0", "ask 0", "ask 1", "begin 2"]
    assert first.has_asked() and second.has_asked()
    receives.on_cpu[2].came = True
    assert third.has_asked()
    assert not third.ready()
    receives.on_device[2].came = True
    assert third.ready()
    third.wait(SOON)
    assert receives.steps == ["begin 0", "ask 0", "ask 1", "begin 2", "ask 2"]


def test_a_wait_goes_on_with_all_before() -> None:
    receives = Receives()
    first, second = receives.add(), receives.add()
    with pytest.raises(GroupTimeoutError):
        second.wait(SOON)
    assert receives.steps == ["begin 0"]
    for each in (*receives.on_cpu, receives.on_device[1]):
        each.came = True
    second.wait(SOON)
    assert receives.steps == ["begin 0", "ask 0", "begin 1", "ask 1"]
    assert second.ready()
    assert not first.ready()
