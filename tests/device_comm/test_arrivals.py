"""Who has come to a collective, told from what stands on the board."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from device_comm.torch_waiting import Arrival, Arrivals
from shm_broadcast import Board, GroupTimeoutError

if TYPE_CHECKING:
    from collections.abc import Iterator

N = 3


class Group:
    """Three members in one process."""

    def __init__(self, stack: ExitStack, name: str) -> None:
        first = stack.enter_context(Board.create(N, 0, ""))
        others = [stack.enter_context(Board.attach(first.handle(), m)) for m in range(1, N)]
        self.boards = [first, *others]
        self.name = name
        self.arrivals = [
            Arrivals(board, name, range(N), rank) for rank, board in enumerate(self.boards)
        ]

    def begin(self, rank: int, verb: str) -> Arrival:
        self.boards[rank].record_begin(f"{self.name} {verb}")
        return self.arrivals[rank].begin()

    def behind(self, arrival: Arrival) -> list[int]:
        late = tuple(self.boards[0].status()[1:])
        error = arrival.only_those_behind(GroupTimeoutError("op", 1.0, late, "detail"))
        assert (error.operation, error.timeout, error.detail) == ("op", 1.0, "detail")
        return [status.rank for status in error.waiting_for]


@pytest.fixture(params=["tp", "a name of more bytes than a slot has for the operation's text"])
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    with ExitStack() as stack:
        yield Group(stack, request.param)


def test_only_who_has_not_come_is_behind(group: Group) -> None:
    arrival = group.begin(0, "barrier")
    assert group.behind(arrival) == [1, 2]
    group.begin(1, "barrier")
    assert group.behind(arrival) == [2]
    group.boards[1].idle()  # it goes on while the collective is under way
    assert group.behind(arrival) == [2]
    group.begin(2, "barrier")
    assert group.behind(arrival) == [1, 2]  # all have come, and all are waited for


def test_who_is_further_has_come(group: Group) -> None:
    arrival = group.begin(0, "barrier")
    group.begin(1, "barrier")
    group.begin(1, "barrier")
    assert group.behind(arrival) == [2]


def test_who_is_in_an_operation_that_is_not_counted_may_be_behind(group: Group) -> None:
    arrival = group.begin(0, "barrier")
    group.begin(1, "barrier")
    group.boards[1].record_begin(f"{group.name} send")
    assert group.behind(arrival) == [1, 2]


def test_groups_of_one_name_are_told_apart() -> None:
    with Board.create(2, 0) as board:
        first, second = (Arrivals(board, "same", (0, 1), 0) for _ in range(2))
        assert not first.begin()._has_come(second._begun + 1)


def test_groups_that_a_process_was_in_before_do_not_count() -> None:
    """A worker that survives a restart has been in a group of this name, its new peer has not."""
    with Board.create(2, 0) as before, Board.create(2, 0) as board:
        Arrivals(before, "tp", (0, 1), 0)
        survivor = Arrivals(board, "tp", (0, 1), 0)
        with Board.attach(board.handle(), 1) as peer:
            newcomer = Arrivals(peer, "tp", (0, 1), 1)
            assert survivor.begin()._has_come(newcomer._begun + 1)
