"""Who is to blame that others wait, by boards that are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from server.inspection.diagnosis import Diagnosis, diagnose
from server.inspection.snapshot import (
    BoardSnapshot,
    MemberSnapshot,
    Program,
    QueueSnapshot,
    ReaderSnapshot,
)
from shm_broadcast import DRIVER_RANK
from shm_broadcast.errors import Failure, MemberStatus
from shm_broadcast.state.status import Membership, Wait


def member(rank: int, *waits: int, verb: str = "tp all_reduce", **status: object) -> MemberSnapshot:
    told = {"pid": 100 + rank, "state": "busy", "operation": verb, "sequence": 7, "age": 3.0}
    return MemberSnapshot(
        MemberStatus(rank, **(told | status)),
        "",
        "sleeping",
        0,
        (Wait(verb, 2.0, waits, len(waits)),) if waits else (),
        None,
    )


def verdict_on(*members: MemberSnapshot, **board: object) -> Diagnosis:
    seen = BoardSnapshot("", members, **({"failure": None, "queues": ()} | board))
    return diagnose(Program(1, "", (seen,), (), 0))


def judged(*members: MemberSnapshot, **board: object) -> tuple[str, ...]:
    return verdict_on(*members, **board).sentences


def test_a_chain_leads_to_its_end() -> None:
    assert judged(member(0, 1), member(1, 2), member(2)) == (
        "Rank 2 (pid 102) holds up others: it waits for no other process; "
        "last seen in tp all_reduce #7, 3.0 s ago.",
        "  Rank 1 (pid 101) waits for rank 2 in tp all_reduce #7, for 2.0 s.",
        "  Rank 0 (pid 100) waits for rank 1 in tp all_reduce #7, for 2.0 s.",
    )


def test_those_because_of_whom_the_same_ones_wait_are_told_together() -> None:
    """Who is surely to blame comes first, and each that waits is told once."""
    told = judged(
        *(member(0, 1, 3), member(1), member(2, 1, 3, 4), member(3, state="lost"), member(4)),
        *(member(5, 0, verb="x"), member(6, 7), member(7)),
    )
    assert [line.split(" (pid")[0] for line in told] == [
        *("Rank 3", "Rank 1", "Rank 4", "  Rank 0", "  Rank 2", "  Rank 5", "Rank 7", "  Rank 6")
    ]
    assert told[3:6] == (
        "  Rank 0 (pid 100) waits for rank 3 and rank 1 in tp all_reduce #7, for 2.0 s.",
        "  Rank 2 (pid 102) waits for rank 3, rank 1 and rank 4 in tp all_reduce #7, for 2.0 s.",
        "  Rank 5 (pid 105) waits for rank 0 in x #7, for 2.0 s.",
    )


def test_those_that_have_not_come_are_told_in_one_sentence() -> None:
    absent = [member(rank, state="absent", pid=0, age=None) for rank in range(2, 32)]
    verdict = verdict_on(member(0, *range(1, 32)), member(1), *absent)
    assert verdict.sentences == (
        "Rank 2, rank 3, rank 4, rank 5, rank 6, rank 7, rank 8, rank 9 and 22 more hold up "
        "others: they have not joined, or run on another host.",
        "Rank 1 (pid 101) holds up others: it waits for no other process; "
        "last seen in tp all_reduce #7, 3.0 s ago.",
        "  Rank 0 (pid 100) waits for rank 2, rank 3, rank 4, rank 5, rank 6, rank 7, rank 8, "
        "rank 9 and 23 more in tp all_reduce #7, for 2.0 s.",
    )
    assert [each.name for each in verdict.sample] == ["rank 1"]
    assert len(verdict.culprits) == 31


def test_of_hundreds_that_wait_the_first_are_told() -> None:
    told = judged(*(member(rank, 0) if rank else member(0) for rank in range(200)))
    assert len(told) == 18
    assert told[-1] == "  And 183 more wait."


def test_who_waits_for_a_disk_does_not_wait_for_no_one() -> None:
    told = judged(member(0, 1), replace(member(1), condition="in the kernel"))
    assert told[0] == (
        "Rank 1 (pid 101) holds up others: it waits in the kernel, for a disk or another device; "
        "last seen in tp all_reduce #7, 3.0 s ago."
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
        ("closed", "it has closed the group; last seen in"),
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
    assert told[0] == "Readers wait for messages. This is a hang only if one is due:"
    assert told[1].startswith("Rank 1 (pid 101) sends nothing: ")


def test_nobody_waits() -> None:
    told = judged(member(0), member(1))
    assert told == ("No process has waited for another for a tenth of a second.",)


def test_an_abort_comes_first() -> None:
    told = judged(member(0, 1), member(1), failure=Failure(1, "ValueError", "no", 1))
    assert told[0] == "The group was aborted: rank 1 reported: ValueError: no."
    assert told[1].startswith("Rank 1 (pid 101) holds up others")


def test_a_full_queue_names_the_slowest() -> None:
    readers = (
        ReaderSnapshot(0, 4, False),
        ReaderSnapshot(1, 9, False),
        ReaderSnapshot(2, 9, False),
    )
    full = QueueSnapshot(DRIVER_RANK, readers, 20, 60 << 10, 64 << 10, False)
    said = (
        "The queue from the driver, of 64 KiB, is 93 % full: rank 1 and rank 2 have 9 messages "
        "to read."
    )
    rest = member(2), member(DRIVER_RANK)
    assert judged(member(0, 1), member(1), *rest, queues=(full,))[-1] == said
    # Its writer, which waits a moment and tries again later, does not wait just now.
    assert judged(member(0), member(1), *rest, queues=(full,)) == (said,)
    waits = member(0, 1, verb="dequeue"), member(1, verb="enqueue")
    assert judged(*waits, *rest, queues=(full,))[0] == said


def test_equal_ranks_of_two_boards_are_told_apart() -> None:
    one = BoardSnapshot("pool", (member(0), member(1)), None, ())
    other = BoardSnapshot("pool", (member(0, 1, pid=200), member(1, pid=201)), None, ())
    told = diagnose(Program(1, "", (one, other), (), 0)).sentences
    assert told[0].startswith("Rank 1 of board 2 (pid 201) holds up others")
    assert told[1].startswith("  Rank 0 of board 2 (pid 200) waits for rank 1 of board 2 in")


def pool_of(name: str, pid: int, *waits: int) -> BoardSnapshot:
    """A pool of two workers, of which the first waits for others; and its driver, pid 99."""
    driver = replace(member(DRIVER_RANK, pid=99), place="generation 1")
    return BoardSnapshot(
        name, (member(0, *waits, pid=pid), member(1, pid=pid + 1), driver), None, ()
    )


def test_workers_of_several_pools_are_called_by_their_pools() -> None:
    """A group that a worker of each shares calls them otherwise."""
    edge = BoardSnapshot("", (member(0, pid=201), member(1, 0, pid=300, verb="b recv")), None, ())
    pools = pool_of("thinker", 200), pool_of("talker", 300)
    told = diagnose(Program(1, "", (*pools, edge), (), 0)).sentences
    assert told[0].startswith("Rank 1 of thinker (pid 201) holds up others")
    assert told[1].startswith("  Rank 0 of talker (pid 300) waits for rank 1 of thinker in b recv")


def test_a_full_queue_of_one_of_several_pools_is_called_by_that() -> None:
    full = QueueSnapshot(0, (ReaderSnapshot(DRIVER_RANK, 1, False),), 1, 60 << 10, 64 << 10, False)
    pools = pool_of("thinker", 200), replace(pool_of("talker", 300), queues=(full,))
    assert diagnose(Program(1, "", pools, (), 0)).sentences == (
        "The queue from rank 0 of talker, of 64 KiB, is 93 % full: the driver has 1 message to "
        "read.",
    )


def test_the_workers_of_one_pool_are_called_by_their_ranks() -> None:
    edge = BoardSnapshot("", (member(0, pid=7), member(1, 0, pid=200, verb="b recv")), None, ())
    told = diagnose(Program(1, "", (pool_of("thinker", 200), edge), (), 0)).sentences
    assert told[0].startswith("Rank 0 of board 2 (pid 7) holds up others")
    assert told[1].startswith("  Rank 0 (pid 200) waits for rank 0 of board 2 in b recv")


@pytest.mark.parametrize("name", ["pool", "thinker"])
def test_pools_of_one_name_are_told_apart_by_their_boards(name: str) -> None:
    told = diagnose(Program(1, "", (pool_of(name, 200), pool_of(name, 300, 1)), (), 0)).sentences
    assert told[0].startswith("Rank 1 of board 2 (pid 301) holds up others")


def test_a_process_on_two_boards_is_one_party() -> None:
    """The engine of vLLM is the driver on one board, and rank 0 of another, which it reads."""
    calls = BoardSnapshot("queue", (member(-1), member(0, 0, verb="dequeue")), None, ())
    replies = BoardSnapshot("queue", (member(0), member(0, pid=99)), None, ())
    told = diagnose(Program(1, "", (calls, replies), (), 0)).sentences
    assert "The driver (pid 99) sends nothing" in told[1]


@pytest.mark.parametrize("driver_waits", [(), (0,)])
def test_who_reads_calls_while_others_wait_for_it_is_to_blame(driver_waits: tuple[int]) -> None:
    """A worker that has skipped a collective and answered the call."""
    told = judged(
        member(0, 1), member(1, 2, verb="dequeue"), member(DRIVER_RANK, *driver_waits, verb="call")
    )
    assert told[0] == (
        "Rank 1 (pid 101) holds up others: it is idle, and waits for the next message of "
        "the driver; last seen in dequeue #7, 3.0 s ago."
    )
    assert told[1].startswith("  Rank 0 (pid 100) waits for rank 1 in tp all_reduce #7")
    assert len(told) == 2 + len(driver_waits)


def test_of_who_takes_no_part_the_stack_of_one_that_waits_for_it_tells_more() -> None:
    verdict = verdict_on(
        *(member(0, 1), member(1, 3, verb="dequeue"), member(2, 1)),
        *(member(DRIVER_RANK, 0, 1, 2, verb="call"), member(4), member(5, 4)),
    )
    assert [each.name for each in verdict.culprits] == ["rank 1", "rank 4"]
    assert [each.name for each in verdict.sample] == ["rank 0", "rank 4"]


@pytest.mark.parametrize("gone", [True, False])
def test_who_reads_from_a_peer_that_cannot_go_on_is_not_to_blame(gone: bool) -> None:
    """A worker whose helper, which it asks by a queue, has ended or is stopped."""
    helper = member(2, state="lost") if gone else replace(member(2), condition="stopped")
    told = judged(member(0, 1), member(1, 2, verb="dequeue"), helper)
    why = "its process has ended" if gone else "its process is stopped"
    assert told[0].startswith(f"Rank 2 (pid 102) holds up others: {why}")
    assert told[1].startswith("  Rank 1 (pid 101) waits for rank 2 in dequeue #7")
    assert told[2].startswith("  Rank 0 (pid 100) waits for rank 1 in tp all_reduce #7")


def test_who_reads_from_a_peer_that_is_held_up_is_not_to_blame() -> None:
    told = judged(member(0, 1), member(1, 2, verb="dequeue"), member(2, 3), member(3))
    assert told[0].startswith("Rank 3 (pid 103) holds up others")
    assert not any("takes no part" in line for line in told)


def test_a_reader_and_its_writer_that_waits_for_it_wait_for_each_other() -> None:
    told = judged(member(0, 1), member(1, 0, verb="dequeue"))
    assert told[0].startswith("Rank 0 (pid 100) and rank 1 (pid 101) wait for each other")


def within(
    seen: MemberSnapshot, name: str, *, closed: bool = False, first: int = 0
) -> MemberSnapshot:
    """``seen``, in a group of three."""
    group = Membership(name, seen.status.rank, 3, first, closed)
    return replace(seen, groups=(*seen.groups, group))


@pytest.mark.parametrize("waits", [(), (DRIVER_RANK,), (0,)])
def test_who_has_closed_the_group_in_which_others_wait_is_to_blame(waits: tuple[int, ...]) -> None:
    """Whatever it waits for."""
    told = judged(
        within(member(0, 1), "tp"),
        within(member(1, *waits, verb="dequeue"), "tp", closed=True),
        member(DRIVER_RANK),
    )
    assert told == (
        "Rank 1 (pid 101) holds up others: it has closed tp; last seen in dequeue #7, 3.0 s ago.",
        "  Rank 0 (pid 100) waits for rank 1 in tp all_reduce #7, for 2.0 s.",
    )


def test_a_group_that_some_have_closed_is_told() -> None:
    closed = [within(member(rank), "tp", closed=rank > 3) for rank in range(16)]
    alone = within(member(16), "tp", closed=True, first=16)  # another group of that name
    assert judged(*closed, alone)[1:] == (
        "Rank 4, rank 5, rank 6, rank 7, rank 8, rank 9, rank 10, rank 11 and 4 more have closed "
        "tp, which rank 0, rank 1, rank 2 and rank 3 have open.",
    )


def test_who_waits_in_another_group_of_that_name_does_not_blame_for_it() -> None:
    told = judged(within(member(0, 1), "tp"), within(member(1), "tp", closed=True, first=1))
    assert told[0].startswith("Rank 1 (pid 101) holds up others: it waits for no other process")
