"""Conclusions from the heartbeats of other hosts, without hosts, a store or a clock."""

from __future__ import annotations

import logging
from typing import ClassVar

import msgspec
import pytest

from coordinator import remote_boards
from coordinator.hosts import _named
from coordinator.remote_boards import RemoteBoards, encode_heartbeat, number_of
from shm_broadcast import Board

pytestmark = pytest.mark.quick

SILENCE, SUSPECT = remote_boards.SILENCE_SECONDS, remote_boards.SUSPECT_SECONDS


class RemoteMembers:
    """Ranks 2 and 3 on host-b, 4 on host-c, seen from the host of 0 and 1; rank 4 keeps the store.

    Attributes:
        now: the clock.
        boards: under test.
        swaps: how often a swap of heartbeats was requested.
    """

    def __init__(self, keeper: int | None = 4) -> None:
        self.now = 100.0
        self.swaps = 0
        self.there = Board.create(5, 2)
        self.boards = RemoteBoards(
            range(5),
            {"host-b": [2, 3], "host-c": [4]},
            keeper=keeper,
            store="store:1",
            swap=self._swap,
            clock=lambda: self.now,
        )
        self.last = {host: self.heartbeat(members, 1) for host, members in self.members.items()}

    members: ClassVar = {"b": [2, 3], "c": [4]}

    def _swap(self) -> None:
        self.swaps += 1

    def heartbeat(self, members: list[int], number: int) -> bytes:
        return encode_heartbeat(self.there, members, number)

    def turn(self, *hosts: str) -> list[remote_boards.FailureHeartbeat]:
        """The store answers, with new beats of ``hosts``."""
        for host in hosts:
            number = number_of(self.last[host]) + 1
            self.last[host] = self.heartbeat(self.members[host], number)
        return self.boards.receive(self.last.values())

    def text(self, member: int) -> str:
        return str(self.boards.status(member))


@pytest.fixture
def elsewhere() -> RemoteMembers:
    return RemoteMembers()


def test_a_member_is_described_as_on_its_board(elsewhere: RemoteMembers) -> None:
    assert elsewhere.boards.status(1) is None  # it is on this host
    assert not elsewhere.boards.gone(1)
    assert elsewhere.text(2) == "rank 2 (on another host, host-b, not visible from here)"
    assert not elsewhere.boards.gone(2)
    elsewhere.there.record_begin("tp send")
    elsewhere.turn("b")
    elsewhere.now += 0.5
    status = elsewhere.boards.status(2)
    assert status is not None
    assert (status.state, status.operation, status.sequence) == ("busy", "tp send", 1)
    assert (status.host, status.silence) == ("host-b", 0.0)
    assert status.age == pytest.approx(0.5, abs=0.3)
    assert elsewhere.text(2).endswith("on host-b), last seen in tp send #1, 0.5 s ago")
    old = elsewhere.last["b"]
    elsewhere.there.leave()
    elsewhere.turn("b")
    elsewhere.boards.receive([old, elsewhere.last["c"]])  # an old heartbeat changes nothing
    assert elsewhere.boards.gone(2)
    elsewhere.now += 100
    elsewhere.turn()
    assert "on host-b) has closed its end, last seen in tp send #1" in elsewhere.text(2)


def test_a_silent_host_is_named_first_and_lost_and_logged_later(
    elsewhere: RemoteMembers, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere.turn("b", "c")
    elsewhere.now += 2.1
    elsewhere.turn("c")
    assert elsewhere.boards.problems() == "host-b (ranks 2, 3) silent for 2.1 s"
    assert not elsewhere.boards.gone(2)
    elsewhere.now += SILENCE - 2
    elsewhere.turn("c")
    with caplog.at_level(logging.INFO, "coordinator"):
        assert all(elsewhere.boards.gone(member) for member in (2, 3, 2))
    (line,) = caplog.records
    assert line.getMessage().startswith("host host-b (ranks 2, 3) is lost: silent for 10.1 s")
    assert line.__dict__["host"] == "host-b"
    assert not elsewhere.boards.gone(4)


def test_after_a_broken_connection_a_silent_host_is_lost_sooner(elsewhere: RemoteMembers) -> None:
    elsewhere.turn("b", "c")
    elsewhere.boards.suspect([1, 2, 4])
    elsewhere.now += SUSPECT + 0.1
    elsewhere.turn("c")
    assert elsewhere.boards.gone(2)
    assert not elsewhere.boards.gone(4)
    elsewhere.now += 10
    elsewhere.turn("b", "c")
    elsewhere.now += SUSPECT + 0.1
    elsewhere.turn("c")
    assert not elsewhere.boards.gone(2)


def test_a_host_is_lost_only_after_an_answer_of_the_store(elsewhere: RemoteMembers) -> None:
    elsewhere.turn("b", "c")
    known = elsewhere.boards.suspect([2])
    elsewhere.now += 3
    assert not known()  # this process was stalled, and has not looked since
    elsewhere.turn("c")
    assert known()
    assert elsewhere.boards.gone(2)
    elsewhere = RemoteMembers()
    known = elsewhere.boards.suspect([2])
    for _ in range(4):  # its heartbeats arrive after its connection broke
        elsewhere.now += 0.5
        assert not known()
        elsewhere.turn("b", "c")
    assert known()
    assert not elsewhere.boards.gone(2)


def test_a_silent_or_ended_store_is_waited_for_in_bounds(elsewhere: RemoteMembers) -> None:
    known = elsewhere.boards.suspect([2])
    elsewhere.now += SILENCE - 0.1
    assert not known()
    elsewhere.now += 0.1
    assert known()
    elsewhere = RemoteMembers()
    elsewhere.boards.store_ended("its connection broke")
    known = elsewhere.boards.suspect([2])
    elsewhere.now += SUSPECT
    assert not known()
    elsewhere.now += SUSPECT
    assert known()


def test_a_process_that_was_stopped_itself_takes_no_host_for_silent(
    elsewhere: RemoteMembers,
) -> None:
    elsewhere.turn("b", "c")
    elsewhere.now += 1000
    assert not elsewhere.boards.gone(2)
    assert not elsewhere.boards.gone(4)
    elsewhere.now += 0.1
    elsewhere.turn("b", "c")
    assert not elsewhere.boards.gone(4)
    assert elsewhere.boards.problems() == ""


def test_a_store_that_does_not_answer_is_named_and_its_keeper_lost(
    elsewhere: RemoteMembers,
) -> None:
    elsewhere.turn("b", "c")
    elsewhere.now += 3.0
    assert elsewhere.boards.problems() == (
        "no heartbeats of other hosts arrive: the store at store:1, hosted by rank 4, "
        "has not answered for 3.0 s"
    )
    assert not elsewhere.boards.gone(4)
    for _ in range(100):
        elsewhere.now += 0.1
        elsewhere.boards.gone(4)
    assert elsewhere.boards.gone(4)
    assert not elsewhere.boards.gone(2)


@pytest.mark.parametrize("keeper", [4, None])
def test_the_end_of_the_store_is_the_end_of_its_keeper(keeper: int | None) -> None:
    elsewhere = RemoteMembers(keeper)
    elsewhere.turn("b", "c")
    elsewhere.boards.store_ended("Connection was closed")
    assert elsewhere.boards.gone(4) == (keeper == 4)
    elsewhere.now += 100
    assert not elsewhere.boards.gone(2)
    assert elsewhere.boards.problems() == (
        "no heartbeats of other hosts arrive any more: Connection was closed"
    )


def test_a_failure_is_forwarded_and_its_culprit_is_dead(elsewhere: RemoteMembers) -> None:
    elsewhere.there.abort("why", culprit=3)
    failures = elsewhere.turn("b")
    assert [(each.member, each.kind, each.message, each.culprit) for each in failures] == [
        (2, "Abort", "why", 3)
    ]
    elsewhere.boards.mark_dead(3)
    elsewhere.boards.mark_dead(3)
    assert elsewhere.swaps == 1
    assert elsewhere.boards.gone(3)


@pytest.mark.parametrize(
    "forged",
    [
        b"",
        b"nonsense",
        b"\x93\x01\x91\x97\x01\x02\xa2\xff\xfe",  # text that is no UTF-8
        msgspec.msgpack.encode((9, [(4, 1, "lost", "", 0, None, 0)], None)),
        msgspec.msgpack.encode((9, [], (5, "KeyError", "", 0))),
        msgspec.msgpack.encode((9, [], (0, "KeyError", "", -1))),
        msgspec.msgpack.encode((9, [(2, 1, "lost", "", 0, None, 0, [(1, 2, "no", b"")])], None)),
    ],
)
def test_a_forged_heartbeat_is_ignored(forged: bytes, elsewhere: RemoteMembers) -> None:
    elsewhere.turn("b", "c")
    assert elsewhere.boards.receive([forged, elsewhere.last["c"]]) == []
    assert not elsewhere.boards.gone(4)
    assert elsewhere.text(2).startswith("rank 2 (pid")


@pytest.mark.parametrize(
    ("told", "node_of", "names"),
    [
        ([("a", "1"), ("a", "1"), ("b", "2")], (0, 0, 2), {0: "a", 2: "b"}),
        ([("a", "1"), ("a", "2")], (0, 1), {0: "a (1)", 1: "a (2)"}),
        ([("a", ""), ("a", "")], (0, 1), {0: "a (of rank 0)", 1: "a (of rank 1)"}),
    ],
)
def test_hosts_have_names_of_their_own(
    told: list[tuple[str, str]], node_of: tuple[int, ...], names: dict[int, str]
) -> None:
    assert _named(told, node_of) == names


def test_heartbeats_carry_fingerprints(elsewhere: RemoteMembers) -> None:
    fingerprints = elsewhere.there.fingerprints
    assert elsewhere.boards.fingerprints(1) is None
    assert elsewhere.boards.fingerprints(2) == ()
    entry = fingerprints.allocate((1 << 63) - 1)
    fingerprints.publish(entry, 3, (1 << 32) - 1, b"last".ljust(56, b"\0"))
    elsewhere.turn("b", "c")
    told = fingerprints.of_member(2)
    assert b"last" in told[0].log
    assert elsewhere.boards.fingerprints(2) == tuple(told)
    assert elsewhere.boards.fingerprints(3) == ()
    fingerprints.close(entry)
    elsewhere.turn("b", "c")
    (closed,) = elsewhere.boards.fingerprints(2) or ()
    assert (closed.group, closed.closed) == ((1 << 63) - 1, True)


def test_a_heartbeat_without_fingerprints_is_valid(elsewhere: RemoteMembers) -> None:
    said = (2, 4242, "busy", "tp send", 1, 0.0)
    elsewhere.boards.receive([msgspec.msgpack.encode((9, [said], None)), elsewhere.last["c"]])
    assert elsewhere.text(2).startswith("rank 2 (pid 4242")
    assert elsewhere.boards.fingerprints(2) == ()
    torn = (*said[:3], "tp recv", *said[4:], [(7, b"too short")])
    elsewhere.boards.receive([msgspec.msgpack.encode((10, [torn], None)), elsewhere.last["c"]])
    assert "tp send" in elsewhere.text(2)
