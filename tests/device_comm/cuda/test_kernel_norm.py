"""All-reduce, residual and norm in one kernel, beside what torch makes in double precision."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import ReduceOp
from device_comm.cuda.ipc import abi
from device_comm.cuda.ipc.abi import Limits
from device_comm.cuda.ipc.planner import Planner
from device_comm.span import Span
from tests.device_comm.cuda.emulated_world import (
    Rank,
    World,
    at,
    in_rank_order,
    run_threads,
    small_layout,
)

if TYPE_CHECKING:
    from torch import Tensor

    from device_comm.cuda.ipc.abi import KernelLaunch
    from tests.device_comm.cuda.emulator import Emulation

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


def launches(
    plan: Planner, source: Tensor, residual: Tensor, weight: Tensor, output: Tensor, kept: Tensor
) -> list[KernelLaunch]:
    spans = [Span(each.data_ptr(), each.nbytes) for each in (source, residual, weight)]
    takes = Span(output.data_ptr(), output.nbytes), Span(kept.data_ptr(), kept.nbytes)
    return plan.all_reduce_norm((spans[0], spans[1], spans[2]), takes, source.dtype, EPSILON)


def bits(*tensors: Tensor) -> bytes:
    return b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)


@pytest.mark.parametrize("n", [2, 3, 8])
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
            rank.run(launches(rank.plan, mine, given, weight, output, kept))
            wide = [part.float() for part in (*parts, residual)]
            assert bits(kept) == bits(in_rank_order(wide, ReduceOp.SUM).to(dtype))
            torch.testing.assert_close(
                output.double(), normed(kept, weight), rtol=ERRORS[dtype], atol=1e-7
            )
            made += bits(output, kept)
        return made

    results = run_threads(World(small_layout(n, packet_bytes=2048)), emulation, body)
    assert all(result == results[0] for result in results)


def test_it_alternates_with_other_packets(emulation: Emulation) -> None:
    def body(rank: Rank) -> None:
        for turn in range(6):
            mine = torch.full((2, 8), float(rank.rank + turn))
            residual, weight = torch.ones(2, 8), torch.ones(8)
            output, kept = torch.zeros_like(mine), torch.zeros_like(mine)
            rank.run(launches(rank.plan, mine, residual, weight, output, kept))
            assert torch.equal(kept, torch.full_like(kept, 2.0 * turn + 2))
            torch.testing.assert_close(output, torch.ones_like(output))
            pointers = mine.data_ptr(), mine.data_ptr()
            rank.run(rank.plan.all_reduce(*pointers, 64, torch.float32, ReduceOp.SUM))
            assert torch.equal(mine, torch.full_like(mine, 2.0 * turn + 1))

    run_threads(World(small_layout(2)), emulation, body)


def test_rows_of_zeros_are_normed_to_zeros(emulation: Emulation) -> None:
    def body(rank: Rank) -> None:
        zeros, weight, output = torch.zeros(1, 8), torch.ones(8), torch.ones(1, 8)
        rank.run(launches(rank.plan, zeros, zeros, weight, output, zeros))
        assert torch.equal(output, zeros)

    run_threads(World(small_layout(2)), emulation, body)


# --- without a kernel --------------------------------------------------------------------


def plan(packet_bytes: int = 4096) -> Planner:
    layout = abi.RegionLayout(2, packet_bytes=packet_bytes)
    return Planner(abi.Group((1, 2), 3, 0, layout, 0), Limits(max_blocks=4))


def rows_in_half(count: int) -> list[KernelLaunch]:
    rows = [Span(place, 128 * count) for place in (1, 2, 4, 5)]
    puts = rows[0], rows[1], Span(3, 128)
    return plan().all_reduce_norm(puts, (rows[2], rows[3]), torch.float16, 0.5)


@pytest.mark.parametrize(("rows", "grid"), [(0, 1), (1, 1), (3, 3), (5, 4)])
def test_each_row_has_a_block(rows: int, grid: int) -> None:
    (launch,) = rows_in_half(rows)
    assert (launch.kernel, launch.grid) == ("ipc_packets_norm_float16", grid)
    size = rows * 128
    spans = (1, size, 2, size, 3, 128, *(0,) * 10, 4, size, 5, size, *(0,) * 12)
    expected = struct.pack("<3QIIfI32Q", 0, 0, 0, 0, 0, 0.5, 0, *spans)
    assert launch.args[0][abi.GROUP_BYTES :] == expected


def test_there_are_no_more_rows_than_go_in_packets() -> None:
    assert rows_in_half(32)
    with pytest.raises(ValueError, match="packets carry at most 4096 bytes, not 4224"):
        rows_in_half(33)
