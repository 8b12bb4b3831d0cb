"""What ends a group over shared memory: set-up, signals, and deadlines amid much data."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from device_comm import ShmBackend
from device_comm.operation import Operation
from device_comm.shm import shm_backend
from shm_broadcast import Board, BoardHandle, GroupAbortedError, GroupTimeoutError, PeerLostError
from shm_broadcast.layout import EVENTCOUNT_WAITERS
from tests.device_comm.meeting import die, meet, wait_for_abort
from tests.device_comm.shm_ranks import (
    make_comm,
    on_comms,
    on_ranks,
    share_through,
    shm_of,
    wait_until_others_wait,
)
from tests.patience import failure_of, until

if TYPE_CHECKING:
    from collections.abc import Callable

    from device_comm import Communicator


@on_comms(3)
def test_a_root_whose_messages_are_not_read_names_the_others(comm: Communicator) -> None:
    if comm.rank == 0:
        x = torch.ones(3)
        error = failure_of(lambda: [comm.broadcast(x, timeout=0.5) for _ in range(10)])[0]
        assert isinstance(error, GroupTimeoutError)
        assert [member.rank for member in error.waiting_for] == [1, 2]
    else:
        wait_for_abort(comm.watch)


@on_ranks(2)
def test_operations_go_on_while_the_caller_is_busy(
    rank: int, n: int, path: str, board: BoardHandle
) -> None:
    """Rank 0 begins and does something else until the other one is done."""
    comm = make_comm(rank, board, path)
    x = torch.ones(1_000_000)
    comm.all_reduce(x)
    work = comm.all_reduce(x, async_op=True)
    if rank == 1:
        work.wait()
    meet(rank, n, path)
    work.wait()
    comm.barrier()


@on_comms(2)
def test_an_interrupted_rank_ends_the_group(comm: Communicator) -> None:
    if comm.rank == 1:
        wait_until_others_wait(comm)
        mine = shm_of(comm).board
        words, bell = mine.words, mine.eventcount_offset(0)
        until(lambda: words.load32(bell + EVENTCOUNT_WAITERS) > 0)
        os.kill(mine.member_status(0).pid, signal.SIGINT)
        wait_for_abort(comm.watch)
    else:
        with pytest.raises(KeyboardInterrupt):
            comm.all_reduce(torch.ones(3))
    assert failure_of(comm.barrier)[0].failure.kind == "KeyboardInterrupt"


@on_ranks(2)
def test_set_up_names_the_rank_that_is_missing(
    rank: int, n: int, path: str, board: BoardHandle
) -> None:
    if rank == 0:
        error = failure_of(lambda: make_comm(rank, board, path, timeout=0.3))[0]
        assert isinstance(error, GroupTimeoutError)
        assert [member.rank for member in error.waiting_for] == [1]


@on_comms(2)
def test_the_second_operation_of_a_call_raises_the_reason_of_the_first(comm: Communicator) -> None:
    """As a call that begins two operations, when the first is given up before the second begins."""
    backend, x = shm_of(comm), torch.ones(4)
    comm.barrier()
    if comm.rank == 1:
        comm.abort("enough")
        return
    for _ in range(2):
        out = x.clone()
        each = Operation("all_reduce", x, out, True, 20.0, name="tp all_reduce", shape=x.shape)
        with pytest.raises(GroupAbortedError, match="enough"):
            backend.start(each).wait(each.deadline)


@on_ranks(2, may_die=[0])
def test_a_death_amid_set_up_is_named(rank: int, n: int, path: str, board: BoardHandle) -> None:
    mine, share = Board.attach(board, rank), share_through(path)

    def share_and_die(handle: bytes | None) -> bytes:
        share(handle)
        die(path)
        return b""

    def share_late(handle: bytes | None) -> bytes:
        shared = share(handle)
        until(lambda: mine.member_status(0).state == "lost", "rank 0 lives on")
        return shared

    if rank == 0:
        ShmBackend.create(mine, range(n), share_and_die)
    with pytest.raises(PeerLostError, match="tp create: lost rank 0"):
        ShmBackend.create(mine, range(n), share_late, name="tp")


# --- Signal handlers, and code that runs inside an operation -------------------------------------

ROOM = 6 << 20
"""Elements of a tensor that takes longer than a signal."""


def on_alarm(do: Callable[[], object]) -> None:
    signal.signal(signal.SIGALRM, lambda *_: do())


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@on_ranks(2)
def test_a_call_by_a_handler_is_not_mixed_up_with_the_one_it_interrupts(
    rank: int, n: int, path: str, board: BoardHandle, dtype: torch.dtype
) -> None:
    """Rank 1's handler calls the group while its own call waits; rank 0 makes both calls."""
    failures: list[str] = []

    def call(value: float, dtype: torch.dtype) -> None:
        try:
            comm.all_reduce(torch.full((4,), value * (rank + 1)).to(dtype))
        except (RuntimeError, GroupAbortedError) as error:
            failures.append(type(error).__name__)

    with make_comm(rank, board, path) as comm:
        comm.barrier()
        if rank == 1:
            on_alarm(lambda: call(10.0, torch.float32))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        else:
            wait_for_abort(comm.watch)
        call(1.0, dtype)
        if rank == 0:
            call(10.0, torch.float32)
    assert failures == [("GroupAbortedError", "RuntimeError")[rank], "GroupAbortedError"]


@on_comms(2)
def test_a_call_while_room_is_made_for_a_result_ends_the_group(comm: Communicator) -> None:
    """What makes room for a large result is interrupted by a handler that calls the group."""
    x, make = torch.full((ROOM,), comm.rank + 1.0), shm_backend._recycled

    def interrupted(*args: Any) -> torch.Tensor:
        with pytest.raises(RuntimeError, match="interrupted"):
            comm.barrier()
        return make(*args)

    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(shm_backend, "_recycled", interrupted)
        else:
            wait_for_abort(comm.watch)
        with pytest.raises(GroupAbortedError):
            comm.all_reduce(x)


@on_ranks(2)
def test_a_handler_may_look_at_the_operation_that_is_awaited(
    rank: int, n: int, path: str, board: BoardHandle
) -> None:
    with make_comm(rank, board, path) as comm:
        seen: list[str] = []

        def look(work: object) -> None:
            seen.append(repr(work))
            signal.setitimer(signal.ITIMER_REAL, 0.0005)

        for _ in range(8):
            x = torch.full((ROOM,), rank + 1.0)
            meet(rank, n, path)
            work = comm.all_reduce(x, async_op=True)
            if rank == 1:
                on_alarm(lambda work=work: look(work))  # type: ignore[misc]
                signal.setitimer(signal.ITIMER_REAL, 0.0002)
            result = work.wait(30)
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert result[0] == result[-1] == 3.0
        assert rank == 0 or any("under way" in each for each in seen)


@on_ranks(2)
def test_a_wait_that_was_interrupted_midway_ends_the_group(
    rank: int, n: int, path: str, board: BoardHandle
) -> None:
    """A handler raises when a message is taken out: nobody must get the next one for it."""
    with make_comm(rank, board, path) as comm:
        if rank == 1:
            meet(rank, n, path)
            comm.send(torch.ones(5), 0)
            wait_for_abort(comm.watch)
            return
        end = shm_of(comm)._pipes.from_(1)
        find = end.find_mover

        def pull(*args: Any) -> int:
            mover = find()
            if mover is None or mover.pull(*args) == 0:
                return 0
            raise KeyboardInterrupt

        work = comm.irecv((5,), torch.float32, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(end, "find_mover", lambda: SimpleNamespace(pull=pull))
            meet(rank, n, path)
            with pytest.raises((KeyboardInterrupt, GroupAbortedError)):
                work.wait()
        for late in (work.wait, lambda: comm.recv((5,), torch.float32, 1)):
            with pytest.raises(GroupAbortedError, match="KeyboardInterrupt"):
                late()


@on_comms(2)
def test_an_error_of_the_users_in_the_background_ends_the_group_and_not_the_thread(
    comm: Communicator,
) -> None:
    """What is asked where the next message goes raises, in the background."""
    places = [torch.empty(5)]

    def following() -> list[torch.Tensor]:
        if not places:
            raise ValueError("no more room")
        return [places.pop()]

    if comm.rank == 1:
        comm.recv((1,), torch.float32, 0)
        comm.send(torch.ones(5), 0)
    else:
        comm.irecv_series(following, 1)
        comm.send(torch.ones(1), 1)
    wait_for_abort(comm.watch)
    with pytest.raises(GroupAbortedError, match="no more room"):
        comm.barrier()
    if comm.rank == 0:
        thread = shm_of(comm)._execution._progress._thread
        assert thread is not None
        assert thread.is_alive()


# --- Deadlines, aborts and handlers while much is moved ------------------------------------------

LARGE = 64 << 20
"""Elements of a tensor of 256 MiB: to move it takes more than 10 ms on any machine."""

SHORT = 0.001
"""Seconds that are over before it is moved."""

VERBS = ["all_reduce", "broadcast", "recv"]


def move(comm: Communicator, verb: str, x: torch.Tensor, timeout: float) -> type[Exception]:
    """The error of a call that moves ``x``; rank 0, which receives, gives up after ``timeout``."""
    limit = timeout if comm.rank == 0 else 60.0

    def call() -> None:
        if verb == "all_reduce":
            comm.all_reduce(x, out=x, timeout=limit)
        elif verb == "broadcast":
            comm.broadcast(x, src=1, out=x, timeout=limit)
        elif comm.rank == 0:
            comm.recv(out=x, src=1, timeout=limit)
        else:
            comm.send(x, dst=0, timeout=limit)
            comm.barrier()  # a sender needs no receiver: it may have succeeded

    return type(failure_of(call)[0])


def prepare(comm: Communicator) -> torch.Tensor:
    x = torch.ones(LARGE)
    if comm.rank == 0:
        comm.recv((1,), torch.float32, src=1)
    else:
        comm.send(torch.ones(1), dst=0)
    comm.barrier()
    return x


@pytest.mark.parametrize("verb", VERBS)
@on_comms(2)
def test_a_deadline_that_passes_while_much_is_moved_ends_the_group(
    comm: Communicator, verb: str
) -> None:
    error = move(comm, verb, prepare(comm), SHORT)
    assert error is (GroupTimeoutError, GroupAbortedError)[comm.rank]


@pytest.mark.parametrize("verb", VERBS)
@on_comms(2)
def test_handlers_run_and_aborts_are_seen_while_much_is_moved(
    comm: Communicator, verb: str
) -> None:
    """Rank 0's handler aborts the group while its collective is under way."""
    native = shm_of(comm).fast_path._native
    under_way: list[bool] = []

    def abort() -> None:
        under_way.append(native.under_way)
        comm.abort("enough")

    x = prepare(comm)
    if comm.rank == 0:
        on_alarm(abort)
        signal.setitimer(signal.ITIMER_REAL, SHORT)
    assert move(comm, verb, x, 60.0) is GroupAbortedError
    assert comm.rank == 1 or under_way == [verb != "recv"]


@on_comms(2)
def test_a_wait_for_much_in_the_background_ends_at_its_deadline(comm: Communicator) -> None:
    n = comm.world_size
    work = comm.all_reduce(prepare(comm), async_op=True)
    with pytest.raises(GroupTimeoutError):
        work.wait(SHORT)
    total = work.wait(60)
    assert total.min() == total.max() == n
