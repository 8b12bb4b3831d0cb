"""A peer that dies, aborts, is late or has closed, over shared memory and over gloo."""

from __future__ import annotations

import random
import threading
import time
from contextlib import ExitStack
from functools import partial
from tempfile import mkdtemp
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from device_comm import Communicator, ReduceOp, TorchBackend
from shm_broadcast import (
    Board,
    BoardHandle,
    GroupAbortedError,
    GroupClosedError,
    GroupTimeoutError,
    PeerLostError,
)
from shm_broadcast.errors import TransportError
from tests.device_comm.meeting import SOON, die, meet, moment_of_death
from tests.device_comm.shm_ranks import make_comm, on_ranks
from tests.patience import NAMED_WITHIN, failure_of, quickest
from tests.ranks import NEW_BOARD, init_gloo, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shm_broadcast import CoordinatorError

BACKENDS = pytest.mark.parametrize("backend", ["shm", "gloo"])
PAUSE = 0.05
"""Seconds in which the others most probably begin to wait; none of the results depends on it."""

CALLS: dict[str, Callable[[Communicator, torch.Tensor, float | None], object]] = {
    "all_reduce": lambda comm, x, limit: comm.all_reduce(x, timeout=limit),
    "product": lambda comm, x, limit: comm.all_reduce(
        x.to(torch.complex64), op=ReduceOp.PRODUCT, timeout=limit
    ),
    "all_gather": lambda comm, x, limit: comm.all_gather(x, timeout=limit),
    "all_gatherv": lambda comm, x, limit: comm.all_gatherv(x, timeout=limit),
    "reduce_scatter": lambda comm, x, limit: comm.reduce_scatter(x, dim=0, timeout=limit),
    "all_to_all": lambda comm, x, limit: comm.all_to_all(x, timeout=limit),
    "recv": lambda comm, x, limit: comm.recv((5,), x.dtype, comm.world_size - 1, timeout=limit),
    "barrier": lambda comm, _, limit: comm.barrier(timeout=limit),
    "work": lambda comm, x, limit: comm.all_reduce(x, async_op=True, timeout=limit).wait(),
    "irecv": lambda comm, x, limit: comm.irecv((5,), x.dtype, comm.world_size - 1).wait(limit),
    "behind": lambda comm, x, _: [comm.barrier(async_op=True), comm.all_reduce(x)],
}
"""Calls that need every peer, or the last one."""


def make(
    backend: str, rank: int, n: int, path: str, board: BoardHandle | Board | None
) -> Communicator:
    if backend == "shm":
        assert board is not None
        comm = make_comm(rank, board, path)
    else:
        if not dist.is_initialized():
            init_gloo(rank, n, path)
        watch = Board.attach(board, rank) if isinstance(board, BoardHandle) else board
        comm = Communicator(TorchBackend(dist.new_group(), "cpu", watch, name="tp", timeout=20))
    comm.barrier()
    meet(rank, n, path)
    return comm


def start(comm: Communicator, verb: str, limit: float | None = None) -> object:
    return CALLS[verb](comm, torch.ones(comm.world_size, 100_000), limit)


# --- A peer dies ----------------------------------------------------------------------------------


def go_on(comm: Communicator, dice: random.Random) -> None:
    inputs = [torch.ones(size) for size in (10, 3_000, 100_000, 2_000_000)]
    while True:
        x, root = dice.choice(inputs), dice.randrange(comm.world_size)
        verb = dice.choice(["all_reduce", "async", "all_gather", "broadcast", "reduce"])
        if verb == "async":
            comm.all_reduce(x, async_op=True).wait()
        elif verb == "broadcast":
            comm.broadcast(x, src=root)
        elif verb == "reduce":
            comm.reduce(x, dst=root)
        else:
            getattr(comm, verb)(x)


Death = tuple["CoordinatorError", "CoordinatorError", float]
"""The error of a survivor, that of its next call, and the seconds from the death to the first."""


def one_dies(
    rank: int, n: int, path: str, board: BoardHandle | None, backend: str, how: str | int
) -> Death:
    """The last rank dies while its peers are in a verb, or some rank amid random collectives."""
    comm = make(backend, rank, n, path, board)
    dice = random.Random(how)
    victim = victim_of(n, how)
    if isinstance(how, str):
        if rank == victim:
            time.sleep(PAUSE)
            die(path)
        error, raised = failure_of(lambda: start(comm, how))
    else:
        if rank == victim:
            threading.Timer(dice.uniform(0.0, 0.15), die, (path,)).start()
        error, raised = failure_of(lambda: go_on(comm, random.Random(how)))
    later = failure_of(lambda: comm.all_reduce(torch.ones(1)))[0]
    return error, later, raised - moment_of_death(path)


def victim_of(n: int, how: str | int) -> int:
    return how % n if isinstance(how, int) else n - 1


def survivors_of(
    n: int, folder: Path, board: BoardHandle | None, backend: str, how: str | int
) -> list[Death]:
    path = mkdtemp(dir=folder) + "/store"
    dies = [victim_of(n, how)]
    found = run_ranks(n, one_dies, path, board, backend, how, may_die=dies)
    return [each for each in found if each is not None]


GLOO_CALLS = ["all_reduce", "all_gatherv", "recv", "barrier", "work", "irecv"]


@pytest.mark.parametrize(
    ("backend", "n", "how"),
    [
        *(("shm", n, seed) for seed, n in enumerate((2, 4, 4))),
        *(("gloo", 3, verb) for verb in GLOO_CALLS),
    ],
)
def test_a_killed_rank_is_named_within_a_second(
    backend: str, n: int, how: str | int, tmp_path: Path
) -> None:
    victim = victim_of(n, how)

    def attempt() -> float:
        survivors = survivors_of(n, tmp_path, NEW_BOARD, backend, how)
        assert len(survivors) == n - 1
        for error, later, _ in survivors:
            if isinstance(error, PeerLostError):
                assert error.rank == victim
            else:
                assert isinstance(error, GroupAbortedError)
                assert error.failure.kind == "PeerLostError"
                assert error.failure.culprit == victim or f"rank {victim}" in error.failure.message
            assert isinstance(later, GroupAbortedError)
            assert f"lost rank {victim}" in later.failure.message
        return max(seconds for *_, seconds in survivors)

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


def test_without_a_board_the_broken_connection_names_the_rank(tmp_path: Path) -> None:
    def attempt() -> float:
        ((error, later, seconds),) = survivors_of(2, tmp_path, None, "gloo", "all_reduce")
        assert isinstance(error, TransportError)
        assert error.rank == 1
        assert isinstance(later, GroupAbortedError)
        return seconds

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


# --- A peer aborts --------------------------------------------------------------------------------


def last_aborts(
    rank: int, n: int, path: str, boards: list[BoardHandle], backend: str
) -> dict[str, tuple[CoordinatorError, float]]:
    found = {}
    for board, verb in zip(boards, CALLS, strict=True):
        comm = make(backend, rank, n, f"{path}-{verb}", board)
        if rank == n - 1:
            time.sleep(PAUSE)
            comm.abort(KeyError("the reason"))
            found[verb] = failure_of(partial(start, comm, "all_reduce"))
        else:
            found[verb] = failure_of(partial(start, comm, verb))
    return found


@BACKENDS
def test_an_abort_frees_those_who_wait_within_a_second(backend: str, tmp_path: Path) -> None:
    def attempt() -> float:
        with ExitStack() as closing:
            boards = [closing.enter_context(Board.create(2, None)).handle() for _ in CALLS]
            path = mkdtemp(dir=tmp_path) + "/store"
            waiting, aborting = run_ranks(2, last_aborts, path, boards, backend)
        for verb in CALLS:
            for error, _ in (waiting[verb], aborting[verb]):
                assert isinstance(error, GroupAbortedError), verb
                assert (error.failure.rank, error.failure.kind) == (1, "KeyError"), verb
                assert "the reason" in error.failure.message
        return max(waiting[verb][1] - aborting[verb][1] for verb in CALLS)

    assert quickest(attempt, NAMED_WITHIN) < NAMED_WITHIN


# --- A peer is late -------------------------------------------------------------------------------


def last_is_late(
    rank: int, n: int, path: str, board: BoardHandle | None, backend: str, verb: str
) -> tuple[CoordinatorError, CoordinatorError | None, float]:
    comm = make(backend, rank, n, path, board)
    x, over = torch.ones(3), f"{path}.over"
    if rank == n - 1:
        meet(rank, n, over)
        return failure_of(lambda: comm.all_reduce(x))[0], None, 0.0
    began = time.monotonic()
    error, raised = failure_of(lambda: start(comm, verb, 0.3))
    meet(rank, n, over)
    return error, failure_of(lambda: comm.all_reduce(x))[0], raised - began


@pytest.mark.parametrize("verb", ["all_reduce", "recv"])
@BACKENDS
def test_a_deadline_names_the_late_and_ends_the_group(
    backend: str, verb: str, store_path: str
) -> None:
    (error, later, seconds), (late, *_) = run_ranks(
        2, last_is_late, store_path, NEW_BOARD, backend, verb
    )
    assert isinstance(error, GroupTimeoutError)
    assert [member.rank for member in error.waiting_for] == [1]
    assert error.timeout == 0.3
    assert 0.29 < seconds < SOON
    for ended in (later, late):
        assert isinstance(ended, GroupAbortedError)
        assert ended.failure.rank == 0
        assert f"tp {verb}: timed out after 0.3 s" in ended.failure.message


def test_a_deadline_without_a_board_breaks_the_connections(store_path: str) -> None:
    (error, later, seconds), (late, *_) = run_ranks(
        2, last_is_late, store_path, None, "gloo", "all_reduce"
    )
    assert isinstance(error, GroupTimeoutError)
    assert isinstance(later, GroupAbortedError)
    assert 0.29 < seconds < SOON
    assert isinstance(late, TransportError)
    assert late.rank == 0


def wait_twice(rank: int, n: int, path: str, board: BoardHandle, backend: str) -> list[float]:
    """Wait in vain for a late peer, the second of two ranks, and then again; what was received."""
    comm = make(backend, rank, n, path, board)
    late = f"{path}.late"
    if rank == 1:
        meet(1, 2, late)
    works = [comm.all_reduce(torch.ones(2), async_op=True)]
    if rank == 0:
        works.append(comm.irecv((2,), torch.float32, 1))
        for work in works:
            for seconds in (0, 0.05):
                with pytest.raises(GroupTimeoutError):
                    work.wait(seconds)
            assert not work.is_completed()
        meet(0, 2, late)
    else:
        comm.send(torch.full((2,), 3.0), 0)
    results = [work.wait() for work in works]
    results.append(comm.all_reduce(torch.ones(2)))
    return [float(value) for result in results for value in result]


@BACKENDS
def test_a_work_can_be_waited_for_again_after_its_deadline(backend: str, store_path: str) -> None:
    results = run_ranks(2, wait_twice, store_path, NEW_BOARD, backend)
    assert results == [[2, 2, 3, 3, 2, 2], [2, 2, 2, 2]]


# --- A group is closed ----------------------------------------------------------------------------


@BACKENDS
@on_ranks(2)
def test_a_group_may_be_closed_twice(
    rank: int, n: int, path: str, board: BoardHandle, backend: str
) -> None:
    with make(backend, rank, n, path, board) as comm:
        assert "open" in repr(comm)
    comm.close()
    assert comm.closed
    assert "closed" in repr(comm)
    with pytest.raises(GroupClosedError):
        comm.all_reduce(torch.ones(1))
