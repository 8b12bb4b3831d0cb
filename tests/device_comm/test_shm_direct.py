"""The short way through the C extension, against the long way of other ranks."""

from __future__ import annotations

import math
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
from shm_broadcast.errors import DivergenceError, GroupAbortedError, GroupClosedError, PeerLostError
from shm_broadcast.ring.buffers import RECYCLED_BYTES
from tests.device_comm.meeting import wait_for_abort
from tests.device_comm.oracle import same
from tests.device_comm.shm_ranks import make_comm, shm_of
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
    """Every verb with a short way, on this rank's input, or on ``x``."""
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
    raise AssertionError("this call went the long way")


def only_short(comm: Communicator) -> None:
    """Refuse the long way, and to wait for the rest of a message."""
    comm.runner.run = refuse
    shm_of(comm).fast_path._go_on = refuse


def short_and_long(rank: int, n: int, path: str, board: BoardHandle, late: int) -> None:
    """Rank 0 goes the short way, rank 1 as well but in the background, rank 2 the long one.

    ``late`` lets the others wait.
    """
    with make_comm(rank, board, path, fast_path=rank != 2) as comm:
        if rank != 2:
            only_short(comm)
        for verb, call in calls(comm).items():
            for into in (None, torch.empty):
                if rank == late:
                    time.sleep(0.005)
                expected = EXPECTED[verb][rank]
                form: dict[str, Any] = {}
                if into is not None and expected is not None:
                    form["out"] = torch.empty_like(expected)
                answer = call(async_op=True, **form).wait() if rank == 1 else call(**form)
                if expected is None:
                    assert answer is None, verb
                else:
                    same(answer, expected)
                    assert answer is form.get("out", answer), verb


@pytest.mark.parametrize("late", range(N))
def test_short_and_long_ways_meet(late: int, store_path: str) -> None:
    run_ranks(N, short_and_long, store_path, NEW_BOARD, late)


def complex_numbers(rank: int, n: int, path: str, board: BoardHandle) -> None:
    """Rank 1 conjugates lazily, which takes the long way."""
    with make_comm(rank, board, path) as comm:
        for dtype in (torch.complex64, torch.complex128):
            x = torch.tensor([1 + 2j, 3 - 4j, -5j], dtype=dtype) * (rank + 1)
            lazy = x.conj() if rank == 1 else x
            assert lazy.is_conj() == (rank == 1)
            if rank == 0:
                only_short(comm)
            expected = torch.tensor([3 - 2j, 9 + 4j, 5j], dtype=dtype)
            same(comm.all_reduce(lazy), expected)
            rows = torch.tensor([1 + 2j, 3 - 4j, -5j, 2 - 4j, 6 + 8j, 10j], dtype=dtype)
            same(comm.all_gather(lazy), rows)
            same(comm.all_reduce(lazy, op=ReduceOp.PRODUCT)[2:], torch.tensor([50.0], dtype=dtype))


def test_complex_numbers_go_the_short_way(store_path: str) -> None:
    run_ranks(2, complex_numbers, store_path, NEW_BOARD)


def along(rank: int, n: int, path: str, board: BoardHandle, slow: int, late: int) -> None:
    """All but rank ``slow`` go the short way; dimensions are split and joined after others."""
    with make_comm(rank, board, path, fast_path=rank != slow) as comm:
        if rank != slow:
            only_short(comm)
        for shape, dim in [((2, 6), -1), ((3, 12, 2), 1), ((2, 3, 6), 2), ((5, 3, 1), 1)]:
            xs = [torch.arange(math.prod(shape)).view(shape) + 1000 * each for each in range(n)]
            x, total, root = xs[rank], torch.stack(xs).sum(0), rank == ROOT
            mine = [each.chunk(n, dim)[rank] for each in xs]
            out = torch.empty_like(mine[ROOT])
            for background in (False, True):
                if rank == late:
                    time.sleep(0.003)

                def answer(verb: Callable[..., Any], *args: Any, **form: Any) -> Any:
                    if background:  # noqa: B023 - called in this turn only
                        return verb(*args, async_op=True, **form).wait()
                    return verb(*args, **form)

                same(answer(comm.all_gather, x, dim), torch.cat(xs, dim))
                same(answer(comm.reduce_scatter, x, dim), total.chunk(n, dim)[rank])
                same(answer(comm.all_to_all, x, dim), torch.cat(mine, dim))
                joined = answer(comm.gather, x, ROOT, dim)
                assert joined is None if not root else torch.equal(joined, torch.cat(xs, dim))
                given = {} if root else {"out": out}
                same(answer(comm.scatter, x if root else None, ROOT, dim, **given), mine[ROOT])
                into = torch.empty_like(torch.cat(xs, dim))
                assert answer(comm.all_gather, x, dim, out=into) is into
                same(into, torch.cat(xs, dim))


@pytest.mark.parametrize(("slow", "late"), [(3, 0), (0, 1), (1, 0), (2, 2)])
def test_any_dimension_is_split_and_joined_the_short_way(
    slow: int, late: int, store_path: str
) -> None:
    run_ranks(N, along, store_path, NEW_BOARD, slow, late)


def in_the_background(rank: int, n: int, path: str, board: BoardHandle) -> None:
    """Rank 1 begins the short way, and does nothing until rank 0 has come, and all is done."""
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


def test_background_calls_go_the_short_way(store_path: str) -> None:
    run_ranks(2, in_the_background, store_path, NEW_BOARD)


def background_peer_lost(rank: int, n: int, path: str, board: BoardHandle) -> None:
    comm = make_comm(rank, board, path)
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


def test_a_background_call_names_the_peer_that_is_lost(store_path: str) -> None:
    run_ranks(2, background_peer_lost, store_path, NEW_BOARD, may_die=[1])


def messages(rank: int, n: int, path: str, board: BoardHandle) -> None:
    """Rank 0 sends to rank 1. Who finds room, or all of a message, goes the short way."""
    with make_comm(rank, board, path) as comm:
        if rank == 0:
            comm.send(torch.tensor([0.0]))
        else:
            assert comm.recv((1,), torch.float32) == 0
        long_way, go_on = comm.runner.run, shm_of(comm).fast_path._go_on
        for count in (1, 1_000, 16_000, 1_000_000):
            for late in range(2):
                x = torch.arange(count, dtype=torch.float32) + late
                comm.barrier()
                if count <= 16_000 and rank <= late:
                    only_short(comm)
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
                comm.runner.run, shm_of(comm).fast_path._go_on = long_way, go_on
        comm.barrier()


def test_messages_of_every_size_whoever_comes_first(store_path: str) -> None:
    run_ranks(2, messages, store_path, NEW_BOARD)


def out_of_the_ordinary(rank: int, n: int, path: str, board: BoardHandle, late: int) -> None:
    """Sums of columns, of a transposed tensor and of what is negated lazily; ``late`` waits."""
    with make_comm(rank, board, path) as comm:
        square = torch.arange(9.0).view(3, 3)
        inputs = [square[:, 1], square.t(), torch.complex(square, square).conj().imag]
        if rank != 2:
            only_short(comm)
        for x in inputs:
            assert not x.is_contiguous()
            for out in (None, torch.empty(x.shape)):
                if rank == late:
                    time.sleep(0.005)
                before = x.clone()
                total = comm.all_reduce(x, out=out, timeout=60 if out is None else 60.0)
                same(total, 3 * before)
                assert total.is_contiguous()
                assert out is None or total is out
                assert torch.equal(x, before)
                at_root = comm.reduce(x, dst=1)
                assert at_root is None if rank != 1 else torch.equal(at_root, total)
        sparse = torch.ones(2).to_sparse()
        with pytest.raises(TypeError, match="dense"):
            comm.all_reduce(sparse)
        if rank == 2:
            for wrong in (-1, -0.5, float("nan")):
                with pytest.raises(ValueError, match="timeout"):
                    comm.all_reduce(inputs[0], timeout=wrong)
        comm.barrier()


@pytest.mark.parametrize("late", [0, 2])
def test_strides_and_timeouts_are_not_in_the_way(late: int, store_path: str) -> None:
    run_ranks(N, out_of_the_ordinary, store_path, NEW_BOARD, late)


def lazily(x: torch.Tensor) -> torch.Tensor:
    """``x`` by its negative in memory, and a flag."""
    negated = torch._neg_view(x.neg())
    assert negated.is_contiguous()
    assert negated.is_neg()
    return negated


def negated(rank: int, n: int, path: str, board: BoardHandle) -> None:
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
        for _ in range(2):  # the first message makes the pipe, the second goes the short way
            if rank == 0:
                comm.send(lazily(x), dst=1)
            elif rank == 1:
                out = lazily(torch.zeros(3))
                assert comm.recv(out=out, src=0) is out
                same(out, x)
        comm.barrier()  # a receiver maps the sender's memory while that lives


def test_what_is_negated_lazily_keeps_its_sign(store_path: str) -> None:
    run_ranks(N, negated, store_path, NEW_BOARD)


def results(rank: int, n: int, path: str, board: BoardHandle) -> int:
    """Keep some results and drop many; how much the process has grown by those, in KiB."""
    with make_comm(rank, board, path) as comm:
        only_short(comm)
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
        return grown


def test_results_live_as_long_as_they_are_held(store_path: str) -> None:
    """500 results of 128 KiB would be 64,000 KiB."""
    assert max(run_ranks(2, results, store_path, NEW_BOARD)) < 8_000


def wrong_arguments(rank: int, n: int, path: str, board: BoardHandle) -> None:
    """After a plain message, so that there is a short way to rank 1."""
    with make_comm(rank, board, path) as comm:
        x = torch.ones(1, 4)
        comm.all_gather(x)
        for dim in (2**63, -(2**70)):
            for verb in (comm.all_gather, comm.reduce_scatter, comm.all_to_all, comm.gather):
                with pytest.raises(ValueError, match="dim"):
                    verb(x, dim=dim)
        if rank == 1:
            same(comm.recv(x.shape, x.dtype), x)
            for src in (False, 0.0):
                with pytest.raises(TypeError, match="src must be a rank"):
                    comm.recv(x.shape, x.dtype, src)
        else:
            comm.send(x)
            for dst in (True, 1.0):
                with pytest.raises(TypeError, match="dst must be a rank"):
                    comm.send(x, dst)
        comm.barrier()


def test_wrong_arguments_are_refused_the_short_way_too(store_path: str) -> None:
    run_ranks(2, wrong_arguments, store_path, NEW_BOARD)


def no_memory(rank: int, n: int, path: str, board: BoardHandle) -> None:
    """Rank 0 finds no memory for its results, and tries again; the other one waits meanwhile."""
    with make_comm(rank, board, path) as comm:

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


def test_a_result_without_memory_has_not_begun(store_path: str) -> None:
    run_ranks(2, no_memory, store_path, NEW_BOARD)


def interrupt_when_it_returns(comm: Communicator, verb: str, patch: pytest.MonkeyPatch) -> None:
    """Raise as soon as the extension comes back from ``verb``, as a signal handler may."""
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


def interrupted(rank: int, n: int, path: str, board: BoardHandle, message: bool) -> None:
    """Rank 0 is interrupted when it has begun, and does not come to wait for rank 1."""
    with make_comm(rank, board, path) as comm:
        x = torch.ones(RECYCLED_BYTES)
        comm.recv(out=x[:5]) if rank else comm.send(x[:5])
        comm.barrier()
        if rank == 0:
            with pytest.MonkeyPatch.context() as patch:
                interrupt_when_it_returns(comm, "send" if message else "all_reduce", patch)
                with pytest.raises(KeyboardInterrupt):
                    comm.send(x) if message else comm.all_reduce(x)
        wait_for_abort(comm.watch)
        with pytest.raises(GroupAbortedError, match="KeyboardInterrupt"):
            comm.all_reduce(x)


@pytest.mark.parametrize("message", [False, True])
def test_whoever_is_interrupted_when_it_has_begun_ends_the_group(
    store_path: str, message: bool
) -> None:
    run_ranks(2, interrupted, store_path, NEW_BOARD, message)


def interrupted_when_done(rank: int, n: int, path: str, board: BoardHandle) -> None:
    """Rank 0 is interrupted when it has sent all, or nothing."""
    with make_comm(rank, board, path) as comm:
        x = torch.ones(5)
        if rank == 1:
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


def test_whoever_is_interrupted_when_all_is_done_ends_nothing(store_path: str) -> None:
    run_ranks(2, interrupted_when_done, store_path, NEW_BOARD)


def pipe_never_found(rank: int, n: int, path: str, board: BoardHandle) -> None:
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


def test_after_a_pipe_was_not_found_the_group_is_aborted(store_path: str) -> None:
    run_ranks(2, pipe_never_found, store_path, NEW_BOARD)


def expect_wrongly(rank: int, n: int, path: str, board: BoardHandle) -> None:
    """What is said beside ``out`` has to fit it, the short way too."""
    with make_comm(rank, board, path) as comm:
        if rank == 0:
            for number in range(2):
                comm.send(torch.tensor([float(number)]))
        else:
            out = torch.zeros(1)
            assert comm.recv(out=out, src=0) == 0
            with pytest.raises(TypeError, match="int64"):
                comm.recv(dtype=torch.int64, out=out, src=0)
            with pytest.raises(ValueError, match="2"):
                comm.recv((2,), out=out, src=0)
            assert comm.recv((1,), torch.float32, 0, out=out) is out
            assert out == 1
        comm.barrier()


def test_out_is_checked_against_what_is_expected(store_path: str) -> None:
    run_ranks(2, expect_wrongly, store_path, NEW_BOARD)


def one_gives_sizes(rank: int, n: int, path: str, board: BoardHandle) -> str:
    with make_comm(rank, board, path) as comm:
        sizes = [1, 1] if rank else None
        with pytest.raises(DivergenceError) as caught:
            comm.all_to_all(torch.ones(2, 3), input_sizes=sizes, output_sizes=sizes)
        return str(caught.value)


def test_all_ranks_give_sizes_or_none(store_path: str) -> None:
    messages = run_ranks(2, one_gives_sizes, store_path, NEW_BOARD)
    assert any("all_to_all float32[2, 3]" in message for message in messages)
