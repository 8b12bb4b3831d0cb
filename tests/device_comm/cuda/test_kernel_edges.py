"""Kernels write their results and nothing beside them, whatever the sizes and addresses are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
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
)

if TYPE_CHECKING:
    from device_comm.cuda.ipc.abi import KernelLaunch
    from tests.device_comm.cuda.emulator import Emulation

EDGE = 128
"""More than a slot."""
PAPER = 0x5A
N = 2
COUNTS = (1, 8, 77, 250)
"""Numbers of two bytes: less than a cell, a whole one, several chunks, the last one cut short."""


class Result:
    """Memory for a result, with edges around it that no kernel may touch."""

    def __init__(self, count: int, shift: int) -> None:
        self._room = torch.full((2 * EDGE + 2 * count + 32,), PAPER, dtype=torch.uint8)
        self._begin = EDGE - self._room.data_ptr() % 16 + shift
        self._end = self._begin + 2 * count
        self.tensor = self._room[self._begin : self._end].view(torch.bfloat16)

    def take(self) -> torch.Tensor:
        """What is there; the edges are as they were."""
        assert bool((self._room[: self._begin] == PAPER).all())
        assert bool((self._room[self._end :] == PAPER).all())
        return self.tensor


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("shift", [0, 2])
def test_nothing_is_written_beside_a_result(emulation: Emulation, count: int, shift: int) -> None:
    dtype, size = torch.bfloat16, 2 * count

    def body(rank: Rank) -> None:
        me, plan = rank.rank, rank.plan
        parts = [at(moved(r, count, dtype), shift) for r in range(N)]
        mine, given = parts[me], parts[me].data_ptr()
        total = in_rank_order(parts, ReduceOp.SUM)

        def make(launches: list[KernelLaunch], result: Result, expected: torch.Tensor) -> None:
            rank.run(launches)
            same_numbers(result.take(), expected)

        for algorithm in Algorithm:
            result = Result(count, shift)
            arguments = result.tensor.data_ptr(), given, size, dtype, ReduceOp.SUM
            make(plan.all_reduce(*arguments, algorithm=algorithm), result, total)
        result = Result(N * count, shift)
        to = result.tensor.data_ptr()
        make(plan.all_gather(to, given, (size, size)), result, torch.cat(parts))
        result = Result(count, shift)
        to, expected = result.tensor.data_ptr(), total if me == 0 else result.tensor.clone()
        scatter = plan.reduce_scatter(to, given, (size, 0), dtype, ReduceOp.SUM)
        make(scatter, result, expected)
        result = Result(count, shift)
        result.tensor.copy_(mine)
        make(plan.broadcast(result.tensor.data_ptr(), size, 1), result, parts[1])
        result, both = Result(N * count, shift), at(torch.cat([mine, mine]), shift)
        to = result.tensor.data_ptr()
        exchange = plan.all_to_all(to, both.data_ptr(), (size, size), (size, size))
        make(exchange, result, torch.cat(parts))
        result = Result(count, shift)
        with ThreadPoolExecutor(1) as beside:
            sent = beside.submit(rank.run, plan.send(given, size, 1 - me))
            make(plan.recv(result.tensor.data_ptr(), size, 1 - me), result, parts[1 - me])
            sent.result()

    run_threads(World(small_layout(N)), emulation, body)
