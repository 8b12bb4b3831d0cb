"""What a board keeps of each member: its operations, their totals, its groups and fingerprints."""

from __future__ import annotations

import os
import signal
import struct
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from server.inspection.snapshot import of_process, programs, scan
from server.inspection.trace import histories
from shm_broadcast import (
    Board,
    Deadline,
    DivergenceError,
    Failure,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    MemberStatus,
    MessageQueue,
    PeerLostError,
    layout,
)
from shm_broadcast.state.fingerprint import Fingerprint
from shm_broadcast.state.flight_recorder import (
    FURTHER_GROUPS,
    outcome_of,
    read_history,
)
from shm_broadcast.state.status import MAX_GROUPS, Membership
from tests.forked import in_a_child
from tests.patience import until
from tests.shm_broadcast.members import status_of
from tests.shm_broadcast.queues import Running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shm_broadcast import Segment
    from shm_broadcast.state.flight_recorder import OperationRecord

KEPT = layout.HISTORY_ENTRIES
ALL_REDUCE = layout.DID_NAMES.index("all_reduce")
SEND = layout.DID_NAMES.index("send")
FLOAT32 = layout.DTYPE_NAMES.index("float32")
SLOT, HISTORY = layout.member_slot(0), layout.history_slot(0, 1)
LAST = b"the last one" + bytes(44)


# --- operations ------------------------------------------------------------------------------


def test_the_end_of_an_operation_without_an_entry_is_dropped() -> None:
    with Board.create(1, 0) as board:
        for _ in range(KEPT + 1):
            board.record_begin("tp send", "tp", SEND, 1000)
        before = board.recorded(0)
        for sequence in (1, 0):  # overwritten by the newest, and none
            board.record_end(sequence, size=12, number=34)
        assert board.recorded(0) == before
        assert before[-1].end is None


LATE = MemberStatus(1, 42, "lost")


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (GroupTimeoutError("x", 1.0, ()), "timed out"),
        (PeerLostError("x", LATE), "peer lost"),
        (GroupAbortedError("x", Failure(0, "E", "no", 0)), "aborted"),
        (DivergenceError(1, "a", "b"), "diverged"),
        (GroupClosedError("x"), "closed"),
        (KeyboardInterrupt(), "failed"),
    ],
)
def test_how_an_operation_ended(error: BaseException, name: str) -> None:
    assert layout.OUTCOME_NAMES[outcome_of(error)] == name


def test_the_operations_of_a_queue() -> None:
    with (
        Board.create(2, 0) as board,
        Board.attach(board.handle(), 1) as other,
        MessageQueue.on_board(board, 0, [1], 1 << 16) as queue,
        MessageQueue.attach(queue.export_handle(), other) as reader,
    ):
        queue.enqueue(b"small")
        assert reader.dequeue(5) == b"small"
        large = bytes(300_000)
        reading = Running(lambda: reader.dequeue(30))
        queue.enqueue(large)
        assert reading.result() == large
        with pytest.raises(GroupTimeoutError):
            reader.dequeue(0)
        queue.enqueue_encoded(b"encoded")
        with reader.acquire_read(5) as view:
            assert view == b"encoded"
        wrote, read = board.recorded(0), board.recorded(1)
    assert [(each.verb, each.number, each.outcome) for each in wrote] == [
        ("enqueue", 1, "done"),
        ("enqueue", 2, "done"),
        ("enqueue", 3, "done"),
    ]
    assert [(each.verb, each.number, each.outcome) for each in read] == [
        ("dequeue", 1, "done"),
        ("dequeue", 2, "done"),
        ("dequeue", 0, "timed out"),
        ("acquire_read", 3, "done"),
    ]
    assert wrote[0].size == read[0].size
    assert wrote[1].size >= 300_000 <= read[1].size
    assert (wrote[2].size, read[3].size) == (7, 7)
    for each in (*wrote, *read):
        assert each.end is not None
        assert each.begin <= each.end
        assert each.group == ""


# --- what is kept, for whom ------------------------------------------------------------------


def test_the_latest_operations_are_kept() -> None:
    with Board.create(2, 1) as board:
        for number in range(1, 5 * KEPT + 4):
            board.record_end(board.record_begin("tp all_reduce", "tp", ALL_REDUCE, 8, number))
        past = board.recorded(1)
        last = 5 * KEPT + 3
        assert [each.sequence for each in past] == [*range(last - KEPT + 2, last + 1)]
        assert [each.number for each in past] == [each.sequence for each in past]
        assert board.recorded(0) == ()
        board.record_begin("forward" * 10)  # no collective: kept by its name
        past = board.recorded(1)
        assert past[-1].verb == ("forward" * 10)[: layout.ENTRY_GROUP_BYTES]
        assert (past[-1].group, past[-1].end, past[-1].outcome) == ("", None, "under way")


def test_a_board_without_histories_keeps_status_alone() -> None:
    with Board.create(2, 0, histories=False) as board:
        board.record_end(board.record_begin("tp all_reduce", "tp", ALL_REDUCE))
        assert board.member_status(0).operation == "tp all_reduce"
        assert board.recorded(0) == board.totals(0) == ()
        assert board.fingerprints.allocate(1) == 0
        assert list(board.fingerprints.of_member(1)) == []
        assert board.handle().segment.size == 8192


def test_a_successor_of_a_killed_process_begins_anew() -> None:
    with Board.create(2, 0) as board:
        pid = os.fork()
        if pid == 0:
            other = Board.attach(board.handle(), 1)
            for _ in range(KEPT + 100):
                other.record_end(other.record_begin("tp send", "tp", SEND))
            other.fingerprints.publish(other.fingerprints.allocate(7), 3, 4, LAST)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        assert len(board.recorded(1)) == KEPT - 1
        assert [each.ended for each in board.totals(1)] == [KEPT + 100]
        assert len(board.fingerprints.of_member(1)) == 1
        with Board.attach(board.handle(), 1) as successor:
            assert board.recorded(1) == board.totals(1) == ()
            assert list(board.fingerprints.of_member(1)) == []
            successor.record_begin("tp all_reduce", "tp", ALL_REDUCE)
            assert [each.verb for each in board.recorded(1)] == ["all_reduce"]


# --- readers in other processes --------------------------------------------------------------


def seen_of(board: Board) -> tuple[tuple[OperationRecord, ...], ...]:
    """The histories on a board of this process, from outside."""
    seen = scan()
    (program,) = of_process(os.getpid(), seen, programs(seen))
    key = board.handle().segment.nonce.hex()  # boards of other tests may not be collected yet
    ours = replace(program, boards=[each for each in program.boards if each.key == key])
    return tuple(member.past for member in histories(seen, ours)[0])


def test_the_history_of_a_killed_process_is_there() -> None:
    with Board.create(2, 0) as board:
        pid = os.fork()
        if pid == 0:
            with suppress(BaseException):
                other = Board.attach(board.handle(), 1)
                other.record_end(other.record_begin("tp send", "tp", SEND, 64, 1, 0, FLOAT32))
                other.record_begin("tp all_reduce", "tp", ALL_REDUCE, 128, 1)
                other.wait(lambda: False, Deadline.after(60), "tp all_reduce", lambda: (0,))
            os._exit(1)
        until(lambda: len(board.recorded(1)) == 2)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        sent, reducing = board.recorded(1)
        assert (sent.verb, sent.group, sent.size, sent.peer) == ("send", "tp", 64, 0)
        assert (sent.dtype, sent.outcome, sent.number) == ("float32", "done", 1)
        assert (reducing.verb, reducing.end, reducing.outcome) == ("all_reduce", None, "under way")
        assert seen_of(board)[1] == (sent, reducing)


def test_a_history_is_read_while_it_is_written() -> None:
    with Board.create(2, 0) as board:
        pid = os.fork()
        if pid == 0:
            other, number = Board.attach(board.handle(), 1), 0
            while True:
                number += 1
                other.record_end(
                    other.record_begin("tp send", "tp", SEND, 8 * number, number & 0xFFFFFFFF)
                )
        try:
            until(lambda: any(each.sequence > KEPT for each in board.recorded(1)))
            found = 0
            for _ in range(15):
                for past in (board.recorded(1), seen_of(board)[1]):
                    if not past:  # a reader that is stalled each time finds all overwritten
                        continue
                    found += 1
                    numbers = [each.sequence for each in past]
                    assert numbers == [*range(numbers[0], numbers[0] + len(numbers))]
                    assert [each.number for each in past] == numbers
                    assert [each.size for each in past] == [8 * number for number in numbers]
                    assert all(each.begin <= (each.end or each.begin) for each in past)
                    begins = [each.begin for each in past]
                    assert begins == sorted(begins)
            assert found
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.mark.parametrize(("stalls", "last"), [(1, KEPT + 8), (100, None)])
def test_an_overtaken_reader_reads_again(stalls: int, last: int | None) -> None:
    with Board.create(1, 0) as board:
        left = stalls

        def write(count: int) -> None:
            for _ in range(count):
                board.record_end(board.record_begin("tp send", "tp", SEND))

        def read(at: int, size: int) -> bytes:
            nonlocal left
            if size > 8 and left:
                left -= 1
                write(KEPT + 5)
            return bytes(board._segment.memory[at : at + size])

        write(3)
        past = read_history(board._segment, 0, 1, read)
        assert (past[-1].sequence if past else None) == last
        assert left == max(stalls - 10, 0)


def test_another_user_reads_none_of_it() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    with Board.create(1, 0) as board:
        board.record_begin("tp send", "tp", SEND)
        descriptor = board.handle().segment.fd
        assert os.fstat(descriptor).st_mode & 0o777 == 0o600
        path = f"/proc/{os.getpid()}/fd/{descriptor}"

        def read() -> None:
            with pytest.raises(PermissionError):
                os.open(path, os.O_RDONLY)

        in_a_child(read, as_nobody=True)


def test_damaged_entries_are_left_out() -> None:
    with Board.create(1, 0) as board:
        for _ in range(3):
            board.record_begin("tp send", "tp", SEND)
        segment: Segment = board._segment
        second = layout.history_slot(0, 1) + layout.ENTRY_STRIDE
        segment.words.store64(second + layout.ENTRY_SEQUENCE, 999)
        third = second + layout.ENTRY_STRIDE
        segment.words.write(third + layout.ENTRY_VERB, b"\xff\xff\xff")
        assert [each.sequence for each in board.recorded(0)] == [1, 3]
        assert board.recorded(0)[1].dtype == ""


# --- the groups of a member ------------------------------------------------------------------


def test_the_groups_of_a_member_closed_ones_make_room() -> None:
    with Board.create(4, 2) as board:

        def closed() -> dict[str, bool]:
            return {each.name: each.closed for each in status_of(board, 2).groups}

        for _ in range(2):
            board.add_group("tp", 0, (2, 3))
            board.add_group("world", 2, (0, 1, 2, 3))
        assert status_of(board, 2).groups == (
            Membership("tp", 0, 2, 2),
            Membership("world", 2, 4, 0),
        )
        assert status_of(board, 0).groups == ()
        board.close_group("tp", 0, (2, 3))
        assert not closed()["tp"]  # another one of that name is open
        board.close_group("tp", 0, (2, 3))
        assert closed()["tp"]
        board.add_group("tp", 0, (2, 3))
        assert not closed()["tp"]
        for number in range(20):
            board.add_group(f"group {number}" * 4, 0, (2, 3))
        assert len(closed()) == MAX_GROUPS
        assert status_of(board, 2).groups[-1].name == ("group 13" * 4)[: layout.ENTRY_GROUP_BYTES]
        for _ in range(2):
            board.close_group("world", 2, (0, 1, 2, 3))
        board.close_group("never there", 0, (2, 3))
        board.add_group("a new one", 0, (2, 3))
        assert "world" not in closed() and "a new one" in closed()
        assert len(closed()) == MAX_GROUPS


# --- totals ----------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[Board]:
    with Board.create(1, 0) as board:
        yield board


def did(board: Board, group: str, verb: int = ALL_REDUCE, size: int = 8, **end: Any) -> None:
    number = board.record_begin("x", group, verb, size)
    for _ in range(2):  # only the first call counts
        board.record_end(number, **end)


def test_totals_count_each_ended_operation_by_group_and_verb(alone: Board) -> None:
    many = 3 * KEPT + 5
    outlasts = alone.record_begin("x", "tp", SEND, 8)
    for _ in range(many):
        did(alone, "tp")
    totals = {each.verb: each for each in alone.totals(0)}
    assert 0 < totals["all_reduce"].seconds < 60
    assert totals["send"].ended == 1  # as its entry was overwritten
    alone.record_end(outlasts)
    did(alone, "pp", SEND, 100)
    did(alone, "tp", error=GroupTimeoutError("x", 1.0))
    did(alone, "", layout.DID_DEQUEUE, 5)
    for number in range(100):  # methods take no room
        did(alone, f"method {number}", verb=0)
    found = alone.totals(0)
    assert {(each.group, each.verb, each.ended, each.failed, each.size) for each in found} == {
        ("", "dequeue", 1, 0, 5),
        ("tp", "all_reduce", many + 1, 1, 8 * many + 8),
        ("tp", "send", 1, 0, 8),
        ("pp", "send", 1, 0, 100),
    }
    assert len(found) == 4
    alone.words.stamp(SLOT, 2, "x", HISTORY, "tp", SEND, 8, 0, 0, 0)
    alone.words.store64(SLOT + layout.MEMBER_SEQUENCE, 0)  # as when a process takes the slot
    did(alone, "ep")
    assert [each.ended for each in alone.totals(0) if each.verb == "send"] == [1, 1]


def test_further_groups_share_a_place(alone: Board) -> None:
    names = [f"a group, number {number}" for number in range(40)]
    for name in names * 2:
        did(alone, name)
    found = alone.totals(0)
    assert [each.group for each in found] == [*names[:14], FURTHER_GROUPS]
    assert [each.ended for each in found] == [2] * 14 + [52]


# --- fingerprints ----------------------------------------------------------------------------


def log_of(count: int, group: int, *collectives: tuple[int, int]) -> bytes:
    """The bytes of a log: its count, and numbers with digests, all with signature `LAST`."""
    log = bytearray(layout.FINGERPRINT_STRIDE)
    struct.pack_into("<QQ", log, 0, count, group)
    for number, digest in collectives:
        struct.pack_into("<II56s", log, 64 + number % 4 * 64, digest, number, LAST)
    return bytes(log)


def test_others_read_the_fingerprints_of_a_member() -> None:
    group, most = (1 << 63) - 1, 0xFFFFFFFF
    with Board.create(3, 0) as board, Board.attach(board.handle(), 2) as other:
        mine, others = board.fingerprints, other.fingerprints
        entry = others.allocate(group)
        assert list(mine.of_member(2)) == [Fingerprint(group, log_of(0, group))]
        others.publish(entry, 5, most, LAST)
        for each in (mine, others):
            assert list(each.of_member(2)) == [Fingerprint(group, log_of(5, group, (5, most)))]
        for number in range(6, 10):
            others.publish(entry, number, number, LAST)
        last = log_of(9, group, *((number, number) for number in range(6, 10)))
        assert list(mine.of_member(2)) == [Fingerprint(group, last)]
        assert mine.of_group(group, 2) == Fingerprint(group, last)
        assert mine.of_group(1, 2) is mine.of_group(group, 1) is None
        assert [mine.local_entry(*at) for at in ((group, 2), (1, 2), (group, 1))] == [entry, 0, 0]
        others.close(entry)
        (closed,) = mine.of_member(2)
        assert (closed.group, closed.closed) == (group, True)
        assert mine.closed(group, 2) and not mine.closed(1, 2)
        number = (1 << 32) + 6  # 64 bits in the log's count, 32 in an entry
        mine.publish(mine.allocate(7), number, 0, LAST)
        mine.close(mine.allocate(8))  # without a collective
        counted, empty = mine.of_member(0)
        assert struct.unpack_from("<Q", counted.log) == (number,)
        assert struct.unpack_from("<II", counted.log, 64 + 2 * 64) == (0, 6)
        assert (empty.group, empty.closed) == (8, True)


def test_the_entry_closed_first_is_used_again_first(caplog: pytest.LogCaptureFixture) -> None:
    with Board.create(2, 0) as board, Board.attach(board.handle(), None) as onlooker:
        fingerprints = board.fingerprints
        entries = [fingerprints.allocate(group) for group in range(1, layout.FINGERPRINTS + 1)]
        assert len({*entries}) == layout.FINGERPRINTS
        assert caplog.messages == []
        for group in (97, 99):
            assert fingerprints.allocate(group) == 0
        assert onlooker.fingerprints.allocate(99) == 0
        assert caplog.messages == [
            "calls are compared in 32 open groups at once; in further ones they are not"
        ]
        for entry in entries:
            fingerprints.publish(entry, 1, 1, LAST)
        for entry in entries[:2]:
            fingerprints.close(entry)
        assert fingerprints.allocate(98) == entries[0]
        # Nothing is left of the group that had it; that the other one was closed is known still.
        told = sorted((each.group, each.closed) for each in fingerprints.of_member(0))
        others = [(group, False) for group in range(3, layout.FINGERPRINTS + 1)]
        assert told == [(2, True), *others, (98, False)]
        assert fingerprints.of_group(98, 0) == Fingerprint(98, log_of(0, 98))


def test_a_reader_finds_no_other_count_of_a_closed_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Board.create(1, 0) as board:
        for group in range(1, layout.FINGERPRINTS + 1):
            entry = board.fingerprints.allocate(group)
            board.fingerprints.publish(entry, 5, 1, LAST)
            board.fingerprints.close(entry)
        seen: list[Fingerprint] = []
        words = board.fingerprints._words

        class Watched:
            def write(self, offset: int, data: bytes) -> None:
                words.write(offset, data)

            def fence(self) -> None:
                words.fence()

            def store64(self, offset: int, value: int) -> None:
                words.store64(offset, value)
                monkeypatch.setattr(board.fingerprints, "_words", words)
                seen.extend(board.fingerprints.of_member(0))
                monkeypatch.setattr(board.fingerprints, "_words", self)

        monkeypatch.setattr(board.fingerprints, "_words", Watched())
        board.fingerprints.allocate(99)
        assert {each.log[0] for each in seen if each.closed} == {5}


def test_a_wait_compares_fingerprints_now_and_then() -> None:
    looks: list[int] = []
    with Board.create(2, 0) as board, Board.attach(board.handle(), 1):
        board.fingerprints.comparing.append(lambda: looks.append(1))
        with pytest.raises(GroupTimeoutError):
            board.wait(lambda: False, Deadline.after(0.35), "a wait", lambda: [1])
    assert len(looks) >= 2
