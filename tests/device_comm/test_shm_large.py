"""Operations that move much: they end at deadlines and aborts, and handlers run, meanwhile."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
import torch

from shm_broadcast import GroupAbortedError, GroupTimeoutError
from tests.device_comm.shm_ranks import make_comm, shm_of
from tests.patience import failure_of
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from device_comm import Communicator
    from shm_broadcast import BoardHandle

LARGE = 64 << 20
"""Elements of a tensor of 256 MiB: to move it takes more than 10 ms on any machine."""

SHORT = 0.001
"""Seconds that are over before it is moved."""

VERBS = ["all_reduce", "broadcast", "recv"]


def move(comm: Communicator, verb: str, x: torch.Tensor, timeout: float) -> type[Exception]:
    """The error of a call that moves ``x``; rank 0, which receives, gives up after ``timeout``."""
    allowed = timeout if comm.rank == 0 else 60.0

    def call() -> None:
        if verb == "all_reduce":
            comm.all_reduce(x, out=x, timeout=allowed)
        elif verb == "broadcast":
            comm.broadcast(x, src=1, out=x, timeout=allowed)
        elif comm.rank == 0:
            comm.recv(out=x, src=1, timeout=allowed)
        else:
            comm.send(x, dst=0, timeout=allowed)
            comm.barrier()  # a sender needs no receiver: it may have succeeded

    return type(failure_of(call)[0])


def prepare(comm: Communicator) -> torch.Tensor:
    """The tensor to move; a first message has made the pipe."""
    x = torch.ones(LARGE)
    if comm.rank == 0:
        comm.recv((1,), torch.float32, src=1)
    else:
        comm.send(torch.ones(1), dst=0)
    comm.barrier()
    return x


def too_late(rank: int, n: int, path: str, board: BoardHandle, verb: str) -> type[Exception]:
    with make_comm(rank, board, path) as comm:
        return move(comm, verb, prepare(comm), SHORT)


@pytest.mark.parametrize("verb", VERBS)
def test_a_deadline_that_passes_while_much_is_moved_ends_the_group(
    verb: str, store_path: str
) -> None:
    assert run_ranks(2, too_late, store_path, NEW_BOARD, verb) == [
        GroupTimeoutError,
        GroupAbortedError,
    ]


def aborted(
    rank: int, n: int, path: str, board: BoardHandle, verb: str
) -> tuple[type[Exception], list[bool]]:
    """Rank 0's handler aborts the group; whether its collective was under way then."""
    with make_comm(rank, board, path) as comm:
        native = shm_of(comm).fast_path._native
        under_way: list[bool] = []

        def abort(*_: object) -> None:
            under_way.append(native.under_way)
            comm.abort("enough")

        x = prepare(comm)
        if rank == 0:
            signal.signal(signal.SIGALRM, abort)
            signal.setitimer(signal.ITIMER_REAL, SHORT)
        return move(comm, verb, x, 60.0), under_way


@pytest.mark.parametrize("verb", VERBS)
def test_handlers_run_and_aborts_are_seen_while_much_is_moved(verb: str, store_path: str) -> None:
    (first, under_way), (second, _) = run_ranks(2, aborted, store_path, NEW_BOARD, verb)
    assert first is second is GroupAbortedError
    assert under_way == [verb != "recv"]


def in_the_background(rank: int, n: int, path: str, board: BoardHandle) -> None:
    with make_comm(rank, board, path) as comm:
        work = comm.all_reduce(prepare(comm), async_op=True)
        with pytest.raises(GroupTimeoutError):
            work.wait(SHORT)
        total = work.wait(60)
        assert total.min() == total.max() == n


def test_a_wait_for_much_in_the_background_ends_at_its_deadline(store_path: str) -> None:
    run_ranks(2, in_the_background, store_path, NEW_BOARD)
