"""Who is to blame that others wait, by boards that are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shm_broadcast import DRIVER_RANK
from shm_broadcast.board.outward import Wait
from shm_broadcast.errors import Failure, MemberStatus
from shm_broadcast.onlooker.blame import judge
from shm_broadcast.onlooker.programs import BoardSeen, MemberSeen, Program, QueueSeen, ReaderSeen


def member(rank: int, *waits: int, verb: str = "tp all_reduce", **status: object) -> MemberSeen:
    told = {"pid": 100 + rank, "state": "busy", "operation": verb, "sequence": 7, "age": 3.0}
    return MemberSeen(
        MemberStatus(rank, **(told | status)),
        "",
        "sleeping",
        0,
        (Wait(verb, 2.0, waits, len(waits)),) if waits else (),
        None,
    )


def judged(*members: MemberSeen, **board: object) -> tuple[str, ...]:
    seen = BoardSeen("", members, **({"failure": None, "queues": ()} | board))
    return judge(Program(1, "", (seen,), (), 0)).sentences


def test_a_chain_leads_to_its_end() -> None:
    assert judged(member(0, 1), member(1, 2), member(2)) == (
        "Rank 2 (pid 102) holds up others: it waits for no other process; "
        "last seen in tp all_reduce #7, 3.0 s ago.",
        "  Rank 1 (pid 101) waits for rank 2 in tp all_reduce #7, for 2.0 s.",
        "  Rank 0 (pid 100) waits for rank 1 in tp all_reduce #7, for 2.0 s.",
    )


def test_a_knot_is_told_without_those_that_wait_for_it() -> None:
    told = judged(member(0, 2), member(1, 2), member(2, 3), member(3, 1))
    assert told[0] == (
        "Rank 1 (pid 101), rank 2 (pid 102) and rank 3 (pid 103) wait for each other, "
        "so none goes on."
    )
    assert len(told) == 4


def test_who_waits_for_a_knot_and_for_another_is_held_up_by_both() -> None:
    verdict = judged(member(0, 1, 3), member(1, 2), member(2, 1), member(3))
    assert verdict[0].startswith("Rank 3 (pid 103) holds up others")
    assert any(line.startswith("Rank 1 (pid 101) and rank 2 (pid 102) wait") for line in verdict)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("lost", "its process has ended; last seen in"),
        ("closed", "it has left; last seen in"),
        ("absent", "it has not joined, or runs on another host."),
    ],
)
def test_who_is_gone_is_to_blame(state: str, words: str) -> None:
    gone = member(1, state=state, pid=0 if state == "absent" else 101)
    assert words in judged(member(0, 1, verb="dequeue"), gone)[0]


def test_who_was_stopped_while_it_waited_is_to_blame() -> None:
    """What it waited for may have come since."""
    stopped = replace(member(1, -1, verb="dequeue"), condition="stopped")
    told = judged(member(0, 1), stopped, member(-1, 0, verb="call"))
    assert told[0].startswith("Rank 1 (pid 101) holds up others: its process is stopped")
    assert len(told) == 3


def test_readers_of_an_idle_writer_are_not_held_up() -> None:
    told = judged(member(0, 1, verb="dequeue"), member(1, verb="enqueue"))
    assert told[0] == "Readers wait for messages. Nobody is held up, unless one is due:"
    assert told[1].startswith("Rank 1 (pid 101) sends nothing: ")


def test_nobody_waits() -> None:
    told = judged(member(0), member(1))
    assert told == ("Nobody has waited for anybody for longer than a tenth of a second.",)


def test_an_abort_comes_first() -> None:
    told = judged(member(0, 1), member(1), failure=Failure(1, "ValueError", "no", 1))
    assert told[0] == "The group was aborted: rank 1 reported: ValueError: no."
    assert told[1].startswith("Rank 1 (pid 101) holds up others")


def test_a_full_queue_names_the_slowest() -> None:
    readers = (ReaderSeen(0, 4, False), ReaderSeen(1, 9, False), ReaderSeen(2, 9, False))
    full = QueueSeen(DRIVER_RANK, readers, 20, 60 << 10, 64 << 10, False)
    told = judged(member(0), queues=(full,))
    assert told[-1] == (
        "The queue from the driver, of 64 KiB, is 93 % full: rank 1 and rank 2 have 9 messages "
        "to read."
    )


def test_equal_ranks_of_two_boards_are_told_apart() -> None:
    one = BoardSeen("pool", (member(0), member(1)), None, ())
    other = BoardSeen("pool", (member(0, 1, pid=200), member(1, pid=201)), None, ())
    told = judge(Program(1, "", (one, other), (), 0)).sentences
    assert told[0].startswith("Rank 1 of board 2 (pid 201) holds up others")
    assert told[1].startswith("  Rank 0 of board 2 (pid 200) waits for rank 1 of board 2 in")


def test_a_process_on_two_boards_is_one_party() -> None:
    """The engine of vLLM is the driver on one board, and rank 0 of another, which it reads."""
    calls = BoardSeen("queue", (member(-1), member(0, 0, verb="dequeue")), None, ())
    replies = BoardSeen("queue", (member(0), member(0, pid=99)), None, ())
    told = judge(Program(1, "", (calls, replies), (), 0)).sentences
    assert "The driver (pid 99) sends nothing" in told[1]


@pytest.mark.parametrize("driver_waits", [(), (0,)])
def test_who_reads_calls_while_others_wait_for_it_is_to_blame(driver_waits: tuple[int]) -> None:
    """A worker that has skipped a collective and answered the call."""
    told = judged(
        member(0, 1), member(1, 2, verb="dequeue"), member(DRIVER_RANK, *driver_waits, verb="call")
    )
    assert told[0] == (
        "Rank 1 (pid 101) holds up others: it takes no part, and waits for the next message of "
        "the driver; last seen in dequeue #7, 3.0 s ago."
    )
    assert told[1].startswith("  Rank 0 (pid 100) waits for rank 1 in tp all_reduce #7")
    assert len(told) == 2 + len(driver_waits)


def test_who_reads_from_a_peer_that_is_held_up_is_not_to_blame() -> None:
    told = judged(member(0, 1), member(1, 2, verb="dequeue"), member(2, 3), member(3))
    assert told[0].startswith("Rank 3 (pid 103) holds up others")
    assert not any("takes no part" in line for line in told)


def test_a_reader_and_its_writer_that_waits_for_it_wait_for_each_other() -> None:
    told = judged(member(0, 1), member(1, 0, verb="dequeue"))
    assert told[0].startswith("Rank 0 (pid 100) and rank 1 (pid 101) wait for each other")
