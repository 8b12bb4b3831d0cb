"""What kernels compute and move, and that they write nothing beside it: see `run_threads`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import ReduceOp
from device_comm.cuda.ipc import abi
from device_comm.cuda.ipc.abi import Algorithm
from device_comm.span import Span
from tests.device_comm.cuda.emulator import (
    Rank,
    World,
    at,
    in_rank_order,
    moved,
    run_threads,
    same_numbers,
    small_layout,
    wild,
)
from tests.device_comm.oracle import MOVED

if TYPE_CHECKING:
    from torch import Tensor

    from tests.device_comm.cuda.emulator import Emulation

OPS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG)
NUMBERS = (torch.float32, torch.float16, torch.bfloat16)
SIZES = {1: 1, 7: 1, 8: 0, 33: 3, 301: 0, 1999: 5}
"""Elements: less than a cell, odd, several chunks; and how many lie before them in the first cell:
whole cells are reduced in another way."""


def bits(*tensors: Tensor) -> bytes:
    return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_all_reduce(emulation: Emulation, n: int, algorithm: Algorithm, dtype: torch.dtype) -> None:
    def body(rank: Rank) -> bytes:
        made = b""
        for turn, (count, shift) in enumerate(SIZES.items()):
            op = OPS[turn % len(OPS)]
            parts = [wild(r, count, dtype) for r in range(n)]
            mine = at(parts[rank.rank], shift * dtype.itemsize)
            if algorithm is Algorithm.PACKETS and mine.nbytes > rank.world.layout.packet_bytes:
                continue
            output = mine if turn % 2 else at(torch.zeros_like(mine), shift * mine.itemsize)
            rank.all_reduce(output, mine, op, algorithm=algorithm)
            same_numbers(output, in_rank_order(parts, op))
            made += bits(output)
        return made

    results = run_threads(World(small_layout(n)), emulation, body)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("n", [3, 8])
def test_reduce_and_reduce_scatter(emulation: Emulation, n: int) -> None:
    def body(rank: Rank) -> None:
        for turn, op in enumerate(OPS):
            dtype, root = NUMBERS[turn % 3], turn % n
            sizes = [97 * ((r + turn) % 3) + r for r in range(n)]
            parts = [wild(r, sum(sizes), dtype) for r in range(n)]
            mine = at(parts[rank.rank], dtype.itemsize)
            expected = in_rank_order(parts, op)
            whole, piece = (
                at(torch.zeros_like(mine)),
                at(torch.zeros(sizes[rank.rank], dtype=dtype)),
            )
            pointers = whole.data_ptr(), mine.data_ptr()
            rank.run(rank.plan.reduce(*pointers, mine.nbytes, dtype, op, root))
            nbytes = [size * dtype.itemsize for size in sizes]
            pointers = piece.data_ptr(), mine.data_ptr()
            rank.run(rank.plan.reduce_scatter(*pointers, nbytes, dtype, op))
            same_numbers(whole, expected if rank.rank == root else torch.zeros_like(whole))
            same_numbers(piece, expected.split(sizes)[rank.rank])

    run_threads(World(small_layout(n)), emulation, body)


@pytest.mark.parametrize("n", [3, 8])
def test_all_gather_and_all_to_all(emulation: Emulation, n: int) -> None:
    def body(rank: Rank) -> None:
        for turn, dtype in enumerate(MOVED):
            size = dtype.itemsize
            sizes = [(r * 5 + turn) % 4 * 37 + turn % 2 for r in range(n)]
            parts = [moved(r, sizes[r], dtype) for r in range(n)]
            mine = at(parts[rank.rank], size * (turn % 3))
            row = at(torch.zeros(sum(sizes), dtype=dtype), size)
            rank.all_gather(row, mine, [count * size for count in sizes])
            assert torch.equal(row, torch.cat(parts)), dtype

            table = [[(a + 2 * b + turn) % 3 * 21 for b in range(n)] for a in range(n)]
            sends = [moved(a, sum(table[a]), dtype).split(table[a]) for a in range(n)]
            source = at(torch.cat(sends[rank.rank]), size)
            expected = torch.cat([sends[a][rank.rank] for a in range(n)])
            row = at(torch.zeros_like(expected), size)
            gets = [table[a][rank.rank] * size for a in range(n)]
            rank.all_to_all(row, source, gets, [count * size for count in table[rank.rank]])
            assert torch.equal(row, expected), dtype

    run_threads(World(small_layout(n)), emulation, body)


@pytest.mark.parametrize("n", [3, 8])
def test_broadcast_gather_and_scatter(emulation: Emulation, n: int) -> None:
    def body(rank: Rank) -> None:
        for root in (0, n - 1):
            for count in (1, 113, 1999):
                parts = [moved(r, count, torch.uint8) for r in range(n)]
                mine, is_root = at(parts[rank.rank], root), rank.rank == root
                row = at(torch.zeros(n * count if is_root else 0, dtype=torch.uint8))
                rank.run(rank.plan.gather(row.data_ptr(), mine.data_ptr(), count, root))
                assert torch.equal(row, torch.cat(parts)[: row.numel()])
                buffer = at(mine)
                rank.broadcast(buffer, root)
                assert torch.equal(buffer, parts[root])
                piece = at(torch.zeros_like(mine))
                rank.run(rank.plan.scatter(piece.data_ptr(), row.data_ptr(), count, root))
                assert torch.equal(piece, parts[rank.rank])

    run_threads(World(small_layout(n)), emulation, body)


def test_a_barrier_waits_for_all_ranks(emulation: Emulation) -> None:
    arrived: list[int] = []

    def body(rank: Rank) -> None:
        for turn in range(12):
            if turn % 4 == rank.rank:
                time.sleep(0.005)
            arrived.append(turn)
            rank.run(rank.plan.barrier())
            assert arrived.count(turn) == 4

    run_threads(World(small_layout(4)), emulation, body)


@pytest.mark.parametrize("n", [3, 8])
@pytest.mark.parametrize("shift", [0, 4])
def test_sources_of_a_table_are_read_in_place(emulation: Emulation, n: int, shift: int) -> None:
    """More whole cells than a thread reads at a time, and a rest; or no whole cell."""
    count, dtype = 701, torch.float32
    sources = [at(wild(r, count, dtype), shift * (r % 2)) for r in range(n)]
    parts = [source.clone() for source in sources]
    packed = bytearray(abi.pack_sources([source.data_ptr() for source in sources]))
    table = torch.frombuffer(packed, dtype=torch.uint8).data_ptr()
    expected = in_rank_order(parts, ReduceOp.SUM)
    counts = [count // n + (count % n if r == 0 else 0) for r in range(n)]

    def body(rank: Rank) -> None:
        mine = sources[rank.rank]
        for _ in range(2):
            for algorithm in (Algorithm.ONE_SHOT, Algorithm.TWO_SHOT):
                whole = at(torch.zeros_like(mine))
                rank.all_reduce(whole, mine, algorithm=algorithm, table=table)
                same_numbers(whole, expected)
            row = at(torch.zeros(n * count))
            rank.all_gather(row, mine, (mine.nbytes,) * n, table=table)
            same_numbers(row, torch.cat(parts))
            piece = at(torch.zeros(counts[rank.rank]))
            to, given, sizes = piece.data_ptr(), mine.data_ptr(), [4 * c for c in counts]
            rank.run(rank.plan.reduce_scatter(to, given, sizes, dtype, ReduceOp.SUM, table=table))
            same_numbers(piece, expected.split(counts)[rank.rank])
            mine.fill_(-1.0)  # no rank reads it any more
            rank.run(rank.plan.barrier())
            mine.copy_(parts[rank.rank])
        rank.all_reduce(mine, mine, algorithm=Algorithm.TWO_SHOT, table=table)
        same_numbers(mine, expected)

    run_threads(World(small_layout(n)), emulation, body)


# --- all-reduce, residual and norm in one kernel -----------------------------------------

EPSILON = 1e-5
ERRORS = {torch.float32: 2**-20, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""The relative error of what is rounded to the dtype, and before within single precision."""
SHAPES = ((1, 8), (3, 24), (1, 240), (7, 40))
"""Fewer threads than cells and more, fewer blocks than rows and more."""


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normed(kept: Tensor, weight: Tensor) -> Tensor:
    wide = kept.double()
    mean = wide.square().mean(-1, keepdim=True)
    return wide * torch.rsqrt(mean + EPSILON) * weight.double()


def run_norm(
    rank: Rank, source: Tensor, residual: Tensor, weight: Tensor, output: Tensor, kept: Tensor
) -> None:
    tensors = (source, residual, weight, output, kept)
    x, added, scale, *takes = (Span(each.data_ptr(), each.nbytes) for each in tensors)
    launches = rank.plan.all_reduce_norm
    rank.run(launches((x, added, scale), (takes[0], takes[1]), source.dtype, EPSILON))


@pytest.mark.parametrize("n", [2, 8])
@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_sums_are_added_to_the_residual_and_normed(
    emulation: Emulation, n: int, dtype: torch.dtype
) -> None:
    def body(rank: Rank) -> bytes:
        made = b""
        for turn, shape in enumerate(SHAPES):
            parts = [numbers(100 * turn + r, shape, dtype) * 3.0**r for r in range(n)]
            residual, weight = numbers(turn, shape, dtype), numbers(-turn, shape[-1:], dtype)
            shift = turn % 2 * dtype.itemsize
            mine, given = at(parts[rank.rank], shift), at(residual, shift)
            output = mine if turn == 1 else at(torch.zeros_like(mine))
            kept = given if turn == 2 else at(torch.zeros_like(mine), shift)
            run_norm(rank, mine, given, weight, output, kept)
            wide = [part.float() for part in (*parts, residual)]
            assert bits(kept) == bits(in_rank_order(wide, ReduceOp.SUM).to(dtype))
            torch.testing.assert_close(
                output.double(), normed(kept, weight), rtol=ERRORS[dtype], atol=1e-7
            )
            made += bits(output, kept)
        return made

    results = run_threads(World(small_layout(n, packet_bytes=2048)), emulation, body)
    assert all(result == results[0] for result in results)


def test_norms_alternate_with_sums_and_zeros_stay_zeros(emulation: Emulation) -> None:
    def body(rank: Rank) -> None:
        zeros, weight = torch.zeros(2, 8), torch.ones(8)
        for turn in range(6):
            mine = torch.full((2, 8), float(rank.rank + turn))
            residual = torch.ones(2, 8)
            output, kept = torch.zeros_like(mine), torch.zeros_like(mine)
            run_norm(rank, mine, residual, weight, output, kept)
            assert torch.equal(kept, torch.full_like(kept, 2.0 * turn + 2))
            torch.testing.assert_close(output, torch.ones_like(output))
            rank.all_reduce(mine, mine)
            assert torch.equal(mine, torch.full_like(mine, 2.0 * turn + 1))
        run_norm(rank, zeros, zeros, weight, output, zeros)
        assert torch.equal(output, zeros)

    run_threads(World(small_layout(2)), emulation, body)
