"""Ranks that issue different operations over shared memory, or in different calls."""

from __future__ import annotations

import zlib
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import Communicator, ReduceOp
from device_comm.call_number import OperationCounts
from device_comm.shm.signature import sign, with_chunk
from shm_broadcast import Board, BoardHandle, CoordinatorError, DivergenceError, GroupAbortedError
from tests.calls import in_call
from tests.device_comm.shm_ranks import make_comm, wait_until_others_wait
from tests.patience import failure_of
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


N = 2
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


def one_differs(
    rank: int, n: int, path: str, boards: list[BoardHandle]
) -> list[tuple[CoordinatorError, CoordinatorError]]:
    found = []
    for board, (how, call) in zip(boards, DIFFERENT.items(), strict=True):
        comm = make_comm(rank, board, f"{path}-{how}")
        x = torch.ones(4)
        comm.barrier()
        if rank == n - 1:
            wait_until_others_wait(comm)
            error = failure_of(partial(call, comm))[0]
        else:
            error = failure_of(partial(comm.all_reduce_, x))[0]
        assert torch.equal(x, torch.ones(4)), f"{how}: data was used"
        found.append((error, failure_of(comm.barrier)[0]))
    return found


def test_every_waiting_rank_names_the_one_that_differs(store_path: str) -> None:
    n = 3
    with ExitStack() as closing:
        boards = [closing.enter_context(Board.create(n, None)).handle() for _ in DIFFERENT]
        found = run_ranks(n, one_differs, store_path, boards)
    for rank, errors in enumerate(found):
        for how, (error, later) in zip(DIFFERENT, errors, strict=True):
            assert isinstance(error, DivergenceError), how
            assert error.rank == (0 if rank == n - 1 else n - 1)
            ours, theirs = error.ours, error.theirs
            if rank == n - 1:
                ours, theirs = theirs, ours
            assert ours == "all_reduce SUM float32[4]"
            assert theirs != ours, how
            assert isinstance(later, GroupAbortedError), how
            assert later.failure.kind == "DivergenceError"


def exchange(comm: Communicator, sizes: list[int] | None) -> object:
    return comm.all_to_all(torch.ones(2, 3), input_sizes=sizes, output_sizes=sizes)


def send_and_meet(comm: Communicator) -> None:
    comm.send(torch.ones(3), 1)
    comm.barrier()


PAIRS: dict[str, tuple[list[Callable[[Communicator], object]], list[str]]] = {
    "sizes": (
        [
            lambda comm: comm.all_gatherv(torch.ones(2), sizes=[2, 1]),
            lambda comm: comm.all_gatherv(torch.ones(1), sizes=[3, 1]),
        ],
        [
            "rank 1 issued all_gatherv of [3, 1] where this rank issued all_gatherv of [2, 1]",
            "rank 0 issued all_gatherv of [2, 1] where this rank issued all_gatherv of [3, 1]",
        ],
    ),
    "sizes or none": (
        [lambda comm: exchange(comm, None), lambda comm: exchange(comm, [1, 1])],
        ["all_to_all float32[2, 3]"] * 2,
    ),
    "message": (
        [send_and_meet, lambda comm: comm.recv((3,), torch.int64, 0)],
        [
            "DivergenceError",
            "rank 0 issued send of 12 bytes of torch.float32 where this rank issued tp recv of 24 "
            "bytes of torch.int64",
        ],
    ),
}
"""What ranks 0 and 1 call, and what their errors include."""


def differ(rank: int, n: int, path: str, board: BoardHandle, how: str) -> str:
    comm = make_comm(rank, board, path)
    return str(failure_of(lambda: PAIRS[how][0][rank](comm))[0])


@pytest.mark.parametrize("how", PAIRS)
def test_both_operations_are_named(how: str, store_path: str) -> None:
    found = run_ranks(N, differ, store_path, NEW_BOARD, how)
    for text, included in zip(found, PAIRS[how][1], strict=True):
        assert included in text


# --- The fingerprint of a call -------------------------------------------------------------------

Taken = tuple[bytes, tuple[int, ...]]


def _verbs(comm: Communicator) -> None:
    x = torch.ones(4)
    comm.all_reduce(x)
    comm.all_reduce(x, op=ReduceOp.MAX, async_op=True).wait()
    comm.all_gather(x)
    comm.reduce_scatter(x)
    comm.all_to_all(x)
    comm.broadcast(x, src=1)
    comm.reduce(x, dst=1)
    comm.gather(x, dst=0)
    comm.scatter(x if comm.rank == 0 else None, src=0, out=torch.ones(2))
    comm.all_gatherv(x, sizes=[4, 4])
    comm.reduce_scatterv(x, dim=0, sizes=[1, 3])
    comm.barrier()


def _begun(rank: int, _n: int, handle: BoardHandle, path: str, fast: bool) -> Taken:
    with make_comm(rank, handle, path, fast_path=fast) as comm:
        _verbs(comm)
        assert comm.begun.take() == (b"", ())
        with in_call(5):
            _verbs(comm)
        return comm.begun.take()


def test_every_collective_counts_once_each_way(tmp_path: Path) -> None:
    """The fast path and the slow path make the same fingerprint."""
    expected = OperationCounts(N)
    shape, dtype = (4,), torch.float32
    with in_call(5):
        expected.add(sign("all_reduce", dtype, shape, ReduceOp.SUM))
        expected.add(sign("all_reduce", dtype, shape, ReduceOp.MAX))
        expected.add(sign("all_gather", dtype, shape))
        expected.add(sign("reduce_scatter", dtype, shape, ReduceOp.SUM))
        expected.add(sign("all_to_all", dtype, shape))
        expected.add(sign("broadcast", dtype, shape, None, 1))
        expected.add(sign("reduce", dtype, shape, ReduceOp.SUM, 1))
        expected.add(sign("gather", dtype, shape, None, 0))
        expected.add(sign("scatter", dtype, (2,), None, 0))
        sizes = zlib.crc32(b"[4, 4]"), zlib.crc32(b"[1, 3]")
        expected.add(with_chunk(sign("all_gatherv", dtype, (-1,)), sizes[0]))
        expected.add(with_chunk(sign("reduce_scatterv", dtype, (-1,), ReduceOp.SUM), sizes[1]))
        expected.add(sign("barrier"))
    wanted = expected.take()
    for fast in (True, False):
        path = str(tmp_path / f"comm {fast}")
        assert run_ranks(N, _begun, NEW_BOARD, path, fast) == [wanted, wanted]


def _uneven(comm: Communicator) -> None:
    """All that ranks may give differently, or in another form, or know only in part."""
    x, rank = torch.ones(2 + comm.rank, 3), comm.rank
    comm.all_gatherv(x, sizes=[2, 3])
    comm.all_gatherv([x, x.to(torch.int32)], sizes=[2, 3])
    comm.all_gatherv([])
    comm.reduce_scatterv(torch.ones(5), dim=0, sizes=[2, 3])
    gives, takes = ([1, 3], [1, 2]) if rank == 0 else ([2, 1], [3, 1])
    comm.all_to_all(torch.ones(sum(gives)), input_sizes=gives, output_sizes=takes)
    strided = torch.ones(3, 4).t() if rank else torch.ones(4, 3)
    comm.all_reduce(strided)
    comm.all_gather(strided, dim=rank - 2 if rank == 0 else 0)
    comm.all_reduce(torch.ones(()), async_op=bool(rank)).wait() if rank else comm.all_reduce(
        torch.ones(())
    )
    comm.broadcast_(torch.ones(4), src=1)
    comm.reduce_(torch.ones(4), dst=0)
    comm.gather_(torch.ones(4 if rank == 0 else 2), dst=0)
    comm.scatter_(torch.ones(4 if rank == 0 else 2), src=0)
    comm.all_reduce(torch.ones(1, 1, 1, 2, 2, 2, 2))
    comm.all_reduce(torch.ones(0, 3))


def _begun_unevenly(
    rank: int, _n: int, handle: BoardHandle, path: str, fast: tuple[bool, bool]
) -> Taken:
    with make_comm(rank, handle, path, fast_path=fast[rank]) as comm, in_call(5):
        _uneven(comm)
        return comm.begun.take()


@pytest.mark.parametrize("fast", [(True, True), (True, False), (False, False)])
def test_permitted_differences_change_no_fingerprint(
    tmp_path: Path, fast: tuple[bool, bool]
) -> None:
    one, other = run_ranks(N, _begun_unevenly, NEW_BOARD, str(tmp_path / "comm"), fast)
    assert one == other != (b"", ())


def _one(comm: Communicator, verb: str) -> object:
    x = torch.full((4,), 1.0 + comm.rank)
    if verb == "recv":
        if comm.rank == 0:
            return comm.send(x, 1)
        return comm.recv(out=torch.zeros(4), src=0)
    if verb == "barrier":
        return comm.barrier()
    return getattr(comm, verb)(x)


def _skip(rank: int, _n: int, handle: BoardHandle, path: str, verb: str, fast: bool) -> str:
    """Rank 1 leaves the operation out of call 3."""
    with make_comm(rank, handle, path, fast_path=fast) as comm:
        try:
            for number in range(1, 7):
                if (rank, number) != (1, 3):
                    with in_call(number):
                        _one(comm, verb)
            comm.flush()
        except (DivergenceError, GroupAbortedError) as error:
            return str(error)
    return "went on"


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("verb", ["all_reduce", "broadcast", "recv", "barrier"])
def test_ranks_in_different_calls_do_not_meet(tmp_path: Path, verb: str, fast: bool) -> None:
    told = run_ranks(N, _skip, NEW_BOARD, str(tmp_path / "comm"), verb, fast)
    blamed = told[1] if verb == "recv" else told[0]
    assert "in call 3" in blamed
    assert "in call 4" in blamed
