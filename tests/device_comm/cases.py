"""Rows of the table: every verb with every dtype; dims, roots, sizes and forms with some.

A case is a function of the communicator: it computes every rank's input and the result
by itself, so that ranks need not talk about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from device_comm import ReduceOp, Work
from tests.device_comm.oracle import MOVED, REDUCED, ops_for, reduced, same, strided, values
from tests.fuzz.program import Step
from tests.fuzz.verbs import WITH_FORMS, Given, call_tensor_verb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from device_comm import Communicator

FORMS = ("plain", "out", "strided_out", "async")
SHAPE = (3, 5)
CUBE = (2, 3, 4)
WITH_ALL_FORMS = (torch.bool, torch.int64, torch.float32, torch.bfloat16)
DIMS = (-1, 0, 1)
EQUAL = ("all_gather", "all_to_all", "gather", "scatter")
WITH_ONE_ELEMENT = (torch.bool, torch.float32, torch.complex128, torch.float8_e5m2)


@dataclass(frozen=True)
class Case:
    name: str
    verbs: frozenset[str]
    dtype: torch.dtype
    body: Callable[[Communicator], None]


def verb_case(verb: str, *of: Any, **others: Any) -> Case:
    """A row for a `Step`, with the inputs and the result of random programs."""
    step = Step(verb, "", *of, **others)
    name = verb.removesuffix("_uneven")
    return Case(str(step), frozenset({name}), step.dtype, partial(_check_step, step))


def _check_step(step: Step, comm: Communicator) -> None:
    found, check = call_tensor_verb(comm, Given(step, 0, comm.rank, comm.world_size))
    if step.run_on:
        work = found
        assert isinstance(work, Work)
        found = work.wait()
        assert work.is_completed()
        assert work.wait() is found, "a second wait returns something else"
    check(found)


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


def move_cases(n: int) -> Iterator[Case]:
    """Every moving verb with every dtype; dims, roots, sizes and forms with one of them."""
    last = n - 1
    uneven = (tuple(range(1, n + 1)), tuple(range(0, 3 * n, 3)), ())
    # Rank a sends (a + 2 b) % 3 rows to rank b, or one row to the next.
    exchanged = tuple((a + 2 * b) % 3 for a in range(n) for b in range(n))
    to_the_next = tuple(int(b == (a + 1) % n) for a in range(n) for b in range(n))
    for dtype in MOVED:
        for verb in EQUAL:
            yield verb_case(verb, dtype, CUBE, dim=1, root=last)
        yield verb_case("all_gatherv", dtype, CUBE, dim=1, sizes=uneven[0])
        yield verb_case("broadcast", dtype, (3, 2), root=last)
        if dtype in WITH_ONE_ELEMENT:
            yield from _one_element(dtype, last, to_the_next)
        if n > 1:
            for shape in ((3, 2), (1,)):
                case = partial(_ring, dtype, shape)
                yield Case(f"ring {dtype} {shape}", frozenset({"send", "recv"}), dtype, case)
    for form in FORMS:
        for dim in DIMS:
            for verb in EQUAL:
                yield verb_case(verb, torch.float32, CUBE, form=form, dim=dim)
            for sizes in uneven:
                yield verb_case("all_gatherv", torch.float32, CUBE, form=form, dim=dim, sizes=sizes)
            yield verb_case("all_gather", torch.float32, CUBE, "strided", form=form, dim=dim)
        for dim in (0, 1):
            yield verb_case(
                "all_to_all_uneven", torch.float32, (2, 2), form=form, dim=dim, sizes=exchanged
            )
    for root in range(n):
        for form in WITH_FORMS["broadcast"]:
            for layout in ("plain", "strided"):
                yield verb_case("broadcast", torch.int64, (3, 2), layout, form, root=root)
        for verb in ("gather", "scatter"):
            for form in WITH_FORMS[verb]:
                yield verb_case(verb, torch.int64, CUBE, form=form, dim=-1, root=root)
    for dim in (0, 1):
        for layout in ("plain", "strided"):
            for verb in ("all_gather", "all_to_all"):
                yield verb_case(verb, torch.int64, (2, 2), layout, "in_place", dim=dim)
    several = frozenset({"all_gatherv"})
    yield Case("all_gatherv of a list", several, torch.float32, _all_gatherv_list)


def _one_element(dtype: torch.dtype, last: int, to_the_next: tuple[int, ...]) -> Iterator[Case]:
    """A row of one element of a transposed matrix: contiguous, and its stride is not 1."""
    for verb in EQUAL:
        yield verb_case(verb, dtype, (1,), "strided", root=last)
    for form in ("plain", "in_place"):
        yield verb_case("broadcast", dtype, (1,), "strided", form, root=last)
    yield verb_case("scatter", dtype, (1,), "strided", "strided_out", root=last)
    yield verb_case("all_gatherv", dtype, (1,), "strided", sizes=(*[0] * last, 1))
    yield verb_case("all_to_all_uneven", dtype, (1,), "strided", "strided_out", sizes=to_the_next)


def _ring(dtype: torch.dtype, shape: tuple[int, ...], comm: Communicator) -> None:
    n = comm.world_size
    inputs = [values(rank, shape, dtype) for rank in range(n)]
    previous = inputs[comm.rank - 1]
    mine = inputs[comm.rank].to(comm.device, copy=True)
    sent = comm.isend(strided(mine))
    same(comm.recv(previous.shape, dtype), previous)
    sent.wait()
    out = strided(torch.zeros_like(mine))
    got = comm.irecv(src=(comm.rank - 1) % n, out=out)
    comm.send(mine, (comm.rank + 1) % n)
    assert got.wait() is out
    same(out, previous)


def _all_gatherv_list(comm: Communicator) -> None:
    sizes = [2 * rank + 1 for rank in range(comm.world_size)]
    rows = [values(rank, (size, 3), torch.float32) for rank, size in enumerate(sizes)]
    numbers = [values(rank, (size,), torch.int64) for rank, size in enumerate(sizes)]
    mine = [each[comm.rank].to(comm.device, copy=True) for each in (rows, numbers)]
    for result in (
        comm.all_gatherv(mine, sizes=sizes),
        comm.all_gatherv(mine, sizes=sizes, async_op=True).wait(),
    ):
        assert isinstance(result, list)
        same(result[0], torch.cat(rows))
        same(result[1], torch.cat(numbers))
