"""A diagnosis over hosts, of boards that are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from server.inspection.diagnosis import Diagnosis, diagnose
from server.inspection.snapshot import (
    BoardSnapshot,
    HostSnapshot,
    MemberSnapshot,
    Program,
    merge_hosts,
)
from shm_broadcast import DRIVER_RANK
from shm_broadcast.errors import MemberStatus
from shm_broadcast.state.status import Wait

pytestmark = pytest.mark.quick

ABSENT = MemberSnapshot(MemberStatus(0, 0, "absent"), "", "", 0, (), None)


def member(rank: int, pid: int, *waits: int, verb: str = "tp all_reduce") -> MemberSnapshot:
    return MemberSnapshot(
        MemberStatus(rank, pid, "busy", verb, 7, 3.0),
        *("", "sleeping", 0),
        (Wait(verb, 2.0, waits, len(waits)),) if waits else (),
        None,
    )


def board(key: str, n: int, *members: MemberSnapshot) -> BoardSnapshot:
    """The board of a pool of ``n`` workers and the driver; members not given are absent."""
    ranks = [*range(n), DRIVER_RANK]
    given = {each.status.rank: each for each in members}
    absent = [replace(ABSENT, status=replace(ABSENT.status, rank=rank)) for rank in ranks]
    called = zip(ranks, absent, strict=True)
    return BoardSnapshot(
        key, tuple(given.get(rank, other) for rank, other in called), None, (), key
    )


def verdict(here: BoardSnapshot, *elsewhere: HostSnapshot) -> Diagnosis:
    return diagnose(merge_hosts(Program(1, "", (here,), (), 0), elsewhere))


def test_a_chain_of_waits_leads_over_hosts() -> None:
    """Rank 0 waits for rank 1 on b, which waits for rank 2 on c."""
    here = board("here", 3, member(0, 100, 1), member(DRIVER_RANK, 99))
    b = HostSnapshot("b", "here", board("at b", 3, member(1, 101, 2)), ())
    c = HostSnapshot("c", "here", board("at c", 3, member(2, 102)), ())
    assert verdict(here, b, c).sentences == (
        "Rank 2 (pid 102 on c) holds up others: it waits for no other process; "
        "last seen in tp all_reduce #7, 3.0 s ago.",
        "  Rank 1 (pid 101 on b) waits for rank 2 in tp all_reduce #7, for 2.0 s.",
        "  Rank 0 (pid 100) waits for rank 1 in tp all_reduce #7, for 2.0 s.",
    )
    assert verdict(here, c).sentences[0] == (
        "Rank 1 holds up others: it has not joined, or runs on another host."
    )


def test_a_process_of_another_host_may_have_the_pid_of_one_here() -> None:
    here = board("here", 2, member(0, 100, 1), member(DRIVER_RANK, 99))
    b = HostSnapshot("b", "here", board("at b", 2, member(1, 100)), ())
    (culprit,) = verdict(here, b).culprits
    assert culprit.who == "rank 1 (pid 100 on b)"


def test_the_driver_is_the_one_here_and_no_supervisor_of_another_host() -> None:
    here = board("here", 2, member(0, 100, 1), member(DRIVER_RANK, 99))
    waits = member(1, 101, 2, verb="dequeue")
    b = HostSnapshot("b", "here", board("at b", 2, waits, member(DRIVER_RANK, 98, 0)), ())
    assert verdict(here, b).sentences[0] == (
        "Rank 1 (pid 101 on b) holds up others: it is idle, and waits for the next message "
        "of the driver; last seen in dequeue #7, 3.0 s ago."
    )


def test_a_process_of_another_host_is_the_same_on_all_boards_there() -> None:
    """Rank 1 waits for its own helper there, so it is not to blame."""
    here = board("here", 2, member(0, 100, 1), member(DRIVER_RANK, 99))
    helped = BoardSnapshot(
        "", (member(0, 101, 1, verb="kv recv"), member(1, 300)), None, (), "more"
    )
    b = HostSnapshot("b", "here", board("at b", 2, member(1, 101)), (helped,))
    assert verdict(here, b).sentences[:2] == (
        "Rank 1 of board 2 (pid 300 on b) holds up others: it waits for no other process; "
        "last seen in tp all_reduce #7, 3.0 s ago.",
        "  Rank 1 (pid 101 on b) waits for rank 1 of board 2 in kv recv #7, for 2.0 s.",
    )


def test_other_boards_are_left_out() -> None:
    here = board("here", 2, member(0, 100, 1))
    b = HostSnapshot("b", "another", board("at b", 2, member(1, 101)), ())
    more = HostSnapshot("b", "here", board("at b", 3, member(1, 101)), ())
    assert verdict(here, b, more).sentences == verdict(here).sentences
