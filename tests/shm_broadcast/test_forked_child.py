"""A child that a member forks is no member, and leaves its parent's ends alone."""

from __future__ import annotations

import gc
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from shm_broadcast import Board, GroupClosedError, MessageQueue, process
from shm_broadcast.process import IN_FORKED_CHILD
from tests.forked import in_a_child

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT = 60.0


def refuse(*calls: Callable[[], object]) -> None:
    for call in calls:
        with pytest.raises(GroupClosedError, match=IN_FORKED_CHILD):
            call()


def test_a_child_is_refused_by_both_ends_of_a_queue_which_go_on() -> None:
    with (
        MessageQueue(n_reader=1, n_local_reader=1) as writer,
        MessageQueue.create_from_handle(writer.export_handle(), 0) as reader,
    ):
        writer.enqueue("before", LIMIT)

        def body() -> None:
            refuse(
                lambda: writer.enqueue("a child's"),
                lambda: writer.wait_until_ready(0),
                lambda: writer.behind(),
                lambda: reader.dequeue(0),
                lambda: reader.broadcast_object(timeout=0),
            )
            reader.shutdown()
            writer.shutdown()

        in_a_child(body)
        writer.enqueue("after", LIMIT)
        assert [reader.dequeue(LIMIT), reader.dequeue(LIMIT)] == ["before", "after"]


def test_a_child_is_no_member_of_its_parents_board_and_may_join_others() -> None:
    with Board.create(2) as board, Board.attach(board.handle(), 1) as other:

        def body() -> None:
            refuse(lambda: board.check("wait"), lambda: board.abort("a child's"))
            board.close()
            with Board.create(1) as own:
                own.check("wait")

        in_a_child(body)
        board.check("wait")
        assert [each.state for each in other.status()] == ["idle", "idle"]


def test_what_is_no_longer_used_is_not_kept_for_children() -> None:
    gc.collect()
    before = len(process._fork_aware)
    for _ in range(10):
        Board.create(1).close()
    gc.collect()
    assert len(process._fork_aware) <= before


def test_a_child_that_is_forked_while_a_thread_looks_at_members_closes_their_board() -> None:
    looking, forked = threading.Event(), threading.Event()

    def look() -> None:
        with board._members._lock:
            looking.set()
            forked.wait(LIMIT)

    def close() -> None:
        signal.alarm(int(LIMIT / 2))  # ends it, if it hangs
        board.member_status(1)
        board.close()

    with Board.create(2, 0) as board:
        thread = threading.Thread(target=look)
        thread.start()
        looking.wait(LIMIT)
        try:
            in_a_child(close)
        finally:
            forked.set()
            thread.join()
