"""What `ShmBackend` does when a peer dies, aborts, is late, is wrong or does something else."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import pytest
import torch

from device_comm import ReduceOp, ShmBackend
from device_comm.operation import Operation
from device_comm.shm import layout
from shm_broadcast import (
    Board,
    BoardHandle,
    CoordinatorError,
    DivergenceError,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    PeerLostError,
)
from shm_broadcast.layout import EVENTCOUNT_WAITERS
from tests.device_comm.meeting import die, meet, moment_of_death, wait_for_abort, wait_twice
from tests.device_comm.shm_ranks import make_comm, share_through, shm_of
from tests.patience import NAMED_WITHIN, failure_of, quickest, until
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from device_comm import Communicator

SIZES = [10, 3_000, 100_000, 2_000_000]


def for_ever(comm: Communicator, dice: random.Random) -> None:
    """Collectives without end; the same on all ranks."""
    inputs = [torch.ones(size) for size in SIZES]
    while True:
        x = dice.choice(inputs)
        root = dice.randrange(comm.world_size)
        verb = dice.randrange(5)
        if verb == 0:
            comm.all_reduce(x)
        elif verb == 1:
            comm.all_reduce(x, async_op=True).wait()
        elif verb == 2:
            comm.all_gather(x)
        elif verb == 3:
            comm.broadcast(x, src=root)
        else:
            comm.reduce(x, dst=root)


def victim_dies(
    rank: int, n: int, path: str, board: BoardHandle, seed: int
) -> tuple[CoordinatorError, CoordinatorError, float]:
    comm = make_comm(rank, board, path)
    dice = random.Random(seed)
    victim, moment = dice.randrange(n), dice.uniform(0.0, 0.15)
    if rank == victim:
        threading.Timer(moment, die, (path,)).start()
    error, raised = failure_of(lambda: for_ever(comm, dice))
    later = failure_of(lambda: comm.all_reduce(torch.ones(1)))[0]
    return error, later, raised - moment_of_death(path)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [2, 4])
def test_a_killed_rank_is_named_within_a_second(n: int, seed: int, tmp_path: Path) -> None:
    def attempt() -> float:
        return seconds_until_named(n, seed, mkdtemp(dir=tmp_path) + "/store")

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


def seconds_until_named(n: int, seed: int, path: str) -> float:
    victim = random.Random(seed).randrange(n)
    results = run_ranks(n, victim_dies, path, NEW_BOARD, seed, may_die=[victim])
    survivors = [each for each in results if each is not None]
    for error, later, _ in survivors:
        if isinstance(error, PeerLostError):
            assert error.rank == victim
        else:
            assert isinstance(error, GroupAbortedError)
            assert error.failure.kind == "PeerLostError"
            assert error.failure.culprit == victim or f"rank {victim}" in error.failure.message
        assert isinstance(later, GroupAbortedError)
        assert f"lost rank {victim}" in later.failure.message
    return max(seconds for _, _, seconds in survivors)


DIFFERENT: dict[str, Callable[[Communicator], object]] = {
    "verb": lambda comm: comm.all_gather(torch.ones(4)),
    "op": lambda comm: comm.all_reduce(torch.ones(4), op=ReduceOp.MAX),
    "dtype": lambda comm: comm.all_reduce(torch.ones(4, dtype=torch.int32)),
    "shape": lambda comm: comm.all_reduce(torch.ones(2, 2)),
    "size": lambda comm: comm.all_reduce(torch.ones(5)),
    "large": lambda comm: comm.all_reduce(torch.ones(1_000_000)),
    "strided": lambda comm: comm.all_reduce(torch.ones(5, 2)[:, 0]),
    "barrier": lambda comm: comm.barrier(),
    "later": lambda comm: comm.all_gather(torch.ones(4), async_op=True).wait(),
}


def wait_until_others_wait(comm: Communicator) -> None:
    """Until all others have arrived in a step that this rank has not begun."""
    backend = shm_of(comm)
    words, group = backend._segment.words, backend._layout
    done = words.load64(group.rank_line(comm.rank) + layout.RANK_DONE)

    def waits(rank: int) -> bool:
        slots = [group.slot(buffer, rank) for buffer in range(layout.BUFFERS)]
        return max(words.load64(slot + layout.SLOT_ARRIVED) for slot in slots) > done

    until(lambda: all(waits(rank) for rank in comm.peers))


def one_differs(
    rank: int, n: int, path: str, board: BoardHandle, how: str
) -> tuple[CoordinatorError, CoordinatorError]:
    comm = make_comm(rank, board, path)
    x = torch.ones(4)
    comm.barrier()
    if rank == n - 1:
        wait_until_others_wait(comm)
        error = failure_of(lambda: DIFFERENT[how](comm))[0]
    else:
        error = failure_of(lambda: comm.all_reduce_(x))[0]
    assert torch.equal(x, torch.ones(4)), "data was used"
    return error, failure_of(lambda: comm.barrier())[0]


@pytest.mark.parametrize("how", DIFFERENT)
def test_every_waiting_rank_names_the_one_that_differs(how: str, store_path: str) -> None:
    n = 3
    results = run_ranks(n, one_differs, store_path, NEW_BOARD, how)
    for rank, (error, later) in enumerate(results):
        assert isinstance(error, DivergenceError)
        assert error.rank == (0 if rank == n - 1 else n - 1)
        ours, theirs = error.ours, error.theirs
        if rank == n - 1:
            ours, theirs = theirs, ours
        assert ours == "all_reduce SUM float32[4]"
        assert theirs != ours
        assert isinstance(later, GroupAbortedError)
        assert later.failure.kind == "DivergenceError"


def sizes_differ(rank: int, n: int, path: str, board: BoardHandle) -> list[str]:
    said = []
    watch = Board.attach(board, rank)
    comm = make_comm(rank, watch, path)
    sizes = [2, 1] if rank == 0 else [3, 1]
    error = failure_of(lambda: comm.all_gatherv(torch.ones(sizes[rank]), sizes=sizes))[0]
    said.append(str(error))
    return said


def test_ranks_that_differ_about_sizes(store_path: str) -> None:
    (first,), (second,) = run_ranks(2, sizes_differ, store_path, NEW_BOARD)
    assert (
        first == "rank 1 issued all_gatherv of [3, 1] where this rank issued all_gatherv of [2, 1]"
    )
    assert (
        second == "rank 0 issued all_gatherv of [2, 1] where this rank issued all_gatherv of [3, 1]"
    )


def message_differs(rank: int, n: int, path: str, board: BoardHandle) -> str:
    comm = make_comm(rank, board, path)
    if rank == 0:
        comm.send(torch.ones(3), 1)
        return str(failure_of(lambda: comm.barrier())[0])
    return str(failure_of(lambda: comm.recv((3,), torch.int64, 0))[0])


def test_a_receiver_that_expects_something_else(store_path: str) -> None:
    sender, receiver = run_ranks(2, message_differs, store_path, NEW_BOARD)
    assert "rank 0 issued send of 12 bytes of torch.float32" in receiver
    assert "recv of 24 bytes of torch.int64" in receiver
    assert "DivergenceError" in sender


def last_is_late(
    rank: int, n: int, path: str, board: BoardHandle
) -> tuple[CoordinatorError, CoordinatorError | None]:
    comm = make_comm(rank, board, path)
    x = torch.ones(3)
    if rank == n - 1:
        wait_for_abort(comm.watch)
        return failure_of(lambda: comm.all_reduce(x))[0], None
    error = failure_of(lambda: comm.all_reduce(x, timeout=0.3))[0]
    return error, failure_of(lambda: comm.all_reduce(x))[0]


def test_a_deadline_names_the_late_and_ends_the_group(store_path: str) -> None:
    (error, later), (late, _) = run_ranks(2, last_is_late, store_path, NEW_BOARD)
    assert isinstance(error, GroupTimeoutError)
    assert [member.rank for member in error.waiting_for] == [1]
    assert error.timeout == 0.3
    for ended in (later, late):
        assert isinstance(ended, GroupAbortedError)
        assert "tp all_reduce: timed out after 0.3 s" in ended.failure.message


def root_runs_ahead(rank: int, n: int, path: str, board: BoardHandle) -> list[int]:
    comm = make_comm(rank, board, path)
    if rank == 0:
        x = torch.ones(3)
        error = failure_of(lambda: [comm.broadcast(x, timeout=1.0) for _ in range(10)])[0]
        assert isinstance(error, GroupTimeoutError)
        return [member.rank for member in error.waiting_for]
    wait_for_abort(comm.watch)
    return []


def test_a_root_that_nobody_follows_says_for_whom_it_waits(store_path: str) -> None:
    waited_for = run_ranks(3, root_runs_ahead, store_path, NEW_BOARD)[0]
    assert waited_for == [1, 2]


def last_aborts(rank: int, n: int, path: str, board: BoardHandle, verb: str) -> CoordinatorError:
    comm = make_comm(rank, board, path)
    x = torch.ones(100_000)
    if rank == n - 1:
        time.sleep(0.2)
        comm.abort(KeyError("the reason"))
        return failure_of(lambda: comm.all_reduce(x))[0]
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(x),
        "all_to_all": lambda: comm.all_to_all(x),
        "recv": lambda: comm.recv((3,), torch.float32, n - 1),
        "work": lambda: comm.all_reduce(x, async_op=True).wait(),
        "irecv": lambda: comm.irecv((3,), torch.float32, n - 1).wait(),
        "behind": lambda: [comm.barrier(async_op=True), comm.all_reduce(x)],
    }
    return failure_of(calls[verb])[0]


@pytest.mark.parametrize("verb", ["all_reduce", "all_to_all", "recv", "work", "irecv", "behind"])
def test_an_abort_frees_whoever_waits(verb: str, store_path: str) -> None:
    errors = run_ranks(2, last_aborts, store_path, NEW_BOARD, verb)
    for error in errors:
        assert isinstance(error, GroupAbortedError)
        assert (error.failure.rank, error.failure.kind) == (1, "KeyError")


def wrong_then_right(rank: int, n: int, path: str, board: BoardHandle) -> float:
    comm: Any = make_comm(rank, board, path)  # its types would refuse them
    x = torch.ones(4)
    wrong: list[tuple[type[Exception], Callable[[], object]]] = [
        (TypeError, lambda: comm.all_reduce("x")),
        (TypeError, lambda: comm.all_reduce(x, op=0)),
        (TypeError, lambda: comm.all_reduce(x, op=ReduceOp.BOR)),
        (TypeError, lambda: comm.all_reduce(x, out=torch.ones(4, dtype=torch.int32))),
        (ValueError, lambda: comm.all_reduce(x, out=torch.ones(5))),
        (ValueError, lambda: comm.all_reduce(x, timeout=-1)),
        (ValueError, lambda: comm.all_gather(x, dim=1)),
        (TypeError, lambda: comm.all_gather(x, dim="0")),
        (ValueError, lambda: comm.all_gather(x, out=torch.ones(4))),
        (ValueError, lambda: comm.reduce_scatter(torch.ones(5))),
        (ValueError, lambda: comm.broadcast(x, src=-1)),
        (TypeError, lambda: comm.broadcast(x, src=True)),
        (ValueError, lambda: comm.broadcast(x, src=2)),
        (ValueError, lambda: comm.all_reduce(x.to("meta"))),
    ]
    for kind, call in wrong:
        with pytest.raises(kind):
            call()
    return float(comm.all_reduce(x)[0])


def test_wrong_arguments_on_all_ranks_leave_the_group_whole(store_path: str) -> None:
    assert run_ranks(2, wrong_then_right, store_path, NEW_BOARD) == [2, 2]


def wait_again(rank: int, n: int, path: str, board: BoardHandle) -> list[float]:
    return wait_twice(make_comm(rank, board, path), path)


def test_a_work_can_be_waited_for_again_after_its_deadline(store_path: str) -> None:
    results = run_ranks(2, wait_again, store_path, NEW_BOARD)
    assert results == [[2, 2, 3, 3, 2, 2], [2, 2, 2, 2]]


def busy_caller(rank: int, n: int, path: str, board: BoardHandle) -> None:
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


def test_asynchronous_operations_go_on_while_the_caller_is_busy(store_path: str) -> None:
    run_ranks(2, busy_caller, store_path, NEW_BOARD)


def interrupted(rank: int, n: int, path: str, board: BoardHandle) -> str:
    comm = make_comm(rank, board, path)
    if rank == 1:
        wait_until_others_wait(comm)
        mine = shm_of(comm).board
        words, bell = mine.words, mine.eventcount_offset(0)
        until(lambda: words.load32(bell + EVENTCOUNT_WAITERS) > 0)
        os.kill(mine.member_status(0).pid, signal.SIGINT)
        wait_for_abort(comm.watch)
        return failure_of(lambda: comm.barrier())[0].failure.kind
    with pytest.raises(KeyboardInterrupt):
        comm.all_reduce(torch.ones(3))
    return failure_of(lambda: comm.barrier())[0].failure.kind


def test_an_interrupted_rank_ends_the_group(store_path: str) -> None:
    kinds = run_ranks(2, interrupted, store_path, NEW_BOARD)
    assert kinds == ["KeyboardInterrupt"] * 2


def closes(rank: int, n: int, path: str, board: BoardHandle) -> None:
    with make_comm(rank, board, path) as comm:
        comm.barrier()
        assert "open" in repr(comm)
    comm.close()
    with pytest.raises(GroupClosedError):
        comm.all_reduce(torch.ones(1))


def test_close_twice(store_path: str) -> None:
    run_ranks(2, closes, store_path, NEW_BOARD)


def never_comes(rank: int, n: int, path: str, board: BoardHandle) -> list[int]:
    if rank == 1:
        return []
    error = failure_of(lambda: make_comm(rank, board, path, timeout=0.3))[0]
    assert isinstance(error, GroupTimeoutError)
    return [member.rank for member in error.waiting_for]


def test_set_up_names_who_does_not_come(store_path: str) -> None:
    assert run_ranks(2, never_comes, store_path, NEW_BOARD)[0] == [1]


def begin_two(rank: int, n: int, board: BoardHandle, path: str) -> None:
    """As a call that begins two operations, when the first is given up before the second begins."""
    with make_comm(rank, board, path) as comm:
        backend, x = shm_of(comm), torch.ones(4)
        comm.barrier()
        if rank == 1:
            comm.abort("enough")
            return
        first, second = (
            Operation("all_reduce", x, x.clone(), True, 20.0, name="tp all_reduce", shape=x.shape)
            for _ in range(2)
        )

        def carry_out(operation: Operation) -> None:
            started = backend.start(operation)
            assert started is not None
            started.wait(operation.deadline)

        for operation in (first, second):
            with pytest.raises(GroupAbortedError, match="enough"):
                carry_out(operation)


def test_the_second_operation_of_a_call_is_told_why_the_first_was_given_up(tmp_path: Path) -> None:
    run_ranks(2, begin_two, NEW_BOARD, str(tmp_path / "handle"))


def made_after_a_death(rank: int, n: int, board: BoardHandle, path: str) -> None:
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


def test_who_dies_before_its_memory_is_opened_is_named(store_path: str) -> None:
    run_ranks(2, made_after_a_death, NEW_BOARD, store_path, may_die=[0])
