"""All-reduce, residual and norm in one kernel, beside what torch makes in double precision."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import ReduceOp
from device_comm.cuda.launches import abi
from device_comm.cuda.launches.launch import Limits
from device_comm.cuda.launches.norm import NormTask
from device_comm.cuda.launches.planner import Planner
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
            task = NormTask.of(mine, given, weight, output, kept, EPSILON)
            rank.run(rank.plan.all_reduce_norm(task))
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
            task = NormTask.of(mine, residual, weight, output, kept, EPSILON)
            rank.run(rank.plan.all_reduce_norm(task))
            assert torch.equal(kept, torch.full_like(kept, 2.0 * turn + 2))
            torch.testing.assert_close(output, torch.ones_like(output))
            pointers = mine.data_ptr(), mine.data_ptr()
            rank.run(rank.plan.all_reduce(*pointers, 64, torch.float32, ReduceOp.SUM))
            assert torch.equal(mine, torch.full_like(mine, 2.0 * turn + 1))

    run_threads(World(small_layout(2)), emulation, body)


def test_rows_of_zeros_are_normed_to_zeros(emulation: Emulation) -> None:
    def body(rank: Rank) -> None:
        zeros, weight, output = torch.zeros(1, 8), torch.ones(8), torch.ones(1, 8)
        task = NormTask.of(zeros, zeros, weight, output, zeros, EPSILON)
        rank.run(rank.plan.all_reduce_norm(task))
        assert torch.equal(output, zeros)

    run_threads(World(small_layout(2)), emulation, body)


# --- without a kernel --------------------------------------------------------------------


def plan(packet_bytes: int = 4096) -> Planner:
    layout = abi.RegionLayout(2, packet_bytes=packet_bytes)
    return Planner(abi.Group((1, 2), 3, 0, layout, 0), Limits(max_blocks=4))


def task(rows: int, hidden: int = 64) -> NormTask:
    return NormTask(1, 2, 3, 4, 5, rows, 2 * hidden, torch.float16, 0.5)


@pytest.mark.parametrize(("rows", "grid"), [(0, 1), (1, 1), (3, 3), (5, 4)])
def test_each_row_has_a_block(rows: int, grid: int) -> None:
    (launch,) = plan().all_reduce_norm(task(rows))
    assert (launch.kernel, launch.grid) == ("ipc_packets_norm_float16", grid)
    size = rows * 128
    spans = (1, size, 2, size, 3, 128, *(0,) * 10, 4, size, 5, size, *(0,) * 12)
    expected = struct.pack("<3QIIfI32Q", 0, 0, 0, 0, 0, 0.5, 0, *spans)
    assert launch.args[0][abi.GROUP_BYTES :] == expected


def test_there_are_no_more_rows_than_go_in_packets() -> None:
    assert plan().all_reduce_norm(task(32))
    with pytest.raises(ValueError, match="4224 bytes do not go in packets; 4096 do"):
        plan().all_reduce_norm(task(33))


@pytest.mark.parametrize(
    ("changed", "to", "said"),
    [
        ("residual", torch.zeros(2, 8), r"residual is of torch.float32, not of torch.float16"),
        ("residual", torch.zeros(1, 8).half(), r"residual is \(1, 8\), not \(2, 8\)"),
        ("output", torch.zeros(8, 2).half().T, "output is not contiguous"),
        ("kept", torch.zeros(16).half(), r"kept is \(16,\), not \(2, 8\)"),
        ("weight", torch.zeros(2).half(), r"weight is \(2,\), not \(8,\)"),
    ],
)
def test_tensors_that_do_not_fit_together(changed: str, to: Tensor, said: str) -> None:
    tensors = {
        name: torch.zeros(2, 8).half() for name in ("source", "residual", "output", "kept")
    } | {"weight": torch.zeros(8).half()}
    assert NormTask.of(**tensors, epsilon=0.0).rows == 2
    with pytest.raises(ValueError, match=said):
        NormTask.of(**tensors | {changed: to}, epsilon=0.0)


def test_rows_that_no_kernel_norms() -> None:
    def of(*shape: int, dtype: torch.dtype) -> NormTask:
        rows, row = torch.zeros(shape, dtype=dtype), torch.zeros(shape[-1], dtype=dtype)
        return NormTask.of(rows, rows, row, rows, rows, 0.0)

    with pytest.raises(ValueError, match="no kernel norms"):
        of(2, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="rows of 24 bytes are not of whole 16 bytes"):
        of(2, 12, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="rows of 0 bytes"):
        of(2, 0, dtype=torch.bfloat16)
