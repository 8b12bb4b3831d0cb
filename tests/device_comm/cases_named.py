"""Rows of the table: worked examples, odd tensors, wrong arguments, many operations at once."""

from __future__ import annotations

import asyncio
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from device_comm import Communicator, ReduceOp, Work
from tests.device_comm.cases import Case
from tests.device_comm.oracle import reduced, same, values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COLLECTIVES = frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast"})
ROOTED = frozenset({"reduce", "gather", "scatter"})
UNEVEN = frozenset({"all_gatherv", "reduce_scatterv", "all_to_all"})
P2P = frozenset({"send", "recv"})
NAN = float("nan")


def named_cases(n: int) -> Iterator[Case]:
    """The worked examples of the specification for this many ranks, and the odd ones."""
    rows: list[tuple[frozenset[str], Callable[[Communicator], None]]] = [
        (COLLECTIVES, all_gather_makes_rows_of_ranks),
        (COLLECTIVES, odd_tensors),
        (COLLECTIVES, autograd_is_left_out),
        (COLLECTIVES, reductions_are_the_same_everywhere),
        (COLLECTIVES, awaiting_works),
        (COLLECTIVES | UNEVEN | ROOTED, empty_tensors),
        (COLLECTIVES | UNEVEN | ROOTED | P2P, wrong_arguments_move_nothing),
        (UNEVEN, outputs_that_are_inputs_too),
        (COLLECTIVES | UNEVEN, many_in_flight),
        (frozenset({"barrier", "all_gather"}), barrier_waits_for_the_late),
    ]
    if n == 2:
        rows += [
            (COLLECTIVES, reduce_scatter_of_two),
            (COLLECTIVES | UNEVEN | ROOTED, examples_of_two),
            (P2P, crossed_sends_complete),
            (P2P, sizes_are_ints_or_sequences),
            (P2P, handles_may_be_dropped),
        ]
    if n == 4:
        rows += [(COLLECTIVES | ROOTED, examples_of_four)]
    for verbs, body in rows:
        yield Case(body.__name__, verbs, torch.float32, body)


def _tensor(comm: Communicator, data: object, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(data, dtype=dtype, device=comm.device)


def all_gather_makes_rows_of_ranks(comm: Communicator) -> None:
    mine = torch.full((2, 1), float(comm.rank), device=comm.device)
    ranks = [float(rank) for rank in range(comm.world_size)]
    same(comm.all_gather(mine, dim=1), torch.tensor([ranks, ranks]))
    cube = mine.reshape(1, 2, 1)
    for dim in (2, -1):
        same(comm.all_gather(cube, dim=dim), torch.tensor([[ranks, ranks]]))


def reduce_scatter_of_two(comm: Communicator) -> None:
    mine = _tensor(comm, [[1, 2, 3, 4]]) * (comm.rank + 1)
    expected = [[3.0, 6.0]] if comm.rank == 0 else [[9.0, 12.0]]
    same(comm.reduce_scatter(mine, dim=1), torch.tensor(expected))
    cube = torch.ones(2, 4, 6, device=comm.device)
    assert comm.reduce_scatter(cube, dim=-1).shape == (2, 4, 3)


def examples_of_two(comm: Communicator) -> None:
    rank = comm.rank
    mine = _tensor(comm, [1, 2] if rank == 0 else [3, 4])
    same(comm.all_reduce(mine), torch.tensor([4.0, 6.0]))
    same(comm.all_reduce(mine[:1], op=ReduceOp.AVG), torch.tensor([2.0]))
    slots = _tensor(comm, [0, 0])
    slots[rank] = rank + 1
    same(comm.all_gather_(slots), torch.tensor([1.0, 2.0]))
    same(comm.reduce_scatter_(mine), torch.tensor([4.0 + 2 * rank]))
    own = _tensor(comm, [rank])
    gathered = comm.gather(own, dst=1)
    assert (gathered is None) == (rank == 0)
    if gathered is not None:
        same(gathered, torch.tensor([0.0, 1.0]))
    part = torch.empty(1, device=comm.device)
    comm.scatter(_tensor(comm, [5, 6]) if rank == 0 else None, out=part)
    same(part, torch.tensor([5.0 + rank]))
    chunks = _tensor(comm, [0, 1] if rank == 0 else [10, 11])
    same(comm.all_to_all(chunks), torch.tensor([0.0, 10.0] if rank == 0 else [1.0, 11.0]))
    rows = _tensor(comm, [1] if rank == 0 else [2, 3])
    same(comm.all_gatherv(rows, sizes=[1, 2]), torch.tensor([1.0, 2.0, 3.0]))
    halves = comm.reduce_scatterv(_tensor(comm, [1, 2, 3]), sizes=[1, 2])
    same(halves, torch.tensor([2.0] if rank == 0 else [4.0, 6.0]))


def examples_of_four(comm: Communicator) -> None:
    rank = comm.rank
    mine = _tensor(comm, [rank + 1, 3 * rank + 2], torch.int64)
    for op, expected in {
        ReduceOp.SUM: [10, 26],
        ReduceOp.PRODUCT: [24, 880],
        ReduceOp.MIN: [1, 2],
        ReduceOp.MAX: [4, 11],
        ReduceOp.BAND: [0, 0],
        ReduceOp.BOR: [7, 15],
        ReduceOp.BXOR: [4, 4],
    }.items():
        same(comm.all_reduce(mine, op=op), torch.tensor(expected))
    same(comm.all_reduce(mine.float(), op=ReduceOp.AVG), torch.tensor([2.5, 6.5]))
    one = _tensor(comm, [rank + 1], torch.int64)
    result = comm.reduce(one, dst=0)
    assert (result is None) == (rank != 0)
    if result is not None:
        same(result, torch.tensor([10]))
    same(one, torch.tensor([rank + 1]))
    same(
        comm.all_reduce(_tensor(comm, [1 + 1j], torch.complex64)),
        torch.tensor([4 + 4j], dtype=torch.complex64),
    )


def odd_tensors(comm: Communicator) -> None:
    n = comm.world_size
    scalar = torch.tensor(comm.rank + 1.0, device=comm.device)
    same(comm.all_reduce(scalar), torch.tensor(n * (n + 1) / 2))
    same(comm.broadcast(scalar, src=n - 1), torch.tensor(float(n)))
    parts = [values(rank, (4,), torch.complex64) for rank in range(n)]
    lazy = torch.conj(parts[comm.rank].to(comm.device, copy=True))
    same(comm.all_reduce(lazy).resolve_conj(), reduced([p.conj() for p in parts], ReduceOp.SUM))
    same(comm.all_gather(lazy).resolve_conj(), torch.cat([part.conj() for part in parts]))
    negated = lazy.imag
    gathered = comm.all_gather(negated)
    same(gathered.resolve_neg(), torch.cat([-part.imag for part in parts]))
    expanded = _tensor(comm, [float(comm.rank)]).expand(3)
    same(comm.all_reduce(expanded), torch.full((3,), n * (n - 1) / 2))
    with torch.inference_mode():
        same(comm.all_reduce(scalar.clone()), torch.tensor(n * (n + 1) / 2))
    conj_out = torch.conj(torch.zeros(4, dtype=torch.complex64, device=comm.device))
    assert comm.all_reduce(parts[comm.rank].to(comm.device, copy=True), out=conj_out) is conj_out
    same(conj_out.resolve_conj(), reduced(parts, ReduceOp.SUM))


def autograd_is_left_out(comm: Communicator) -> None:
    n = comm.world_size
    weight = torch.nn.Parameter(_tensor(comm, [1.0, 2.0]))
    if n > 1:
        assert not comm.all_reduce(weight).requires_grad
        assert not comm.all_gather(weight, dim=0).requires_grad
    if comm.rank:
        with torch.no_grad():
            weight.zero_()
    assert comm.broadcast_(weight) is weight
    assert weight.requires_grad
    same(weight, torch.tensor([1.0, 2.0]))


def reductions_are_the_same_everywhere(comm: Communicator) -> None:
    if not comm.capabilities.identical:
        return
    generator = torch.Generator().manual_seed(comm.rank)
    for numel in (3, 1000, 70_001):
        for dtype in (torch.float32, torch.bfloat16):
            mine = torch.randn(numel, generator=generator).to(comm.device, dtype)
            for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT):
                found = comm.all_gather(comm.all_reduce(mine, op=op).view(torch.uint8)[None], dim=0)
                assert bool((found == found[0]).all()), f"{op.name} of {numel} {dtype} differs"


def awaiting_works(comm: Communicator) -> None:
    n = comm.world_size
    mine = _tensor(comm, [comm.rank + 1.0])

    async def both() -> list[Tensor]:
        works = [comm.all_reduce(mine, async_op=True), comm.all_gather(mine, async_op=True)]
        return [await work for work in works]

    total, gathered = asyncio.run(both())
    same(total, torch.tensor([n * (n + 1) / 2]))
    same(gathered, torch.arange(1.0, n + 1))


def empty_tensors(comm: Communicator) -> None:
    n, device = comm.world_size, comm.device
    empty = torch.empty(2, 0, 3, device=device)
    root = empty if comm.rank == 0 else None
    for form in (False, True):
        results = [
            comm.all_reduce(empty, async_op=form),
            comm.broadcast(empty, async_op=form),
            comm.all_gather(empty, dim=1, async_op=form),
            comm.reduce_scatter(empty, dim=1, async_op=form),
            comm.all_gatherv(empty, dim=1, async_op=form),
            comm.reduce_scatterv(empty, dim=1, async_op=form),
            comm.all_to_all(empty, dim=1, async_op=form),
            comm.scatter(root, dim=1, out=torch.empty_like(empty), async_op=form),
        ]
        for result in results:
            found = result.wait() if isinstance(result, Work) else result
            assert found.shape == empty.shape
    assert comm.all_gather(empty, dim=2).shape == (2, 0, 3 * n)
    for result in (comm.gather(empty, dim=0), comm.reduce(empty)):
        assert (result is None) == (comm.rank != 0)
    if n > 1:
        comm.isend(empty).wait()
        assert comm.recv(empty.shape, empty.dtype).shape == empty.shape
    same(comm.all_reduce(_tensor(comm, [1.0])), torch.tensor([float(n)]))


class Wrapping(torch.Tensor):
    """A tensor without memory of its own, as DTensor is one."""

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inside.shape, dtype=inside.dtype, device=inside.device
        )

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("nothing is to be computed of it")


def _nested(x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # torch says that it may change yet
        return torch.nested.nested_tensor([x[0], x[:2].flatten()])


def wrong_arguments_move_nothing(comm: Any) -> None:  # whose types would refuse them
    n, device = comm.world_size, comm.device
    other = (comm.rank + 1) % n
    x = torch.zeros(n + 1, 3, device=device)
    flat, whole = torch.zeros(3, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    wide, zero = x[:1].expand_as(x), torch._efficientzerotensor((3,), device=device)
    calls: dict[type[Exception], list[Callable[[], object]]] = {
        TypeError: [
            lambda: comm.all_reduce([1.0]),
            lambda: comm.all_reduce(x, op=0),
            lambda: comm.all_reduce(x, op=ReduceOp.BAND),
            lambda: comm.all_reduce(whole, op=ReduceOp.AVG),
            lambda: comm.all_reduce(x.to(torch.complex64), op=ReduceOp.MAX),
            lambda: comm.all_reduce(x.to(torch.float8_e4m3fn)),
            lambda: comm.all_reduce(x.to_sparse()),
            lambda: comm.all_reduce(_nested(x)),
            lambda: comm.broadcast(_nested(x)),
            lambda: torch.func.vmap(comm.all_reduce)(x),
            lambda: torch.func.grad(lambda y: comm.all_reduce(y).sum())(x),
            lambda: comm.all_reduce(zero),
            lambda: comm.broadcast(zero),
            lambda: comm.all_reduce(Wrapping(x)),
            lambda: comm.all_reduce(x, out=Wrapping(x)),
            lambda: comm.all_reduce(x, out=torch.zeros_like(x, dtype=torch.float64)),
            lambda: comm.all_gather(x, dim=True),
            lambda: comm.all_gather(x, dim=0.0),
            lambda: comm.all_gather(x, dim="0"),
            lambda: comm.all_gatherv(x, sizes=n),
            lambda: comm.all_gatherv([x, x], out=x),
            lambda: comm.broadcast(x, src=None),
            lambda: comm.broadcast(x, src=True),
        ],
        ValueError: [
            lambda: comm.all_reduce(torch.zeros(3, device="meta")),
            lambda: comm.all_reduce(x, out=x[:1]),
            lambda: comm.all_reduce(x, out=wide),
            lambda: comm.all_reduce_(wide),
            lambda: comm.all_gather(x, dim=2),
            lambda: comm.all_gather(x, dim=-3),
            *(
                lambda verb=verb, dim=dim: verb(flat, dim=dim)
                for verb in (comm.all_gather, comm.reduce_scatter, comm.all_to_all, comm.gather)
                for dim in (2**63, -(2**70))
            ),
            lambda: comm.all_gather(x[0, 0]),
            lambda: comm.all_gather(x, dim=0, out=torch.zeros_like(x[1:])),
            lambda: comm.all_gatherv(x, sizes=[n + 2] * n),
            lambda: comm.all_gatherv(x, sizes=[n + 1] * (n + 1)),
            lambda: comm.all_to_all(x, input_sizes=[n + 1] + [0] * (n - 1)),
            lambda: comm.broadcast(x, src=-1),
            lambda: comm.broadcast(x, src=n),
            lambda: comm.reduce(x, dst=n),
            lambda: comm.gather(x, dst=-1),
            lambda: comm.scatter(None, src=comm.rank),
            lambda: comm.send(x, comm.rank),
            lambda: comm.recv((1,), torch.float32, comm.rank),
            lambda: comm.recv((1,), src=other),
            lambda: comm.send(x, n),
        ],
    }
    if n > 1:
        calls[TypeError] += [
            lambda: comm.recv(1.5, torch.float32),
            lambda: comm.recv(True, torch.float32),
            lambda: comm.irecv((1, "2"), torch.float32),
            *(lambda peer=peer: comm.send(x, peer) for peer in (True, False, 1.0)),
            *(lambda peer=peer: comm.recv((1,), torch.float32, peer) for peer in (False, 0.0)),
            lambda: comm.recv((3,), torch.int64, other, out=flat),
        ]
        calls[ValueError] += [
            *(lambda wrong=wrong: comm.all_reduce(x, timeout=wrong) for wrong in (-1, -0.5, NAN)),
            lambda: comm.reduce_scatter(x, dim=0),
            lambda: comm.reduce_scatter_(x, dim=0),
            lambda: comm.reduce_scatterv(x, dim=0, sizes=[n] * n),
            lambda: comm.reduce_scatterv(x, dim=0, sizes=[n + 2] + [-1] * (n - 1)),
            lambda: comm.all_to_all(x, dim=0),
            lambda: comm.scatter(x, src=other),
            lambda: comm.scatter(None, src=other),
            lambda: comm.scatter(None, src=other, out=wide),
            lambda: comm.scatter_(wide, src=other),
            lambda: comm.recv(-1, torch.float32),
            lambda: comm.irecv((2, -1), torch.float32),
            lambda: comm.recv((2,), torch.float32, other, out=flat),
        ]
    for kind, each in calls.items():
        for number, call in enumerate(each):
            try:
                call()
            except kind:
                pass
            else:
                raise AssertionError(f"call {number} raised no {kind.__name__}")
            same(comm.all_reduce(_tensor(comm, [1.0])), torch.tensor([float(n)]))


def outputs_that_are_inputs_too(comm: Communicator) -> None:
    """Of a list, an output may share memory with an input behind it."""
    n, mine = comm.world_size, float(comm.rank)
    first, room = _tensor(comm, [mine]), _tensor(comm, [mine + 10] * n)
    outs = [room, torch.empty(n, device=comm.device)]
    found = comm.all_gatherv([first, room[:1]], 0, [1] * n, out=outs)
    for result, more in zip(found, (0.0, 10.0), strict=True):
        same(result, torch.arange(n) + more)


def sizes_are_ints_or_sequences(comm: Communicator) -> None:
    data = torch.arange(64.0, device=comm.device)
    for size in (64, (64,), [64], torch.Size([64]), (8, 8), [64, 1]):
        for receive in (comm.recv, lambda *args: comm.irecv(*args).wait()):
            sent = comm.isend(data)
            got = receive(size, torch.float32)
            assert tuple(got.shape) == ((size,) if isinstance(size, int) else tuple(size))
            same(got.view(-1), data.cpu())
            sent.wait()
    sent = comm.isend(data)
    out = torch.zeros(64, device=comm.device)
    assert comm.recv(64, torch.float32, out=out) is out
    sent.wait()
    same(out, data.cpu())


def many_in_flight(comm: Communicator) -> None:
    n, rank = comm.world_size, comm.rank
    works: list[tuple[Work[Tensor], Tensor]] = []
    for turn in range(6):
        parts = [values(r, (n, 7), torch.float32, turn) for r in range(n)]
        mine = parts[rank].to(comm.device, copy=True)
        works += [
            (comm.all_reduce(mine, async_op=True), reduced(parts, ReduceOp.SUM)),
            (comm.all_gather(mine, dim=1, async_op=True), torch.cat(parts, 1)),
            (
                comm.reduce_scatter(mine, dim=0, async_op=True),
                reduced(parts, ReduceOp.SUM)[rank : rank + 1],
            ),
            (comm.broadcast(mine, src=turn % n, async_op=True), parts[turn % n]),
            (comm.all_gatherv(mine, async_op=True), torch.cat(parts)),
        ]
        same(comm.all_reduce(mine, op=ReduceOp.MAX), reduced(parts, ReduceOp.MAX))
        if turn % 3 == 0:
            works.pop()  # dropped before it is done
    for work, expected in reversed(works):
        same(work.wait(), expected)


def barrier_waits_for_the_late(comm: Communicator) -> None:
    late = comm.world_size - 1
    if comm.rank == late:
        time.sleep(0.2)
    entered = time.monotonic()  # the same clock for all processes of a host
    comm.barrier()
    mine = torch.tensor([[entered, time.monotonic()]], dtype=torch.float64, device=comm.device)
    times = comm.all_gather(mine, dim=0)
    assert times[:, 1].min() >= times[:, 0].max()
    work = comm.barrier(async_op=True)
    assert work is not None
    assert work.wait() is None


def crossed_sends_complete(comm: Communicator) -> None:
    other = 1 - comm.rank
    big = torch.full((1 << 20,), float(comm.rank), device=comm.device)
    sent = comm.isend(big, other)
    got = comm.recv(big.shape, big.dtype, other)
    sent.wait()
    same(got[:3], torch.full((3,), float(other)))
    assert bool((got == other).all())
    receiving = comm.irecv((2,), torch.float32, other)
    sending = comm.isend(_tensor(comm, [comm.rank, 7.0]), other)
    same(receiving.wait(), torch.tensor([float(other), 7.0]))
    sending.wait()


def handles_may_be_dropped(comm: Communicator) -> None:
    if comm.rank == 0:
        for number in range(20):
            comm.isend(torch.full((50_000,), float(number), device=comm.device))
        same(comm.recv((1,), torch.float32), torch.tensor([20.0]))
    else:
        time.sleep(0.1)
        for number in range(20):
            got = comm.recv((50_000,), torch.float32)
            assert bool((got == number).all())
        comm.send(_tensor(comm, [20.0]))
