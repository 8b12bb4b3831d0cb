"""What the kernels compute and move, on emulated ranks that are threads."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import ReduceOp
from device_comm.cuda.ipc.abi import Algorithm
from tests.device_comm.cuda.emulated_world import (
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
    from tests.device_comm.cuda.emulator import Emulation

OPS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG)
NUMBERS = (torch.float32, torch.float16, torch.bfloat16)
SIZES = {1: 1, 7: 1, 8: 0, 33: 3, 301: 0, 1999: 5}
"""Elements: less than a cell, odd, several chunks; and how many lie before them in the first cell:
whole cells are reduced in another way."""


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_all_reduce(emulation: Emulation, n: int, algorithm: Algorithm, dtype: torch.dtype) -> None:
    def body(rank: Rank) -> list[bytes]:
        bits = []
        for turn, (count, shift) in enumerate(SIZES.items()):
            op = OPS[turn % len(OPS)]
            parts = [wild(r, count, dtype) for r in range(n)]
            mine = at(parts[rank.rank], shift * dtype.itemsize)
            size = mine.nbytes
            if algorithm is Algorithm.PACKETS and size > rank.world.layout.packet_bytes:
                continue
            output = mine if turn % 2 else at(torch.zeros_like(mine), shift * mine.itemsize)
            pointers = output.data_ptr(), mine.data_ptr()
            rank.run(rank.plan.all_reduce(*pointers, size, dtype, op, algorithm=algorithm))
            same_numbers(output, in_rank_order(parts, op))
            bits.append(output.view(torch.uint8).numpy().tobytes())
        return bits

    results = run_threads(World(small_layout(n)), emulation, body)
    assert all(bits == results[0] for bits in results)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_reduce_and_reduce_scatter(emulation: Emulation, n: int) -> None:
    def body(rank: Rank) -> None:
        for turn, op in enumerate(OPS):
            dtype, root = NUMBERS[turn % 3], turn % n
            sizes = [97 * ((r + turn) % 3) + r for r in range(n)]
            parts = [wild(r, sum(sizes), dtype) for r in range(n)]
            mine = at(parts[rank.rank], dtype.itemsize)
            expected = in_rank_order(parts, op)
            whole, piece = torch.zeros_like(mine), torch.zeros(sizes[rank.rank], dtype=dtype)
            pointers = whole.data_ptr(), mine.data_ptr()
            rank.run(rank.plan.reduce(*pointers, mine.nbytes, dtype, op, root))
            nbytes = [size * dtype.itemsize for size in sizes]
            pointers = piece.data_ptr(), mine.data_ptr()
            rank.run(rank.plan.reduce_scatter(*pointers, nbytes, dtype, op))
            same_numbers(whole, expected if rank.rank == root else torch.zeros_like(whole))
            same_numbers(piece, expected.split(sizes)[rank.rank])

    run_threads(World(small_layout(n)), emulation, body)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_what_moves_from_all_to_all(emulation: Emulation, n: int) -> None:
    def body(rank: Rank) -> None:
        for turn, dtype in enumerate(MOVED):
            size = dtype.itemsize
            sizes = [(r * 5 + turn) % 4 * 37 + turn % 2 for r in range(n)]
            parts = [moved(r, sizes[r], dtype) for r in range(n)]
            mine = at(parts[rank.rank], size * (turn % 3))
            row = at(torch.zeros(sum(sizes), dtype=dtype), size)
            nbytes = [count * size for count in sizes]
            rank.run(rank.plan.all_gather(row.data_ptr(), mine.data_ptr(), nbytes))
            assert torch.equal(row, torch.cat(parts)), dtype

            table = [[(a + 2 * b + turn) % 3 * 21 for b in range(n)] for a in range(n)]
            sends = [moved(a, sum(table[a]), dtype).split(table[a]) for a in range(n)]
            source = at(torch.cat(sends[rank.rank]), size)
            expected = torch.cat([sends[a][rank.rank] for a in range(n)])
            row = at(torch.zeros_like(expected), size)
            gets = [table[a][rank.rank] * size for a in range(n)]
            gives = [count * size for count in table[rank.rank]]
            rank.run(rank.plan.all_to_all(row.data_ptr(), source.data_ptr(), gets, gives))
            assert torch.equal(row, expected), dtype

    run_threads(World(small_layout(n)), emulation, body)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_what_moves_from_or_to_a_root(emulation: Emulation, n: int) -> None:
    def body(rank: Rank) -> None:
        for root in range(n):
            for count in (1, 113, 1999):
                parts = [moved(r, count, torch.uint8) for r in range(n)]
                mine, is_root = at(parts[rank.rank], root), rank.rank == root
                row = torch.zeros(n * count if is_root else 0, dtype=torch.uint8)
                rank.run(rank.plan.gather(row.data_ptr(), mine.data_ptr(), count, root))
                assert torch.equal(row, torch.cat(parts)[: row.numel()])
                buffer = mine.clone()
                rank.run(rank.plan.broadcast(buffer.data_ptr(), count, root))
                assert torch.equal(buffer, parts[root])
                piece = torch.zeros_like(mine)
                rank.run(rank.plan.scatter(piece.data_ptr(), row.data_ptr(), count, root))
                assert torch.equal(piece, parts[rank.rank])

    run_threads(World(small_layout(n)), emulation, body)


def test_barrier_waits_for_everybody(emulation: Emulation) -> None:
    arrived: list[int] = []

    def body(rank: Rank) -> None:
        for turn in range(20):
            if turn % 4 == rank.rank:
                time.sleep(0.005)
            arrived.append(turn)
            rank.run(rank.plan.barrier())
            assert arrived.count(turn) == 4

    run_threads(World(small_layout(4)), emulation, body)
