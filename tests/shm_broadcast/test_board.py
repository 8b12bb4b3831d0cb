"""The board: slots, abort, status, and every way in which a wait ends."""

from __future__ import annotations

import errno
import os
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shm_broadcast import (
    NEVER,
    Board,
    BoardHandle,
    Deadline,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    PeerLostError,
    ProcessId,
    SharedMemoryError,
    layout,
)
from shm_broadcast.cpu import GIVEN_CORES
from shm_broadcast.state import table
from tests.forked import in_a_child
from tests.ranks import run_ranks
from tests.shm_broadcast.leaks import open_descriptors
from tests.shm_broadcast.remote_peers import get, put

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DEAD = ProcessId(2**22 + 1, 1)


@contextmanager
def boards(n: int) -> Iterator[list[Board]]:
    """A board of which this process is every member."""
    with Board.create(n, member=0, name="tp:0") as first:
        others = [Board.attach(first.handle(), member) for member in range(1, n)]
        yield [first, *others]
        for other in others:
            other.close()


def bury(board: Board, member: int) -> None:
    """Make ``member``'s process look dead."""
    slot = board.slot_offset(member)
    board.words.store64(slot + layout.MEMBER_START_TIME, DEAD.start_time)
    board.words.store32(slot + layout.MEMBER_PID, DEAD.pid)


def told(board: Board) -> str | None:
    return None if board.aborted is None else board.aborted.message


def never() -> bool:
    return False


# --- joining ---------------------------------------------------------------------------------


def test_joining() -> None:
    with Board.create(3, member=1) as board:
        assert [board.joined(member) for member in range(3)] == [False, True, False]
        assert [each.state for each in board.status()] == ["absent", "idle", "absent"]
        mine = board.member_status(1)
        assert (mine.pid, mine.rank, mine.sequence, mine.operation) == (os.getpid(), 1, 0, "")
        assert mine.age is not None and 0 <= mine.age < 10


@pytest.mark.parametrize("spare", [0, 1])
def test_a_board_is_crowded_if_some_member_lacks_a_core(spare: int) -> None:
    with Board.create(len(GIVEN_CORES) + 1 - spare) as board:
        assert board.oversubscribed == (not spare)


def test_an_onlooker_takes_no_slot_and_no_part() -> None:
    with Board.create(2, member=None) as board:
        before = bytes(board._segment.memory)
        for call in (
            lambda: board.record_begin("send"),
            board.idle,
            board.progress,
            lambda: board.abort("no"),
            lambda: board.wait(lambda: True, NEVER, "wait", list),
        ):
            with pytest.raises(ValueError, match="no member"):
                call()
        assert bytes(board._segment.memory) == before
        assert [each.state for each in board.status()] == ["absent", "absent"]
        with Board.attach(board.handle(), 0) as member, Board.attach(board.handle(), None) as other:
            member.record_begin("send")
            assert other.member_status(0).operation == "send"
            other.notify_self()


def test_wrong_members_are_refused_and_leave_nothing() -> None:
    with pytest.raises(ValueError, match="1 or more"):
        Board.create(0, member=None)
    with boards(2) as (board, other):
        other.record_begin("send")
        before = open_descriptors()
        for member in (-1, 2, 100):
            for call in (
                lambda member: Board.create(2, member=member),
                lambda member: Board.attach(board.handle(), member),
                *(board.slot_offset, board.eventcount_offset, board.joined, board.member_status),
            ):
                with pytest.raises(ValueError, match="member must be"):
                    call(member)
        with pytest.raises(
            ValueError, match=f"rank 1 of tp:0 has joined already, as pid {os.getpid()}"
        ):
            Board.attach(board.handle(), 1)
        assert open_descriptors() == before
        assert board.member_status(1).operation == "send"


def race_for_slots(rank: int, n: int, folder: str) -> list[int]:
    """Join slot after slot at the same moment as the others; returns the slots that were got."""
    slots = range(1, 21)
    if rank == 0:
        owned = Board.create(1 + len(slots), member=0)
        put(folder, "board", owned.handle())
    with Board.attach(get(folder, "board"), None) as board:
        joined = []
        for turn, slot in enumerate(slots, 1):
            meet(board, n * turn)
            with suppress(ValueError):
                joined.append(Board.attach(board.handle(), slot))
        meet(board, n * (1 + len(slots)))
        return [each.member or 0 for each in joined]


def meet(board: Board, arrivals: int) -> None:
    """Wait, without sleeping, until this was called so many times."""
    count = board.slot_offset(0) + layout.MEMBER_JOINING
    board.words.add32(count, 1)
    while board.words.load32(count) < arrivals:
        os.sched_yield()


def test_one_of_several_processes_gets_a_slot(tmp_path: Path) -> None:
    got = run_ranks(3, race_for_slots, str(tmp_path))
    assert sorted(slot for each in got for slot in each) == list(range(1, 21))


def zombie() -> int:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return pid


def test_a_slot_whose_taker_died_on_the_way_can_be_taken() -> None:
    living, ended = ProcessId.of(os.getppid()), zombie()
    reused = ProcessId(living.pid, living.start_time - 1)
    for taker, taken in [
        (DEAD, False),
        (reused, False),
        (ProcessId.of(ended), False),
        (living, True),
    ]:
        with Board.create(2, member=0) as board:
            board.words.store64(board.slot_offset(1) + layout.MEMBER_JOINING, taker.word)
            if taken:
                with pytest.raises(ValueError, match=f"has joined already, as pid {taker.pid}"):
                    Board.attach(board.handle(), 1)
                assert not board.joined(1)
            else:
                with Board.attach(board.handle(), 1):
                    assert board.member_status(1).state == "idle"
    os.waitpid(ended, 0)


def test_a_slot_of_a_member_that_died_or_closed_can_be_taken() -> None:
    with boards(2) as (board, old):
        old.record_begin("all_reduce")
        waiters = board.eventcount_offset(1) + layout.EVENTCOUNT_WAITERS
        board.words.add32(waiters, 1)  # died asleep
        bury(board, 1)
        assert board.lost() == [1]
        with Board.attach(board.handle(), 1) as new:
            assert board.lost() == []
            status = board.member_status(1)
            assert (status.state, status.pid, status.operation) == ("idle", os.getpid(), "")
            assert board.words.load32(waiters) == 0
            new.record_begin("send")
            assert board.member_status(1).state == "busy"
        assert board.member_status(1).state == "closed"
        with Board.attach(board.handle(), 1):
            assert board.member_status(1).state == "idle"


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), KeyboardInterrupt])
@pytest.mark.parametrize(
    "place",
    ["board.StatusPublisher", "board.write_stacks_when_asked", "table.Members.publish"],
)
def test_a_failure_or_interrupt_while_joining_leaves_the_slot_as_it_was(
    place: str, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with boards(3) as (board, old, other):
        old.record_begin("all_reduce")
        bury(board, 1)
        other.close()
        with monkeypatch.context() as failing:
            failing.setattr(f"shm_broadcast.state.{place}", Mock(side_effect=error))
            for member in (1, 2):
                with pytest.raises((OSError, KeyboardInterrupt)):
                    Board.attach(board.handle(), member)
        assert (board.lost(), board.member_status(1).operation) == ([1], "all_reduce")
        assert board.member_status(2).state == "closed"
        with Board.attach(board.handle(), 1), Board.attach(board.handle(), 2):
            assert board.lost() == []


def test_a_handle_is_plain_data_and_of_an_open_board() -> None:
    with Board.create(2, member=0, name="a name") as board:
        handle = board.handle()
        copy = msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=BoardHandle)
        with Board.attach(copy, 1) as other:
            assert (other.name, other.n_members, other.member) == ("a name", 2, 1)
    with pytest.raises(GroupClosedError):
        board.handle()
    with pytest.raises(SharedMemoryError):
        Board.attach(handle, 1)


# --- status ----------------------------------------------------------------------------------


def test_age_is_since_the_last_progress() -> None:
    with boards(2) as (board, other):
        at = board.slot_offset(1) + layout.MEMBER_PROGRESS
        board.words.store64(at, time.monotonic_ns() - 30_000_000_000)
        age = board.member_status(1).age
        assert age is not None and 30 <= age < 60
        other.progress()
        age = board.member_status(1).age
        assert age is not None and age < 30


# --- abort -----------------------------------------------------------------------------------


def test_abort_reaches_everyone() -> None:
    with boards(3) as all_boards:
        all_boards[1].abort(ValueError("bad shape"), culprit=2)
        for board in all_boards:
            failure = board.aborted
            assert failure is not None
            assert (failure.rank, failure.culprit) == (1, 2)
            assert (failure.kind, failure.message) == ("ValueError", "bad shape")
            with pytest.raises(
                GroupAbortedError, match="tp:0 send: the group was aborted: rank 1"
            ) as caught:
                board.check("send")
            assert caught.value.failure == failure


def test_one_of_several_aborts_is_kept_whole() -> None:
    with boards(4) as all_boards:
        go = threading.Barrier(4)

        def abort(board: Board) -> None:
            go.wait()
            board.abort(f"failure of {board.member}")

        threads = [threading.Thread(target=abort, args=[board]) for board in all_boards]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failures = {board.aborted for board in all_boards}
        (failure,) = failures
        assert failure is not None
        assert failure.message == f"failure of {failure.rank}"


def test_the_first_failure_wins_and_outlives_its_member() -> None:
    with boards(3) as (first, second, third):
        second.abort("the cause")
        first.abort(ConnectionError("its consequence"))
        bury(first, 1)
        with Board.attach(first.handle(), 1) as successor:
            successor.abort("second")
            failure = third.aborted
            assert failure is not None
            assert (failure.rank, failure.kind, failure.message) == (1, "Abort", "the cause")


def test_a_successor_can_abort_after_a_half_written_abort() -> None:
    with boards(2) as (board, _):
        slot = layout.failure_slot(1, 2)
        assert board.words.compare_and_swap32(slot + layout.FAILURE_CLAIMED, 0, 1)
        bury(board, 1)
        with Board.attach(board.handle(), 1) as successor:
            assert told(board) is None
            successor.abort("real")
            assert told(board) == "real"


def test_an_interrupted_abort_does_not_prevent_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with boards(2) as (board, other):
        with monkeypatch.context() as patch:
            patch.setattr(table, "write_text", interrupt)
            with pytest.raises(KeyboardInterrupt):
                other.abort("first")
        assert board.aborted is None
        other.abort("second")
        assert board.aborted is not None
        assert board.aborted.rank == other.ranks[1]


@given(st.text(st.characters(), max_size=700))
def test_long_messages_are_cut_at_a_character(text: str) -> None:
    with Board.create(1) as board:
        board.abort(ValueError(text))
        failure = board.aborted
        assert failure is not None
        shown = text.encode(errors="replace").decode().split("\0", 1)[0]
        assert shown.startswith(failure.message)
        room = layout.FAILURE_MESSAGE_BYTES - len(failure.message.encode())
        assert failure.message == shown or room < 4


def test_an_error_of_any_kind_aborts() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    for error, kind in (
        (type("E" * 100, (Exception,), {})("text"), "E" * layout.FAILURE_KIND_BYTES),
        (Mute(), "Mute"),
    ):
        with Board.create(1) as board:
            board.abort(error)
            assert board.aborted is not None
            assert board.aborted.kind == kind


# --- waits -----------------------------------------------------------------------------------


def test_wait_names_who_is_late() -> None:
    with boards(3) as (board, _, late):
        late.record_begin("load_weights")
        with pytest.raises(
            GroupTimeoutError, match=r"tp:0 all_reduce: timed out after 0.05 s"
        ) as e:
            board.wait(never, Deadline.after(0.05), "all_reduce", lambda: [2], detail=lambda: "why")
        (status,) = e.value.waiting_for
        assert (status.rank, status.operation) == (2, "load_weights")
        assert str(e.value).endswith("(why)")


def test_wait_names_a_dead_peer() -> None:
    with boards(3) as (board, _, dying):
        dying.record_begin("send")
        bury(board, 2)
        with pytest.raises(PeerLostError, match="tp:0 recv: lost rank 2") as caught:
            board.wait(never, Deadline.after(10), "recv", lambda: [1, 2])
        assert (caught.value.rank, caught.value.pid) == (2, DEAD.pid)
        assert caught.value.peer.state == "lost"
        assert caught.value.peer.age is not None


def test_wait_names_the_needed_peer_that_closed_and_no_other() -> None:
    with boards(3) as (board, other, _):
        bury(board, 2)
        with pytest.raises(GroupTimeoutError):
            board.wait(never, Deadline.after(0.1), "recv", lambda: [1])
        other.close()
        with pytest.raises(PeerLostError, match=r"recv: rank 1 \(pid \d+\) has closed the group"):
            board.wait(never, Deadline.after(10), "recv", lambda: [1])


def test_a_peer_that_died_after_its_part_is_no_loss() -> None:
    with boards(2) as (board, _):
        looks = 0

        def peers() -> list[int]:
            nonlocal looks
            looks += 1
            bury(board, 1)
            return [1]

        board.wait(lambda: looks > 0, Deadline.after(10), "recv", peers, spin=0)


def test_close_is_idempotent_and_final() -> None:
    with boards(2) as (board, other):
        other.close()
        other.close()
        assert other.closed
        assert board.lost() == []
        assert "closed" in repr(other)
        with pytest.raises(GroupClosedError):
            other.check("send")
        other.record_begin("recv")  # of a thread that goes on
        with pytest.raises(GroupClosedError):
            other.wait(never, Deadline.after(1), "recv", lambda: [0])
        assert board.member_status(1).state == "closed"
        assert other.member_status(0).state == "idle"
        bury(board, 0)
        assert other.member_status(0).state == "lost"


def test_no_descriptor_is_left() -> None:
    in_a_child(lose_a_member)  # where no thread of another test closes descriptors


def lose_a_member() -> None:
    before = open_descriptors()
    with boards(3) as (board, _, _):
        board.lost()
        bury(board, 1)
        board.lost()
    dropped = Board.create(2, member=0)
    other = Board.attach(dropped.handle(), 1)
    assert dropped.lost() == other.lost() == []
    del board, _, dropped, other
    assert open_descriptors() == before
