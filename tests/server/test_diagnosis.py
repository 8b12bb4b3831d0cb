"""Which process holds up others, and how it is shown, by boards that are made up."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from server.commands import program_text
from server.inspection.diagnosis import Diagnosis, diagnose
from server.inspection.snapshot import (
    BoardSnapshot,
    MemberSnapshot,
    Program,
    QueueSnapshot,
    ReaderSnapshot,
)
from server.inspection.trace import MemberHistory, chrome_trace
from shm_broadcast import DRIVER_RANK
from shm_broadcast.errors import Failure, MemberStatus
from shm_broadcast.state.flight_recorder import OperationRecord
from shm_broadcast.state.status import Membership, Wait

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.quick

# --- the diagnosis ------------------------------------------------------------------------------


def member(rank: int, *waits: int, verb: str = "tp all_reduce", **status: object) -> MemberSnapshot:
    told = {"pid": 100 + rank, "state": "busy", "operation": verb, "sequence": 7, "age": 3.0}
    told |= {"waits_for": waits}
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


STORIES = """\
0>1 1>2 2
Rank 2 holds up others: it waits for no other process.
  Rank 1 waits for rank 2.
  Rank 0 waits for rank 1.

0>1,3 1 2>1,3,4 3!lost 4 5>0:x 6>7 7
Rank 3 holds up others: its process has ended.
Rank 1 holds up others: it waits for no other process.
Rank 4 holds up others: it waits for no other process.
  Rank 0 waits for rank 3 and rank 1.
  Rank 2 waits for rank 3, rank 1 and rank 4.
  Rank 5 waits for rank 0 in x.
Rank 7 holds up others: it waits for no other process.
  Rank 6 waits for rank 7.

0>2 1>2 2>3 3>1
Rank 1, rank 2 and rank 3 wait for each other, so none goes on.
  Rank 1 waits for rank 2.
  Rank 2 waits for rank 3.
  Rank 3 waits for rank 1.

0>1,3 1>2 2>1 3
Rank 3 holds up others: it waits for no other process.
  Rank 0 waits for rank 3.
Rank 1 and rank 2 wait for each other, so none goes on.
  Rank 1 waits for rank 2.
  Rank 2 waits for rank 1.

0>1:dequeue 1!lost
Rank 1 holds up others: its process has ended.
  Rank 0 waits for rank 1 in dequeue.

0>1:dequeue 1!closed
Rank 1 holds up others: it has closed the group.
  Rank 0 waits for rank 1 in dequeue.

0>1 1~in_the_kernel
Rank 1 holds up others: it waits in the kernel, for a disk or another device.
  Rank 0 waits for rank 1.

0>1 1>-1:dequeue~stopped d>0:call
Rank 1 holds up others: its process is stopped, by a signal or a debugger.
  Rank 0 waits for rank 1.
  The driver waits for rank 0 in call.

0>1:dequeue 1:enqueue
Readers wait for messages. This is a hang only if one is due:
Rank 1 sends nothing: it waits for no other process.
  Rank 0 waits for rank 1 in dequeue.

0 1
No process has waited for another for a tenth of a second.

0>1 1>2:dequeue 2>3 3
Rank 3 holds up others: it waits for no other process.
  Rank 2 waits for rank 3.
  Rank 1 waits for rank 2 in dequeue.
  Rank 0 waits for rank 1.

0>1 1>0:dequeue
Rank 0 and rank 1 wait for each other, so none goes on.
  Rank 0 waits for rank 1.
  Rank 1 waits for rank 0 in dequeue.
Their operations differ; the first ones that do: tp all_reduce on rank 0, dequeue on rank 1.

0>1 1>2:dequeue d:call
Rank 1 holds up others: it is idle, and waits for the next message of the driver.
  Rank 0 waits for rank 1.

0>1 1>2:dequeue d>0:call
Rank 1 holds up others: it is idle, and waits for the next message of the driver.
  Rank 0 waits for rank 1.
  The driver waits for rank 0 in call.

0>1 1>2:dequeue 2!lost
Rank 2 holds up others: its process has ended.
  Rank 1 waits for rank 2 in dequeue.
  Rank 0 waits for rank 1.
"""
"""Members as ``rank>waits for slots:verb!state~condition``, and what is said, shortened."""


def members(story: str) -> Iterator[MemberSnapshot]:
    for word in story.split():
        found = re.fullmatch(r"(\d+|d)(?:>([-\d,]+))?(?::(\w+))?(?:!(\w+))?(?:~(\w+))?", word)
        assert found is not None
        rank, waits, verb, state, condition = found.groups("")
        given: dict[str, Any] = {"verb": verb} if verb else {}
        given |= {"state": state} if state else {}
        slots = map(int, filter(None, waits.split(",")))
        made = member(DRIVER_RANK if rank == "d" else int(rank), *slots, **given)
        yield replace(made, condition=condition.replace("_", " ") or made.condition)


def shortened(line: str) -> str:
    about = r" \(pid \d+\)|; last seen in [\w ]+ #7, 3\.0 s ago|( in tp all_reduce)? #7, for 2\.0 s"
    return re.sub(rf"{about}| #7", "", line)


@pytest.mark.parametrize("story", STORIES.strip().split("\n\n"))
def test_the_processes_that_hold_up_others_come_first(story: str) -> None:
    seen, *sentences = story.splitlines()
    assert [shortened(line) for line in judged(*members(seen))] == sentences


def test_a_chain_leads_to_its_end() -> None:
    assert judged(member(0, 1), member(1, 2), member(2)) == (
        "Rank 2 (pid 102) holds up others: it waits for no other process; "
        "last seen in tp all_reduce #7, 3.0 s ago.",
        "  Rank 1 (pid 101) waits for rank 2 in tp all_reduce #7, for 2.0 s.",
        "  Rank 0 (pid 100) waits for rank 1 in tp all_reduce #7, for 2.0 s.",
    )


def test_absent_ranks_are_listed_in_one_sentence() -> None:
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


def test_of_hundreds_that_wait_the_first_are_listed() -> None:
    told = judged(*(member(rank, 0) if rank else member(0) for rank in range(200)))
    assert len(told) == 18
    assert told[-1] == "  And 183 more wait."


def test_an_abort_comes_first() -> None:
    told = judged(member(0, 1), member(1), failure=Failure(1, "ValueError", "no", 1))
    assert told[0] == "The group was aborted: rank 1 reported: ValueError: no."
    assert told[1].startswith("Rank 1 (pid 101) holds up others")


def test_a_full_queue_names_the_slowest() -> None:
    readers = tuple(ReaderSnapshot(rank, n, False) for rank, n in enumerate((4, 9, 9)))
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


def pool_of(name: str, pid: int, *waits: int) -> BoardSnapshot:
    driver = replace(member(DRIVER_RANK, pid=99), place="generation 1")
    return BoardSnapshot(
        name, (member(0, *waits, pid=pid), member(1, pid=pid + 1), driver), None, ()
    )


def edge(first: int, second: int) -> BoardSnapshot:
    return BoardSnapshot("", (member(0, pid=first), member(1, 0, pid=second, verb="b")), None, ())


@pytest.mark.parametrize(
    ("boards", "culprit", "waits"),
    [
        (
            [
                BoardSnapshot("pool", (member(0), member(1)), None, ()),
                BoardSnapshot("pool", (member(0, 1, pid=200), member(1, pid=201)), None, ()),
            ],
            "Rank 1 of board 2 (pid 201)",
            "Rank 0 of board 2 (pid 200) waits for rank 1 of board 2 in",
        ),
        (
            [pool_of("thinker", 200), pool_of("talker", 300), edge(201, 300)],
            "Rank 1 of thinker (pid 201)",
            "Rank 0 of talker (pid 300) waits for rank 1 of thinker in b",
        ),
        (
            [pool_of("thinker", 200), edge(7, 200)],
            "Rank 0 of board 2 (pid 7)",
            "Rank 0 (pid 200) waits for rank 0 of board 2 in b",
        ),
        *(
            ([pool_of(name, 200), pool_of(name, 300, 1)], "Rank 1 of board 2 (pid 301)", "Rank 0")
            for name in ("pool", "thinker")
        ),
    ],
)
def test_ranks_are_called_by_their_pools_or_boards(
    boards: list[BoardSnapshot], culprit: str, waits: str
) -> None:
    first, second, *_ = diagnose(Program(1, "", tuple(boards), (), 0)).sentences
    assert first.startswith(f"{culprit} holds up others")
    assert second.startswith(f"  {waits}")


def test_a_full_queue_of_one_of_several_pools_is_called_by_that() -> None:
    full = QueueSnapshot(0, (ReaderSnapshot(DRIVER_RANK, 1, False),), 1, 60 << 10, 64 << 10, False)
    pools = pool_of("thinker", 200), replace(pool_of("talker", 300), queues=(full,))
    assert diagnose(Program(1, "", pools, (), 0)).sentences == (
        "The queue from rank 0 of talker, of 64 KiB, is 93 % full: the driver has 1 message to "
        "read.",
    )


def test_a_process_on_two_boards_is_one_party() -> None:
    calls = BoardSnapshot("queue", (member(-1), member(0, 0, verb="dequeue")), None, ())
    replies = BoardSnapshot("queue", (member(0), member(0, pid=99)), None, ())
    told = diagnose(Program(1, "", (calls, replies), (), 0)).sentences
    assert "The driver (pid 99) sends nothing" in told[1]


def test_an_idle_culprits_stack_is_that_of_a_rank_that_waits_for_it() -> None:
    verdict = verdict_on(
        *(member(0, 1), member(1, 3, verb="dequeue"), member(2, 1)),
        *(member(DRIVER_RANK, 0, 1, 2, verb="call"), member(4), member(5, 4)),
    )
    assert [each.name for each in verdict.culprits] == ["rank 1", "rank 4"]
    assert [each.name for each in verdict.sample] == ["rank 0", "rank 4"]


def in_tp(seen: MemberSnapshot, *, closed: bool = False, first: int = 0) -> MemberSnapshot:
    return replace(seen, groups=(Membership("tp", seen.status.rank, 3, first, closed),))


@pytest.mark.parametrize("waits", [(), (DRIVER_RANK,), (0,)])
def test_a_rank_that_closed_the_others_group_is_to_blame(waits: tuple[int, ...]) -> None:
    told = judged(
        in_tp(member(0, 1)),
        in_tp(member(1, *waits, verb="dequeue"), closed=True),
        member(DRIVER_RANK),
    )
    assert told == (
        "Rank 1 (pid 101) holds up others: it has closed tp; last seen in dequeue #7, 3.0 s ago.",
        "  Rank 0 (pid 100) waits for rank 1 in tp all_reduce #7, for 2.0 s.",
    )


def test_a_group_that_some_have_closed_is_named() -> None:
    closed = [in_tp(member(rank), closed=rank > 3) for rank in range(16)]
    alone = in_tp(member(16), closed=True, first=16)  # another group of that name
    assert judged(*closed, alone)[1:] == (
        "Rank 4, rank 5, rank 6, rank 7, rank 8, rank 9, rank 10, rank 11 and 4 more have closed "
        "tp, which rank 0, rank 1, rank 2 and rank 3 have open.",
    )


def test_another_group_of_that_name_is_not_taken_for_it() -> None:
    told = judged(in_tp(member(0, 1)), in_tp(member(1), closed=True, first=1))
    assert told[0].startswith("Rank 1 (pid 101) holds up others: it waits for no other process")


# --- its text ----------------------------------------------------------------------------


def program(*members: MemberSnapshot, failure: Failure | None = None) -> Program:
    seen = tuple(
        replace(each, place=f"tp {each.status.rank}", memory=300 << 20) for each in members
    )
    return Program(7, "python serve.py", (BoardSnapshot("pool", seen, failure, ()),), (7,), 5 << 20)


def test_a_narrow_terminal_loses_columns_and_no_line_is_longer() -> None:
    seen = program(member(0, 1, 2, 3, 4, 5), *(member(rank) for rank in range(1, 6)))
    wide = program_text.program(seen)
    assert "rank 1, rank 2, rank 3, rank 4 and 1 more" in wide
    for width in (120, 80, 60, 40, 20):
        text = program_text.program(seen, width)
        assert max(map(len, text.splitlines())) <= width
        assert "rank 0" in text
    assert "memory" in wide
    assert "memory" not in program_text.program(seen, 80)


def test_cores_are_shown_where_members_have_others() -> None:
    alike, bound = (
        [replace(member(rank), cores=cores) for rank, cores in enumerate(each)]
        for each in (("0-3", "0-3"), ("0-1", "2-3"))
    )
    assert "cores" not in program_text.program(program(*alike))
    told = program_text.program(program(*bound)).splitlines()
    assert [line.split()[-3] for line in told if line.startswith("  rank ")] == ["0-1", "2-3"]


def test_boards_have_numbers_where_there_are_several() -> None:
    (board,) = program(member(0)).boards
    text = program_text.program(Program(7, "", (board, board), (7,), 0))
    assert "\nboard 1, pool: 1 member\n" in text
    assert "\nboard 2, pool: 1 member\n" in text


def test_control_characters_do_not_reach_the_terminal() -> None:
    hostile = "\x1b[2J\nall clear"
    seen = program(member(0, operation=hostile), failure=Failure(0, hostile, hostile, 0))
    for text in (program_text.program(seen), program_text.overview([seen])):
        assert "\x1b" not in text
        assert "\nall clear" not in text


def test_each_programs_state_is_a_word() -> None:
    held, well = (
        program(member(0, 1), member(1)),
        program(member(0), member(1)),
    )
    aborted = program(member(0), failure=Failure(0, "ValueError", "no", 0))
    lines = program_text.overview([held, well, aborted]).splitlines()
    words = ("held up", "goes on", "aborted")
    assert [word for word, line in zip(words, lines[1:], strict=True) if word in line] == [*words]


def test_services_are_shown_with_their_options_without_folders() -> None:
    command = f"/{'deep/' * 20}python3.11 /opt/bin/group-coordinator serve --model /models/one"
    seen = replace(program(member(0)), command=command)
    told = "python3.11 group-coordinator serve --model /models/one"
    assert program_text.program(seen).startswith(f"pid 7  {told}\n")
    assert program_text.overview([seen]).endswith(told)


# --- a trace -----------------------------------------------------------------------------


def past(verb: str, begin: int, end: int | None = None, **about: Any) -> OperationRecord:
    known = {"group": "tp", "outcome": "done" if end else "under way", "sequence": 1, "number": 1}
    told = known | {"size": 16, "peer": None, "dtype": "float32"} | about
    return OperationRecord(verb=verb, begin=begin, end=end, **told)


def history(rank: int, *did: OperationRecord) -> MemberHistory:
    seen = MemberSnapshot(MemberStatus(rank, 100 + rank, "busy"), "", "running", 0, (), None)
    return MemberHistory(seen, did)


def test_operations_that_overlap_get_tracks_of_their_own() -> None:
    did = [past("send", 1000, 5000), past("recv", 2000, 3000), past("send", 3000)]
    events = chrome_trace([[history(0, *did)]], 9000)["traceEvents"]
    tracks = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    drawn = [(tracks[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert drawn == [
        ("tp", "send", 1.0, 4.0),
        ("tp (2)", "recv", 2.0, 1.0),
        ("tp (2)", "send, under way", 3.0, 6.0),
    ]


@pytest.mark.parametrize("pools", [("thinker", "talker"), ("thinker",)])
def test_a_trace_calls_workers_by_their_pools(pools: tuple[str, ...]) -> None:
    def of(rank: int, pool: str) -> MemberHistory:
        return replace(history(rank, past("send", 1, 2)), pool=pool)

    workers = [of(rank, pool) for rank, pool in enumerate(pools)]
    events = chrome_trace([workers, [of(DRIVER_RANK, pools[0])], [of(7, "")]], 9)["traceEvents"]
    names = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    called = ["rank 0 of thinker", "rank 1 of talker"] if len(pools) > 1 else ["rank 0"]
    assert names == [*called, "the driver", "rank 7"]
