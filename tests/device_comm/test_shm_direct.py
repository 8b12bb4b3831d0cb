"""The fast path through the C extension, with other ranks on the slow path."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from device_comm import ReduceOp
from device_comm.shm import shm_backend
from device_comm.shm.direct import FastPathCalls
from shm_broadcast.errors import GroupAbortedError, GroupClosedError, PeerLostError
from shm_broadcast.ring.buffers import RECYCLED_BYTES
from tests.device_comm.meeting import wait_for_abort
from tests.device_comm.oracle import same
from tests.device_comm.shm_ranks import make_comm, on_comms, on_ranks, shm_of
from tests.patience import until
from tests.ranks import NEW_BOARD, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from device_comm import Communicator
    from shm_broadcast import BoardHandle

N = 3
ROOT = 1
INPUTS = [torch.arange(1.0, 7.0).view(1, 6) * 10**rank for rank in range(N)]
"""Rank r's: 1 to 6, times ten to the power of r; six columns to gather, or to cut in three."""

TOTAL = torch.tensor([[111.0, 222.0, 333.0, 444.0, 555.0, 666.0]])
ROW = torch.cat(INPUTS, 1)
EXPECTED: dict[str, list[torch.Tensor | None]] = {
    "all_reduce": [TOTAL] * N,
    "all_gather": [ROW] * N,
    "reduce_scatter": [TOTAL[:, 0:2], TOTAL[:, 2:4], TOTAL[:, 4:6]],
    "all_to_all": [
        torch.tensor([[1.0, 2.0, 10.0, 20.0, 100.0, 200.0]]),
        torch.tensor([[3.0, 4.0, 30.0, 40.0, 300.0, 400.0]]),
        torch.tensor([[5.0, 6.0, 50.0, 60.0, 500.0, 600.0]]),
    ],
    "broadcast": [INPUTS[ROOT]] * N,
    "reduce": [None, TOTAL, None],
    "gather": [None, ROW, None],
    "scatter": [
        torch.tensor([[10.0, 20.0]]),
        torch.tensor([[30.0, 40.0]]),
        torch.tensor([[50.0, 60.0]]),
    ],
    "barrier": [None] * N,
}


def calls(comm: Communicator, x: torch.Tensor | None = None) -> dict[str, Callable[..., Any]]:
    x = INPUTS[comm.rank].clone() if x is None else x
    root = comm.rank == ROOT
    return {
        "all_reduce": lambda **form: comm.all_reduce(x, **form),
        "all_gather": lambda **form: comm.all_gather(x, **form),
        "reduce_scatter": lambda **form: comm.reduce_scatter(x, **form),
        "all_to_all": lambda **form: comm.all_to_all(x, dim=1, **form),
        "broadcast": lambda **form: comm.broadcast(x, src=ROOT, **form),
        "reduce": lambda **form: comm.reduce(x, dst=ROOT, **form),
        "gather": lambda **form: comm.gather(x, dst=ROOT, **form),
        "scatter": lambda **form: comm.scatter(
            x if root else None, src=ROOT, **({} if root else {"out": torch.empty(1, 2)}) | form
        ),
        "barrier": lambda **form: comm.barrier(**form),
    }


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("this call took the slow path")


def only_fast(comm: Communicator) -> None:
    comm.runner.run = refuse
    shm_of(comm).fast_path._go_on = refuse


@pytest.mark.parametrize(("slow", "late"), [(3, 0), (0, 1), (2, 2)])
@on_ranks(N)
def test_the_fast_path_carries_every_verb_and_meets_the_slow_one(
    rank: int, n: int, path: str, board: BoardHandle, slow: int, late: int
) -> None:
    """All but ``slow`` take the fast path, rank 1 in the background; ``late`` begins last."""
    with make_comm(rank, board, path, fast_path=rank != slow) as comm:
        if rank != slow:
            only_fast(comm)

        def answer(verb: Callable[..., Any], *args: Any, **form: Any) -> Any:
            if rank == late:
                time.sleep(0.002)
            return verb(*args, async_op=True, **form).wait() if rank == 1 else verb(*args, **form)

        for verb, call in calls(comm).items():
            expected = EXPECTED[verb][rank]
            for out in (None, None if expected is None else torch.empty_like(expected)):
                found = answer(call, **({} if out is None else {"out": out}))
                if expected is None:
                    assert found is None, verb
                else:
                    same(found, expected)
                    assert out is None or found is out, verb
        _out_of_the_ordinary(comm, answer)
        _complex_numbers(comm, answer, slow)


def _out_of_the_ordinary(comm: Communicator, answer: Callable[..., Any]) -> None:
    """Sums of columns, of a transposed tensor, and of one that torch negates lazily."""
    square = torch.arange(9.0).view(3, 3)
    for x in (square[:, 1], square.t(), torch.complex(square, square).conj().imag):
        assert not x.is_contiguous()
        for out in (None, torch.empty(x.shape)):
            before = x.clone()
            total = answer(comm.all_reduce, x, out=out, timeout=60 if out is None else 60.0)
            same(total, 3 * before)
            assert total.is_contiguous()
            assert out is None or total is out
            assert torch.equal(x, before)
            at_root = answer(comm.reduce, x, dst=ROOT)
            assert at_root is None if comm.rank != ROOT else torch.equal(at_root, total)


def _complex_numbers(comm: Communicator, answer: Callable[..., Any], lazy: int) -> None:
    """Rank ``lazy`` conjugates lazily, which takes the slow path."""
    for dtype in (torch.complex64, torch.complex128):
        base = torch.tensor([1 + 2j, 3 - 4j, -5j], dtype=dtype)
        xs = [(base * (r + 1)).conj() if r == lazy else base * (r + 1) for r in range(N)]
        same(answer(comm.all_reduce, xs[comm.rank]), sum(xs[1:], xs[0]).resolve_conj())
        same(answer(comm.all_gather, xs[comm.rank]), torch.cat(xs))
        product = answer(comm.all_reduce, xs[comm.rank], op=ReduceOp.PRODUCT)
        same(product, (xs[0] * xs[1] * xs[2]).resolve_conj())


@on_ranks(2)
def test_background_calls_take_the_fast_path(
    rank: int, n: int, path: str, board: BoardHandle
) -> None:
    """Rank 1 begins on the fast path, and does nothing until rank 0 has begun and all is done."""
    with make_comm(rank, board, path) as comm:
        x, parts = torch.full((300,), rank + 1.0), torch.arange(4.0) + 10 * rank
        other, received = 1 - rank, torch.zeros(300)
        comm.send(x) if rank else comm.recv(out=received, src=1)
        comm.recv(out=received, src=0) if rank else comm.send(x)
        if rank == 0:
            until(Path(f"{path}.begun").exists)
        else:
            comm.runner.run = refuse
        works = [comm.irecv(out=received, src=other), comm.all_reduce(x, async_op=True)]
        if rank == 1:
            assert not any(work.is_completed() for work in works)
            Path(f"{path}.begun").touch()
        sent = comm.isend(x, other)
        until(lambda: works[0].is_completed() and works[1].is_completed())
        if rank == 1:
            recorded = shm_of(comm).board.recorded(1)
            assert [(each.verb, each.outcome) for each in recorded[-3:]] == [
                *(("recv", "done"), ("all_reduce", "done"), ("send", "done"))
            ]
        assert works[0].wait() is received
        assert sent.wait() is None
        same(received, torch.full((300,), other + 1.0))
        same(works[1].wait(), torch.full((300,), 3.0))
        same(
            comm.all_gather(parts, async_op=True).wait(),
            torch.tensor([0, 1, 2, 3, 10, 11, 12, 13.0]),
        )
        comm.barrier()


@on_comms(2, may_die=[1])
def test_a_background_call_names_the_peer_that_is_lost(comm: Communicator) -> None:
    rank = comm.rank
    comm.barrier()
    if rank == 1:
        os._exit(0)
    work = comm.all_reduce(torch.ones(3), async_op=True)
    for _ in range(2):
        with pytest.raises(PeerLostError, match="rank 1"):
            work.wait()
    assert shm_of(comm).board.recorded(0)[-1].outcome == "peer lost"
    with pytest.raises(GroupAbortedError, match="rank 1"):
        comm.barrier()


@on_comms(2)
def test_the_fast_path_carries_messages_of_every_size(comm: Communicator) -> None:
    """Rank 0 sends to rank 1, on the fast path where there is room, or all of the message."""
    rank = comm.rank
    if rank == 0:
        comm.send(torch.tensor([0.0]))
    else:
        assert comm.recv((1,), torch.float32) == 0
    slow_path, go_on = comm.runner.run, shm_of(comm).fast_path._go_on
    for count in (1, 1_000, 16_000, 1_000_000):
        for late in range(2):
            x = torch.arange(count, dtype=torch.float32) + late
            comm.barrier()
            if count <= 16_000 and rank <= late:
                only_fast(comm)
            if rank == late == 0:
                time.sleep(0.01)
            if rank == 0:
                comm.send(x)
                x.zero_()
            if late:
                comm.barrier()  # all of the message is there
            if rank == 1 and late:
                same(comm.recv(x.shape, torch.float32), x)
            elif rank == 1:
                out = torch.zeros(count)
                assert comm.recv(out=out, src=0) is out
                same(out, x)
            comm.runner.run, shm_of(comm).fast_path._go_on = slow_path, go_on
    comm.barrier()


def lazily(x: torch.Tensor) -> torch.Tensor:
    negated = torch._neg_view(x.neg())
    assert negated.is_contiguous()
    assert negated.is_neg()
    return negated


@on_ranks(N)
def test_a_tensor_that_torch_negates_lazily_keeps_its_sign(
    rank: int, n: int, path: str, board: BoardHandle
) -> None:
    """Every verb, with inputs and outputs whose memory holds their negatives."""
    with make_comm(rank, board, path) as comm:
        plain = calls(comm)
        for verb, call in calls(comm, lazily(INPUTS[rank])).items():
            expected = EXPECTED[verb][rank]
            if expected is None:
                assert call() is None
                assert plain[verb]() is None
                continue
            same(call(), expected)
            out = lazily(torch.zeros_like(expected))
            assert plain[verb](out=out) is out
            same(out, expected)
        x = lazily(INPUTS[rank])
        assert comm.all_reduce(x, out=x) is x
        same(x, TOTAL)
        x = torch.arange(1.0, 4.0)
        for _ in range(2):  # the first message makes the pipe, the second takes the fast path
            if rank == 0:
                comm.send(lazily(x), dst=1)
            elif rank == 1:
                out = lazily(torch.zeros(3))
                assert comm.recv(out=out, src=0) is out
                same(out, x)
        comm.barrier()  # a receiver maps the sender's memory while that lives


def results(rank: int, n: int, path: str, board: BoardHandle) -> None:
    with make_comm(rank, board, path) as comm:
        only_fast(comm)
        kept = [comm.all_reduce(torch.full((5, 7), float(i))) for i in range(200)]
        assert len({x.data_ptr() for x in kept}) == 200
        for i, x in enumerate(kept):
            same(x, torch.full((5, 7), 2.0 * i))
            assert x.data_ptr() % 64 == 0
        view = comm.all_reduce(torch.ones(4, 3))[1]
        x = torch.ones(64 << 10, dtype=torch.bfloat16)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(500):
            comm.all_reduce(x)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        same(view, torch.full((3,), 2.0))
        assert grown < 8_000, "500 results of 128 KiB would be 64,000 KiB"


def test_results_live_as_long_as_they_are_held(store_path: str) -> None:
    run_ranks(2, results, store_path, NEW_BOARD)


@on_comms(2)
def test_a_result_without_memory_has_not_begun(comm: Communicator) -> None:
    """Rank 0 finds no memory for its results, and tries again; the other one waits meanwhile."""
    rank = comm.rank

    def fail(*_: object) -> torch.Tensor:
        raise MemoryError

    x = torch.full((RECYCLED_BYTES // 4,), rank + 1.0)
    for _ in range(2):
        if rank == 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(shm_backend, "_recycled", fail)
                for verb in (comm.all_reduce, comm.gather, comm.broadcast):
                    with pytest.raises(MemoryError):
                        verb(x)
        same(comm.all_reduce(x), torch.full_like(x, 3.0))
        row = comm.gather(x)
        assert rank == 1 or torch.equal(row, torch.tensor([1.0, 2.0]).repeat_interleave(len(x)))


def interrupt_when_it_returns(comm: Communicator, verb: str, patch: pytest.MonkeyPatch) -> None:
    """Raise as soon as the extension returns from ``verb``, as a signal handler may."""
    shortcut = shm_of(comm).fast_path
    assert isinstance(shortcut, FastPathCalls)
    native, call = shortcut._native, getattr(shortcut._native, verb)

    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

    def interrupted(*args: Any) -> None:
        call(*args)
        raise KeyboardInterrupt

    setattr(Interrupted, verb, staticmethod(interrupted))
    patch.setattr(shortcut, "_native", Interrupted())
    patch.setitem(shortcut._calls, verb, interrupted)


@pytest.mark.parametrize("message", [False, True])
@on_comms(2)
def test_an_interrupt_after_the_begin_ends_the_group(comm: Communicator, message: bool) -> None:
    """Rank 0 is interrupted when it has begun, and does not come to wait for rank 1."""
    x = torch.ones(RECYCLED_BYTES)
    comm.recv(out=x[:5]) if comm.rank else comm.send(x[:5])
    comm.barrier()
    if comm.rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            interrupt_when_it_returns(comm, "send" if message else "all_reduce", patch)
            with pytest.raises(KeyboardInterrupt):
                comm.send(x) if message else comm.all_reduce(x)
    wait_for_abort(comm.watch)
    with pytest.raises(GroupAbortedError, match="KeyboardInterrupt"):
        comm.all_reduce(x)


@on_comms(2)
def test_an_interrupt_when_all_is_done_ends_nothing(comm: Communicator) -> None:
    """Rank 0 is interrupted when it has sent all, or nothing."""
    x = torch.ones(5)
    if comm.rank == 1:
        for _ in range(3):
            comm.recv(out=x)
        comm.barrier()
        return
    comm.send(x)
    with pytest.MonkeyPatch.context() as patch:
        interrupt_when_it_returns(comm, "send", patch)
        for refused in (x, x.to_sparse()):
            with pytest.raises(KeyboardInterrupt):
                comm.send(refused)
    comm.send(x)
    comm.barrier()


@on_ranks(2)
def test_a_pipe_that_is_not_found_aborts_the_group(
    rank: int, n: int, path: str, board: BoardHandle
) -> None:
    closed = Path(f"{path}.closed")
    with make_comm(rank, board, path) as comm:
        if rank == 1:
            comm.send(torch.ones(1))
            comm.close()
            closed.touch()
            return
        until(closed.exists)
        for error in (GroupClosedError, GroupAbortedError):
            with pytest.raises(error, match="rank 1 has closed the group"):
                comm.recv((1,), torch.float32)
