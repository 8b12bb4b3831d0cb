"""Rows of the table: the verbs that compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from device_comm import Communicator, ReduceOp
from tests.device_comm.oracle import REDUCED, ops_for, reduced, same, values
from tests.device_comm.suite import Case, verb_case
from tests.fuzz.verbs import WITH_FORMS

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMS = ("plain", "out", "strided_out", "async")
SHAPE = (3, 5)
CUBE = (2, 3, 4)
WITH_ALL_FORMS = (torch.bool, torch.int64, torch.float32, torch.bfloat16)


def reduce_cases(n: int) -> Iterator[Case]:
    """Reductions of every dtype and operation; forms, dims, roots and sizes with some."""
    last = n - 1
    uneven = (tuple(range(1, n + 1)), tuple(range(0, 3 * n, 3)), ())
    for dtype in REDUCED:
        ops = ops_for(dtype)
        for op in ops:
            yield verb_case("all_reduce", dtype, SHAPE, op=op)
            yield verb_case("reduce_scatterv", dtype, CUBE, op=op, sizes=uneven[0])
        for op in (ops[0], ops[-1]):
            yield verb_case("reduce", dtype, SHAPE, op=op, root=last)
            yield verb_case("reduce_scatter", dtype, CUBE, op=op, dim=1)
            for layout in ("plain", "strided"):
                for form in WITH_FORMS["all_reduce"] if dtype in WITH_ALL_FORMS else ():
                    yield verb_case("all_reduce", dtype, SHAPE, layout, form, op)
        # A row of one element of a transposed matrix: contiguous, and its stride is not 1.
        for form in ("strided_out", "in_place"):
            yield verb_case("all_reduce", dtype, (1,), "strided", form)
        yield verb_case("reduce", dtype, (1,), "strided", root=last)
        yield verb_case("reduce_scatterv", dtype, (1,), "strided", sizes=(*[0] * last, 1))
    for dtype in (torch.float32, torch.bfloat16):
        for form in FORMS:
            for dim in (-1, 0, 1):
                yield verb_case("reduce_scatter", dtype, CUBE, form=form, dim=dim)
                for sizes in uneven:
                    yield verb_case("reduce_scatterv", dtype, CUBE, form=form, dim=dim, sizes=sizes)
            for root in range(n):
                yield verb_case("reduce", dtype, SHAPE, form=form, op=ReduceOp.MAX, root=root)
    for root in range(n):
        yield verb_case("reduce", torch.int32, SHAPE, form="in_place", root=root)
    for dim in (0, 1):
        yield verb_case("reduce_scatter", torch.int32, (2, 2 * n), form="in_place", dim=dim)
    yield Case("all_reduce of many elements", frozenset({"all_reduce"}), torch.float32, _large)


def _large(comm: Communicator) -> None:
    for numel in (1023, 65_537, 600_011):
        inputs = [values(rank, (numel,), torch.float32) for rank in range(comm.world_size)]
        total = comm.all_reduce(inputs[comm.rank].to(comm.device, copy=True))
        same(total, reduced(inputs, ReduceOp.SUM))
