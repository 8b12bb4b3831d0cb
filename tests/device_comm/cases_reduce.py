"""Rows of the table: the verbs that compute."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from device_comm import Communicator, ReduceOp
from tests.device_comm.oracle import REDUCED, ops_for, reduced, same, values
from tests.device_comm.suite import FORMS, Body, Case, apply, strided

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE = (3, 5)


def reduce_cases(n: int) -> Iterator[Case]:
    """Every reducing verb with every dtype and operation; dims, roots and sizes with some."""
    for dtype in REDUCED:
        for op in ops_for(dtype):
            label = f"{op.name}-{dtype}"
            for form in FORMS:
                yield _case(
                    f"all_reduce-{label}-{form}", "all_reduce", dtype, _all_reduce, op, form
                )
            yield _case(f"reduce-{label}", "reduce", dtype, _reduce, op, "plain", n - 1)
            yield _case(
                f"reduce_scatter-{label}", "reduce_scatter", dtype, _reduce_scatter, op, "plain", 1
            )
            yield _case(
                f"reduce_scatterv-{label}",
                "reduce_scatterv",
                dtype,
                _reduce_scatterv,
                op,
                "plain",
                0,
            )
            for verb in ("all_reduce", "reduce", "reduce_scatterv"):
                yield _case(f"{verb}-one-{label}", verb, dtype, _one_element, op, verb)
            yield _case(f"in_place-{label}", "all_reduce", dtype, _all_reduce_in_place, op)
    for dtype in (torch.float32, torch.bfloat16):
        for form in FORMS:
            for dim in (-3, -2, -1, 0, 1, 2):
                for verb, body in (
                    ("reduce_scatter", _reduce_scatter),
                    ("reduce_scatterv", _reduce_scatterv),
                ):
                    name = f"{verb}-{dtype}-{form}-{dim}"
                    yield _case(name, verb, dtype, body, ReduceOp.SUM, form, dim)
            for root in range(n):
                name = f"reduce-{dtype}-{form}-{root}"
                yield _case(name, "reduce", dtype, _reduce, ReduceOp.MAX, form, root)
    for root in range(n):
        yield _case(f"reduce_-{root}", "reduce", torch.int32, _reduce_in_place, root)
    for dim in (0, 1):
        yield _case(
            f"reduce_scatter_-{dim}", "reduce_scatter", torch.int32, _reduce_scatter_in_place, dim
        )
    yield _case("all_reduce-large", "all_reduce", torch.float32, _large)


def _case(name: str, verb: str, dtype: torch.dtype, body: Body, *args: object) -> Case:
    return Case(name, frozenset({verb}), dtype, partial(body, dtype, *args))


def _all_reduce(dtype: torch.dtype, op: ReduceOp, form: str, comm: Communicator) -> None:
    inputs = [values(rank, SHAPE, dtype) for rank in range(comm.world_size)]
    mine = inputs[comm.rank].to(comm.device, copy=True)
    apply(comm.all_reduce, form, mine, reduced(inputs, op), comm.device, op=op)
    if form == "plain":
        apply(comm.all_reduce, form, strided(mine), reduced(inputs, op), comm.device, op=op)


def _all_reduce_in_place(dtype: torch.dtype, op: ReduceOp, comm: Communicator) -> None:
    inputs = [values(rank, SHAPE, dtype) for rank in range(comm.world_size)]
    for view in (torch.clone, strided):
        mine = view(inputs[comm.rank].to(comm.device, copy=True))
        assert comm.all_reduce_(mine, op=op) is mine
        same(mine, reduced(inputs, op))
    mine = inputs[comm.rank].to(comm.device, copy=True)
    work = comm.all_reduce_(mine, op=op, async_op=True)
    assert work.wait() is mine
    same(mine, reduced(inputs, op))


def _reduce(dtype: torch.dtype, op: ReduceOp, form: str, root: int, comm: Communicator) -> None:
    inputs = [values(rank, SHAPE, dtype) for rank in range(comm.world_size)]
    expected = reduced(inputs, op) if comm.rank == root else None
    mine = inputs[comm.rank].to(comm.device, copy=True)
    apply(comm.reduce, form, mine, expected, comm.device, op=op, dst=root)


def _reduce_in_place(dtype: torch.dtype, root: int, comm: Communicator) -> None:
    inputs = [values(rank, SHAPE, dtype) for rank in range(comm.world_size)]
    mine = inputs[comm.rank].to(comm.device, copy=True)
    result = comm.reduce_(mine, dst=root)
    if comm.rank == root:
        assert result is mine
        same(mine, reduced(inputs, ReduceOp.SUM))
    else:
        assert result is None
        same(mine, inputs[comm.rank])


def _reduce_scatter(
    dtype: torch.dtype, op: ReduceOp, form: str, dim: int, comm: Communicator
) -> None:
    n = comm.world_size
    shape = [2, 3, 4]
    shape[dim] = 2 * n
    inputs = [values(rank, shape, dtype) for rank in range(n)]
    expected = reduced(inputs, op).chunk(n, dim)[comm.rank]
    mine = inputs[comm.rank].to(comm.device, copy=True)
    apply(comm.reduce_scatter, form, mine, expected, comm.device, op=op, dim=dim)


def _reduce_scatterv(
    dtype: torch.dtype, op: ReduceOp, form: str, dim: int, comm: Communicator
) -> None:
    n = comm.world_size
    shape = [2, 3, 4]
    for sizes in ([rank + 1 for rank in range(n)], [3 * rank for rank in range(n)], [2] * n, None):
        shape[dim] = n if sizes is None else sum(sizes)
        inputs = [values(rank, shape, dtype) for rank in range(n)]
        expected = torch.split(reduced(inputs, op), sizes or [1] * n, dim)[comm.rank]
        mine = inputs[comm.rank].to(comm.device, copy=True)
        apply(comm.reduce_scatterv, form, mine, expected, comm.device, op=op, dim=dim, sizes=sizes)


def _reduce_scatter_in_place(dtype: torch.dtype, dim: int, comm: Communicator) -> None:
    n = comm.world_size
    shape = [2 * n, 2 * n]
    inputs = [values(rank, shape, dtype) for rank in range(n)]
    mine = inputs[comm.rank].to(comm.device, copy=True)
    result = comm.reduce_scatter_(mine, dim=dim)
    same(result, reduced(inputs, ReduceOp.SUM).chunk(n, dim)[comm.rank])
    same(mine.chunk(n, dim)[0], result.cpu())
    same(mine.narrow(dim, 2, 2 * n - 2), inputs[comm.rank].narrow(dim, 2, 2 * n - 2))


def _large(dtype: torch.dtype, comm: Communicator) -> None:
    n = comm.world_size
    for numel in (1, 1023, 65_537, 1_000_003):
        inputs = [values(rank, (numel,), dtype) for rank in range(n)]
        same(
            comm.all_reduce(inputs[comm.rank].to(comm.device, copy=True)),
            reduced(inputs, ReduceOp.SUM),
        )


def _one_element(dtype: torch.dtype, op: ReduceOp, verb: str, comm: Communicator) -> None:
    """A row of one element of a transposed matrix: contiguous, and its stride is not 1."""
    last = comm.world_size - 1
    inputs = [values(rank, (1,), dtype) for rank in range(comm.world_size)]
    expected = reduced(inputs, op)
    mine = strided(inputs[comm.rank].to(comm.device))
    assert (mine.stride(), mine.is_contiguous()) == ((2,), True)
    if verb == "reduce_scatterv":
        part = comm.reduce_scatterv(mine, sizes=[0] * last + [1], op=op)
        same(part, expected if comm.rank == last else expected[:0])
    elif verb == "reduce":
        whole = comm.reduce(mine, dst=last, op=op)
        if comm.rank == last:
            same(whole, expected)
    else:
        same(comm.all_reduce(mine, op=op, out=strided(mine)), expected)
        same(comm.all_reduce_(mine, op=op), expected)
