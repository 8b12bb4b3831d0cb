"""The history of a member: what is written down, what is kept, who can read it, and when."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from server.inspection.snapshot import of_process, programs, scan
from server.inspection.trace import histories
from shm_broadcast import Board, Deadline, MessageQueue, layout
from shm_broadcast._native import Words
from shm_broadcast.errors import (
    DivergenceError,
    Failure,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    MemberStatus,
    PeerLostError,
)
from shm_broadcast.state.flight_recorder import outcome_of, read_history
from shm_broadcast.state.status import MAX_GROUPS, Membership
from tests.forked import in_a_child
from tests.patience import until
from tests.shm_broadcast.members import status_of
from tests.shm_broadcast.queues import Running

if TYPE_CHECKING:
    from shm_broadcast.segment import Segment
    from shm_broadcast.state.flight_recorder import OperationRecord

KEPT = layout.HISTORY_ENTRIES
SIZE = layout.board_size(1)
ALL_REDUCE = layout.DID_NAMES.index("all_reduce")
SEND = layout.DID_NAMES.index("send")
FLOAT32 = layout.DTYPE_NAMES.index("float32")


@pytest.fixture
def words() -> Words:
    return Words(bytearray(SIZE))


def entry(words: Words, sequence: int) -> tuple[int, ...]:
    """Begin, end, sequence, bytes and the rest of an entry, as far as they are words."""
    at = layout.history_slot(0, 1) + (sequence - 1) % KEPT * layout.ENTRY_STRIDE
    return tuple(words.load64(at + offset) for offset in range(0, layout.ENTRY_STRIDE, 8))


def stamp(words: Words, number: int = 1) -> int:
    slot, history = layout.member_slot(0), layout.history_slot(0, 1)
    what = "tp send", history, "tp", SEND, 1000, number, 3, FLOAT32
    return words.stamp(slot, layout.STATE_BUSY, *what)


# --- what is written down --------------------------------------------------------------------


def test_an_entry_is_what_is_drawn(words: Words) -> None:
    before = time.monotonic_ns()
    assert stamp(words, 7) == 1
    begin, end, sequence, size, about, outcome_and_group, *rest = entry(words, 1)
    assert before <= begin <= time.monotonic_ns()
    assert (end, sequence, size) == (0, 1, 1000)
    assert about == 7 | 3 << 32 | SEND << 48 | FLOAT32 << 56
    assert outcome_and_group == int.from_bytes(b"\0tp\0\0\0\0\0", "little")
    assert rest == [0, 0]


def test_an_end_is_written_once(words: Words) -> None:
    history, sequence = layout.history_slot(0, 1), stamp(words)
    words.leave(history, sequence, 3, 0, 0)
    ended = entry(words, 1)
    assert ended[0] <= ended[1] <= time.monotonic_ns()
    assert (ended[3], ended[5] & 0xFF) == (1000, 3)
    words.leave(history, sequence, layout.OUTCOME_DONE, 5, 5)
    assert entry(words, 1) == ended


def test_what_was_not_known_at_first_is_added_at_the_end(words: Words) -> None:
    words.leave(layout.history_slot(0, 1), stamp(words), layout.OUTCOME_DONE, 12, 34)
    assert entry(words, 1)[3] == 12
    assert entry(words, 1)[4] & 0xFFFFFFFF == 34


def test_the_end_of_an_operation_whose_entry_was_used_again_is_forgotten(words: Words) -> None:
    for _ in range(KEPT + 1):
        stamp(words)
    newest = entry(words, KEPT + 1)
    words.leave(layout.history_slot(0, 1), 1, layout.OUTCOME_DONE, 12, 34)
    words.leave(layout.history_slot(0, 1), 0, layout.OUTCOME_DONE, 12, 34)
    assert entry(words, KEPT + 1) == newest


def test_a_long_name_is_cut(words: Words) -> None:
    slot, history = layout.member_slot(0), layout.history_slot(0, 1)
    words.stamp(slot, 2, "x", history, "g" * 100, SEND, 0, 0, layout.NO_PEER, 0)
    words.stamp(slot, 2, "x", history, "h", SEND, 0, 0, layout.NO_PEER, 0)
    assert entry(words, 1)[7] == int.from_bytes(b"g" * 8, "little")
    assert entry(words, 2)[2] == 2


def test_a_history_outside_is_refused() -> None:
    words = Words(bytearray(SIZE))
    for history in (SIZE, SIZE - 64, layout.history_slot(0, 1) + 4):
        with pytest.raises(ValueError, match=r"needs|no history"):
            words.leave(history, 1, 1, 0, 0)


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


def test_the_operations_of_a_queue(tmp_path: os.PathLike[str]) -> None:
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


def test_an_enqueue_that_finds_no_room() -> None:
    with (
        Board.create(2, 0) as board,
        Board.attach(board.handle(), 1) as other,
        MessageQueue.on_board(board, 0, [1], 1 << 16) as queue,
        MessageQueue.attach(queue.export_handle(), other),
    ):
        with pytest.raises(GroupTimeoutError):
            queue.enqueue(bytes(1 << 20), 0.01)
        (tried,) = board.recorded(0)
    assert (tried.verb, tried.outcome) == ("enqueue", "timed out")


# --- what is kept ----------------------------------------------------------------------------


def test_the_latest_operations_are_kept() -> None:
    with Board.create(2, 1) as board:
        for number in range(1, 5 * KEPT + 4):
            board.record_end(board.record_begin("tp all_reduce", "tp", ALL_REDUCE, 8, number))
        past = board.recorded(1)
        last = 5 * KEPT + 3
        assert [each.sequence for each in past] == [*range(last - KEPT + 2, last + 1)]
        assert [each.number for each in past] == [each.sequence for each in past]
        assert board.recorded(0) == ()


def test_other_operations_are_kept_by_their_name() -> None:
    with Board.create(1, 0) as board:
        board.record_begin("forward" * 10)
        (past,) = board.recorded(0)
        assert (past.verb, past.group) == (("forward" * 10)[: layout.ENTRY_GROUP_BYTES], "")
        assert (past.end, past.outcome) == (None, "under way")


def test_a_board_without_histories() -> None:
    with Board.create(2, 0, histories=False) as board:
        board.record_end(board.record_begin("tp all_reduce", "tp", ALL_REDUCE))
        assert board.member_status(0).operation == "tp all_reduce"
        assert board.recorded(0) == ()
        assert board.handle().segment.size == 8192


def test_a_member_takes_148_kib() -> None:
    with Board.create(3, 0) as board:
        assert board.handle().segment.size <= 3 * (148 << 10) + 2 * 4096


def test_a_successor_has_a_history_of_its_own() -> None:
    with Board.create(2, 0) as board:
        pid = os.fork()
        if pid == 0:
            other = Board.attach(board.handle(), 1)
            for _ in range(KEPT + 100):
                other.record_begin("tp send", "tp", SEND)
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        assert len(board.recorded(1)) == KEPT - 1
        with Board.attach(board.handle(), 1) as successor:
            assert board.recorded(1) == ()
            successor.record_begin("tp all_reduce", "tp", ALL_REDUCE)
            assert [each.verb for each in board.recorded(1)] == ["all_reduce"]


# --- who can read it, and when ---------------------------------------------------------------


def seen_of(board: Board) -> tuple[tuple[OperationRecord, ...], ...]:
    """The histories on a board of this process, from outside."""
    seen = scan()
    (program,) = of_process(os.getpid(), seen, programs(seen))
    key = board.handle().segment.nonce.hex()  # boards of other tests may not be collected yet
    ours = replace(program, boards=[each for each in program.boards if each.key == key])
    return tuple(member.past for member in histories(seen, ours)[0])


def test_what_a_killed_process_did_is_there() -> None:
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


def test_it_is_read_while_it_is_written() -> None:
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
            for _ in range(40):
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
def test_a_reader_whom_the_writer_overtakes_reads_again(stalls: int, last: int | None) -> None:
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


def test_threads_write_to_one_history() -> None:
    with Board.create(1, 0) as board:
        count = 500

        def work() -> None:
            for _ in range(count):
                board.record_end(board.record_begin("tp send", "tp", SEND))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        past = board.recorded(0)
        assert [each.sequence for each in past] == [*range(1, 3 * count + 1)]
        assert {each.outcome for each in past} == {"done"}


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


def test_damage_is_left_out() -> None:
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


# --- which groups a member is in -------------------------------------------------------------


def test_the_groups_of_a_member() -> None:
    with Board.create(4, 2) as board:
        for _ in range(2):
            board.add_group("tp", 0, (2, 3))
            board.add_group("world", 2, (0, 1, 2, 3))
        assert status_of(board, 2).groups == (
            Membership("tp", 0, 2, 2),
            Membership("world", 2, 4, 0),
        )
        assert status_of(board, 0).groups == ()
        for number in range(20):
            board.add_group(f"group {number}" * 4, 0, (2, 3))
        groups = status_of(board, 2).groups
        assert len(groups) == MAX_GROUPS
        assert groups[-1].name == ("group 13" * 4)[: layout.ENTRY_GROUP_BYTES]


def test_a_group_that_a_member_has_closed_is_told_and_makes_room() -> None:
    with Board.create(4, 2) as board:

        def closed() -> dict[str, bool]:
            return {each.name: each.closed for each in status_of(board, 2).groups}

        for _ in range(2):
            board.add_group("tp", 0, (2, 3))
        board.close_group("tp", 0, (2, 3))
        assert closed() == {"tp": False}  # another one of that name is open
        board.close_group("tp", 0, (2, 3))
        assert closed() == {"tp": True}
        board.add_group("tp", 0, (2, 3))
        assert closed() == {"tp": False}
        for number in range(MAX_GROUPS - 1):
            board.add_group(f"group {number}", 0, (2, 3))
        board.close_group("group 3", 0, (2, 3))
        board.close_group("never there", 0, (2, 3))
        board.add_group("a new one", 0, (2, 3))
        assert "group 3" not in closed()
        assert not any(closed().values())
        assert len(closed()) == MAX_GROUPS
