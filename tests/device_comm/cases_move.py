"""Rows of the table: the verbs that only move."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from tests.device_comm.oracle import MOVED, same, strided, values
from tests.device_comm.suite import Case, verb_case
from tests.fuzz.verbs import WITH_FORMS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from device_comm import Communicator

FORMS = ("plain", "out", "strided_out", "async")
DIMS = (-1, 0, 1)
EQUAL = ("all_gather", "all_to_all", "gather", "scatter")
SHAPE = (2, 3, 4)
WITH_ONE_ELEMENT = (torch.bool, torch.float32, torch.complex128, torch.float8_e5m2)


def move_cases(n: int) -> Iterator[Case]:
    """Every moving verb with every dtype; dims, roots, sizes and forms with one of them."""
    last = n - 1
    uneven = (tuple(range(1, n + 1)), tuple(range(0, 3 * n, 3)), ())
    # Rank a sends (a + 2 b) % 3 rows to rank b, or one row to the next.
    exchanged = tuple((a + 2 * b) % 3 for a in range(n) for b in range(n))
    to_the_next = tuple(int(b == (a + 1) % n) for a in range(n) for b in range(n))
    for dtype in MOVED:
        for verb in EQUAL:
            yield verb_case(verb, dtype, SHAPE, dim=1, root=last)
        yield verb_case("all_gatherv", dtype, SHAPE, dim=1, sizes=uneven[0])
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
                yield verb_case(verb, torch.float32, SHAPE, form=form, dim=dim)
            for sizes in uneven:
                yield verb_case(
                    "all_gatherv", torch.float32, SHAPE, form=form, dim=dim, sizes=sizes
                )
            yield verb_case("all_gather", torch.float32, SHAPE, "strided", form=form, dim=dim)
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
                yield verb_case(verb, torch.int64, SHAPE, form=form, dim=-1, root=root)
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
