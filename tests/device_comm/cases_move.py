"""Rows of the table: the verbs that only move."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.device_comm.oracle import MOVED, same, values
from tests.device_comm.suite import FORMS, Body, Case, apply, strided

if TYPE_CHECKING:
    from collections.abc import Iterator

    from device_comm import Communicator

DIMS = (-3, -2, -1, 0, 1, 2)


def move_cases(n: int) -> Iterator[Case]:
    """Every moving verb with every dtype; dims, roots, sizes and forms with one of them."""
    rows = {
        "all_gather": _all_gather,
        "all_gatherv": _all_gatherv,
        "all_to_all": _all_to_all,
    }
    rooted = {"gather": _gather, "scatter": _scatter}
    for dtype in MOVED:
        for verb, body in (rows | rooted).items():
            yield _case(f"{verb}-{dtype}", verb, dtype, body, "plain", 1, n - 1)
        yield _case(f"broadcast-{dtype}", "broadcast", dtype, _broadcast, "plain", n - 1)
        if n > 1:
            yield _case(f"ring-{dtype}", "send", dtype, _ring)
            yield _case(f"ring-one-{dtype}", "send", dtype, _one_element_ring)
        for verb in (*rows, *rooted, "broadcast"):
            yield _case(f"{verb}-one-{dtype}", verb, dtype, _one_element, verb)
    for form in FORMS:
        for dim in DIMS:
            for verb, body in (rows | rooted).items():
                yield _case(f"{verb}-{form}-{dim}", verb, torch.float32, body, form, dim, 0)
        for root in range(n):
            for verb, body in rooted.items():
                name = f"{verb}-{form}-root{root}"
                yield _case(name, verb, torch.int64, body, form, -1, root)
            name = f"broadcast-{form}-root{root}"
            yield _case(name, "broadcast", torch.int64, _broadcast, form, root)
    for dim in (0, 1):
        yield _case(f"all_gather_-{dim}", "all_gather", torch.int64, _all_gather_in_place, dim)
        yield _case(f"all_to_all_-{dim}", "all_to_all", torch.int64, _all_to_all_in_place, dim)
        for root in range(n):
            name = f"gather_scatter_-{dim}-{root}"
            yield _case(name, "gather", torch.int64, _gather_scatter_in_place, dim, root)
    for root in range(n):
        yield _case(f"broadcast_-{root}", "broadcast", torch.int64, _broadcast_in_place, root)
    yield _case("all_gatherv-list", "all_gatherv", torch.float32, _all_gatherv_list)
    yield _case("all_to_all-split", "all_to_all", torch.float32, _all_to_all_split)


def _case(name: str, verb: str, dtype: torch.dtype, body: Body, *args: object) -> Case:
    verbs = {"send": {"send", "recv"}, "gather": {"gather", "scatter"}}.get(verb, {verb})
    return Case(name, frozenset(verbs), dtype, partial(body, dtype, *args))


def _inputs(comm: Communicator, dtype: torch.dtype, shape: list[int]) -> list[Tensor]:
    return [values(rank, shape, dtype) for rank in range(comm.world_size)]


def _cat(parts: list[Tensor], dim: int) -> Tensor:
    """``torch.cat``, for the dtypes that it does not know too."""
    size = parts[0].dtype.itemsize
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(size)
    if parts[0].is_complex() or carrier is None:
        return torch.cat(parts, dim)
    return torch.cat([part.view(carrier) for part in parts], dim).view(parts[0].dtype)


def _all_gather(dtype: torch.dtype, form: str, dim: int, root: int, comm: Communicator) -> None:
    inputs = _inputs(comm, dtype, [2, 3, 4])
    mine = inputs[comm.rank].to(comm.device, copy=True)
    for x in (mine, strided(mine)):
        apply(comm.all_gather, form, x, _cat(inputs, dim), comm.device, dim=dim)


def _all_gatherv(dtype: torch.dtype, form: str, dim: int, root: int, comm: Communicator) -> None:
    n = comm.world_size
    for sizes in ([rank + 1 for rank in range(n)], [3 * rank for rank in range(n)], None):
        shapes = [[2, 3, 4] for _ in range(n)]
        for rank in range(n):
            shapes[rank][dim] = 2 if sizes is None else sizes[rank]
        inputs = [values(rank, shapes[rank], dtype) for rank in range(n)]
        mine = inputs[comm.rank].to(comm.device, copy=True)
        apply(comm.all_gatherv, form, mine, _cat(inputs, dim), comm.device, dim=dim, sizes=sizes)


def _all_gatherv_list(dtype: torch.dtype, comm: Communicator) -> None:
    n = comm.world_size
    sizes = [2 * rank + 1 for rank in range(n)]
    first = [values(rank, (sizes[rank], 3), dtype) for rank in range(n)]
    second = [values(rank, (sizes[rank],), torch.int64) for rank in range(n)]
    mine = [
        first[comm.rank].to(comm.device, copy=True),
        second[comm.rank].to(comm.device, copy=True),
    ]
    for result in (
        comm.all_gatherv(mine, sizes=sizes),
        comm.all_gatherv(mine, sizes=sizes, async_op=True).wait(),
    ):
        assert isinstance(result, list)
        same(result[0], torch.cat(first))
        same(result[1], torch.cat(second))


def _all_to_all(dtype: torch.dtype, form: str, dim: int, root: int, comm: Communicator) -> None:
    n = comm.world_size
    shape = [2, 3, 4]
    shape[dim] = 2 * n
    inputs = _inputs(comm, dtype, shape)
    expected = _cat([x.narrow(dim, 2 * comm.rank, 2) for x in inputs], dim)
    apply(
        comm.all_to_all,
        form,
        inputs[comm.rank].to(comm.device, copy=True),
        expected,
        comm.device,
        dim=dim,
    )


def _all_to_all_split(dtype: torch.dtype, comm: Communicator) -> None:
    n = comm.world_size
    for form in FORMS:
        for dim in (0, 1):
            # rank a sends (a + 2 b) % 3 rows to rank b
            rows = [[(a + 2 * b) % 3 for b in range(n)] for a in range(n)]
            inputs = []
            for rank in range(n):
                shape = [2, 2]
                shape[dim] = sum(rows[rank])
                inputs.append(values(rank, shape, dtype))
            parts = [torch.split(inputs[a], rows[a], dim)[comm.rank] for a in range(n)]
            apply(
                comm.all_to_all,
                form,
                inputs[comm.rank].to(comm.device, copy=True),
                torch.cat(parts, dim),
                comm.device,
                dim=dim,
                input_sizes=rows[comm.rank],
                output_sizes=[rows[a][comm.rank] for a in range(n)],
            )


def _broadcast(dtype: torch.dtype, form: str, root: int, comm: Communicator) -> None:
    inputs = _inputs(comm, dtype, [3, 2])
    mine = inputs[comm.rank].to(comm.device, copy=True)
    for x in (mine, strided(mine)):
        apply(comm.broadcast, form, x, inputs[root], comm.device, src=root)


def _gather(dtype: torch.dtype, form: str, dim: int, root: int, comm: Communicator) -> None:
    inputs = _inputs(comm, dtype, [2, 3, 4])
    expected = _cat(inputs, dim) if comm.rank == root else None
    mine = inputs[comm.rank].to(comm.device, copy=True)
    apply(comm.gather, form, mine, expected, comm.device, dim=dim, dst=root)


def _scatter(dtype: torch.dtype, form: str, dim: int, root: int, comm: Communicator) -> None:
    n = comm.world_size
    shape = [2, 3, 4]
    shape[dim] = 2 * n
    whole = values(root, shape, dtype)
    expected = whole.narrow(dim, 2 * comm.rank, 2)
    if comm.rank == root:
        apply(
            comm.scatter,
            form,
            whole.to(comm.device, copy=True),
            expected,
            comm.device,
            dim=dim,
            src=root,
        )
        return
    out = torch.zeros(expected.shape, dtype=dtype, device=comm.device)
    out = strided(out) if form == "strided_out" else out
    result = comm.scatter(None, src=root, dim=dim, out=out, async_op=form == "async")
    assert (result.wait() if form == "async" else result) is out
    same(out, expected)


def _ring(dtype: torch.dtype, comm: Communicator) -> None:
    n = comm.world_size
    inputs = _inputs(comm, dtype, [3, 2])
    previous = inputs[(comm.rank - 1) % n]
    mine = inputs[comm.rank].to(comm.device, copy=True)
    sent = comm.isend(strided(mine))
    same(comm.recv(previous.shape, dtype), previous)
    sent.wait()
    out = strided(torch.zeros_like(mine))
    got = comm.irecv(src=(comm.rank - 1) % n, out=out)
    comm.send(mine, (comm.rank + 1) % n)
    assert got.wait() is out
    same(out, previous)


def _all_gather_in_place(dtype: torch.dtype, dim: int, comm: Communicator) -> None:
    n = comm.world_size
    inputs = _inputs(comm, dtype, [2, 2])
    shape = [2, 2]
    shape[dim] = 2 * n
    for make in (torch.clone, strided):
        whole = make(torch.zeros(shape, dtype=dtype, device=comm.device))
        whole.narrow(dim, 2 * comm.rank, 2).copy_(inputs[comm.rank])
        assert comm.all_gather_(whole, dim=dim) is whole
        same(whole, torch.cat(inputs, dim))


def _all_to_all_in_place(dtype: torch.dtype, dim: int, comm: Communicator) -> None:
    n = comm.world_size
    inputs = _inputs(comm, dtype, [n, n])
    for make in (torch.clone, strided):
        mine = make(inputs[comm.rank].to(comm.device, copy=True))
        assert comm.all_to_all_(mine, dim=dim) is mine
        same(mine, torch.cat([x.narrow(dim, comm.rank, 1) for x in inputs], dim))


def _broadcast_in_place(dtype: torch.dtype, root: int, comm: Communicator) -> None:
    inputs = _inputs(comm, dtype, [3, 2])
    for make in (torch.clone, strided):
        mine = make(inputs[comm.rank].to(comm.device, copy=True))
        assert comm.broadcast_(mine, src=root) is mine
        same(mine, inputs[root])


def _gather_scatter_in_place(dtype: torch.dtype, dim: int, root: int, comm: Communicator) -> None:
    n = comm.world_size
    inputs = _inputs(comm, dtype, [2, 2])
    gathered = torch.cat(inputs, dim)
    if comm.rank == root:
        whole = torch.zeros(gathered.shape, dtype=dtype, device=comm.device)
        whole.narrow(dim, 2 * root, 2).copy_(inputs[root])
        assert comm.gather_(whole, dst=root, dim=dim) is whole
        same(whole, gathered)
        same(comm.scatter_(whole, src=root, dim=dim), inputs[root])
        same(whole.narrow(dim, 0, 2), inputs[root])
        same(whole.narrow(dim, 2, 2 * n - 2), gathered.narrow(dim, 2, 2 * n - 2))
    else:
        mine = inputs[comm.rank].to(comm.device, copy=True)
        assert comm.gather_(mine, dst=root, dim=dim) is None
        part = torch.zeros_like(mine)
        assert comm.scatter_(part, src=root, dim=dim) is part
        same(part, inputs[comm.rank])


def _one_element(dtype: torch.dtype, verb: str, comm: Communicator) -> None:
    """A row of one element of a transposed matrix: contiguous, and its stride is not 1."""
    n, last = comm.world_size, comm.world_size - 1
    inputs = _inputs(comm, dtype, [1])
    mine = strided(inputs[comm.rank].to(comm.device))
    assert (mine.stride(), mine.is_contiguous()) == ((2,), True)
    if verb == "all_gatherv":
        only = mine if comm.rank == last else mine[:0]
        same(comm.all_gatherv(only, sizes=[0] * last + [1]), inputs[last])
    elif verb == "all_gather":
        same(comm.all_gather(mine), _cat(inputs, 0))
    elif verb == "all_to_all":
        to, of = [0] * n, [0] * n
        to[(comm.rank + 1) % n] = of[comm.rank - 1] = 1
        moved = comm.all_to_all(mine, input_sizes=to, output_sizes=of, out=strided(mine))
        same(moved, inputs[comm.rank - 1])
    elif verb == "gather":
        whole = comm.gather(mine, dst=last)
        if comm.rank == last:
            same(whole, _cat(inputs, 0))
    elif verb == "scatter":
        x = strided(_cat(inputs, 0).to(comm.device)) if comm.rank == last else None
        same(comm.scatter(x, src=last, out=strided(mine)), inputs[comm.rank])
    else:
        same(comm.broadcast(mine, src=last), inputs[last])
        same(comm.broadcast_(mine, src=last), inputs[last])


def _one_element_ring(dtype: torch.dtype, comm: Communicator) -> None:
    inputs = _inputs(comm, dtype, [1])
    mine = strided(inputs[comm.rank].to(comm.device))
    sent = comm.isend(mine)
    same(comm.recv(out=strided(mine)), inputs[comm.rank - 1])
    sent.wait()
