"""The totals of a member's operations: of many groups, and who reads it when."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from shm_broadcast import Board, layout
from shm_broadcast._native import Words
from shm_broadcast.state.flight_recorder import FURTHER_GROUPS, read_totals

if TYPE_CHECKING:
    from shm_broadcast.state.flight_recorder import VerbTotal

ALL_REDUCE = layout.DID_NAMES.index("all_reduce")
SLOT, HISTORY = layout.member_slot(0), layout.history_slot(0, 1)


class Memory:
    """A board of one member that is only bytes."""

    def __init__(self) -> None:
        self._bytes = bytearray(layout.board_size(1))
        self.memory = memoryview(self._bytes)
        self.words = Words(self._bytes)
        self.words.store32(layout.BOARD_HISTORY, layout.HISTORY_ENTRIES)

    def did(self, group: str, verb: int = ALL_REDUCE, size: int = 8, outcome: int = 1) -> None:
        number = self.words.stamp(SLOT, 2, "x", HISTORY, group, verb, size, 0, 0, 0)
        self.words.leave(HISTORY, number, outcome, 0, 0)

    def totals(self) -> list[VerbTotal]:
        return list(read_totals(self, 0, 1))

    def told(self) -> list[tuple[str, str, int, int, int]]:
        """The totals but their seconds."""
        found = self.totals()
        return [(each.group, each.verb, each.ended, each.failed, each.size) for each in found]


@pytest.fixture
def memory() -> Memory:
    return Memory()


def test_more_operations_than_a_history_keeps_are_all_counted(memory: Memory) -> None:
    many = 3 * layout.HISTORY_ENTRIES + 5
    for _ in range(many):
        memory.did("tp")
    (total,) = memory.totals()
    assert (total.group, total.verb) == ("tp", "all_reduce")
    assert (total.ended, total.failed, total.size) == (many, 0, 8 * many)
    assert 0 < total.seconds < 60


def test_groups_verbs_and_failures_are_told_apart(memory: Memory) -> None:
    memory.did("tp")
    memory.did("pp", layout.DID_NAMES.index("send"), 100)
    memory.did("tp", outcome=layout.OUTCOME_NAMES.index("timed out"))
    memory.did("", layout.DID_DEQUEUE, 5)
    assert memory.told() == [
        ("", "dequeue", 1, 0, 5),
        ("tp", "all_reduce", 2, 1, 16),
        ("pp", "send", 1, 0, 100),
    ]


def test_what_has_not_ended_is_not_counted_nor_twice_what_has(memory: Memory) -> None:
    number = memory.words.stamp(SLOT, 2, "x", HISTORY, "tp", ALL_REDUCE, 8, 0, 0, 0)
    assert memory.totals() == []
    for _ in range(2):
        memory.words.leave(HISTORY, number, 1, 0, 0)
    assert [each.ended for each in memory.totals()] == [1]


def test_calls_of_methods_take_no_room(memory: Memory) -> None:
    for number in range(100):
        memory.did(f"method {number}", verb=0)
    assert memory.totals() == []
    memory.did("tp")
    assert [each.group for each in memory.totals()] == ["tp"]


def test_an_operation_that_outlasts_the_whole_history_is_counted(memory: Memory) -> None:
    barrier = layout.DID_NAMES.index("barrier")
    number = memory.words.stamp(SLOT, 2, "x", HISTORY, "tp", ALL_REDUCE, 8, 0, 0, 0)
    for _ in range(layout.HISTORY_ENTRIES):
        memory.did("tp", barrier, 0)
    memory.words.leave(HISTORY, number, layout.OUTCOME_DONE, 0, 0)
    reduced, waited = sorted(memory.totals(), key=lambda each: each.verb)
    assert (reduced.verb, reduced.ended, reduced.failed, reduced.size) == ("all_reduce", 1, 0, 8)
    assert (waited.verb, waited.ended, waited.failed) == ("barrier", layout.HISTORY_ENTRIES, 0)
    assert 0 < reduced.seconds < 60


def test_operations_of_an_earlier_process_are_not_counted(memory: Memory) -> None:
    memory.words.stamp(SLOT, 2, "x", HISTORY, "tp", ALL_REDUCE, 8, 0, 0, 0)
    memory.words.store64(SLOT + layout.MEMBER_SEQUENCE, 0)  # as when a process takes the slot
    memory.did("tp")
    (total,) = memory.totals()
    assert total.ended == 1


def test_further_groups_share_a_place(memory: Memory) -> None:
    names = [f"a group, number {number}" for number in range(40)]
    for name in names * 2:
        memory.did(name)
    found = memory.totals()
    assert [each.group for each in found] == [*names[:14], FURTHER_GROUPS]
    assert [each.ended for each in found] == [2] * 14 + [52]


def test_a_board_without_histories_has_none() -> None:
    with Board.create(1, 0, histories=False) as board:
        board.record_end(board.record_begin("x", "tp", ALL_REDUCE))
        assert board.totals(0) == ()


def test_who_takes_the_slot_of_one_that_died_begins_anew() -> None:
    with Board.create(2, 0) as board:
        pid = os.fork()
        if pid == 0:
            other = Board.attach(board.handle(), 1)
            for _ in range(3):
                other.record_end(other.record_begin("tp all_reduce", "tp", ALL_REDUCE, 8))
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(pid, 0)
        assert [each.ended for each in board.totals(1)] == [3]  # it can still be read
        with Board.attach(board.handle(), 1):
            assert board.totals(1) == ()
