"""Flags written by hand: when a kernel goes on, and when it ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import ReduceOp
from device_comm.cuda.ipc import abi
from device_comm.cuda.ipc.abi import Algorithm, Phase
from tests.device_comm.cuda.emulated_world import NEAR_WRAP, Rank, World, small_layout
from tests.patience import until

if TYPE_CHECKING:
    from device_comm.cuda.ipc.abi import KernelLaunch
    from tests.device_comm.cuda.emulator import Emulation

FIRST = NEAR_WRAP + 1
"""The epoch of the first launch."""
MOMENT = 0.05
"""Seconds in which a kernel that has nothing to wait for ends."""


def come(world: World, epoch: int, *, block: int, phase: Phase = Phase.START) -> None:
    """Let a block of rank 1 come to a meeting of a kernel, as rank 0 sees it."""
    flag = abi.REGION_FLAGS + (block * abi.MAX_RANKS + 1) * 8
    world.region(0)[flag : flag + 8].view(torch.int64).fill_(2 * epoch + phase)


def test_an_epoch_ends_with_the_last_block(emulation: Emulation) -> None:
    """Of two, the first one is done long before the other; in the second epoch as in the first."""
    world = World(small_layout(2))
    rank, buffer = Rank(world, 0, emulation), torch.zeros(400, dtype=torch.uint8)
    for epoch in (FIRST, FIRST + 1):
        launches = rank.plan.broadcast(buffer.data_ptr(), buffer.nbytes, 1)
        assert [launch.grid for launch in launches] == [2]
        with ThreadPoolExecutor(1) as beside:
            come(world, epoch, block=0)
            done = beside.submit(rank.run, launches)
            with pytest.raises(TimeoutError):
                done.result(MOMENT)
            assert world.epoch(0) == epoch - 1
            come(world, epoch, block=1)
            done.result()
        assert world.epoch(0) == epoch


def test_who_is_ahead_has_come(emulation: Emulation) -> None:
    """A peer may be at the end before this rank has looked whether it is at the start."""
    world = World(small_layout(2), timeout=1.0)
    rank, numbers = Rank(world, 0, emulation), torch.ones(100)
    for block in range(2):
        come(world, FIRST, block=block, phase=Phase.END)
    arguments = numbers.data_ptr(), numbers.data_ptr(), numbers.nbytes, torch.float32, ReduceOp.SUM
    launches = rank.plan.all_reduce(*arguments, algorithm=Algorithm.TWO_SHOT)
    assert [launch.grid for launch in launches] == [1]
    rank.run(launches)
    assert world.epoch(0) == FIRST


@pytest.mark.parametrize("verb", ["all_gather", "reduce_scatter"])
def test_a_kernel_ends_when_nobody_reads_its_source_any_more(
    emulation: Emulation, verb: str
) -> None:
    """All that it makes is there before: it waits for the one that is still reading."""
    world = World(small_layout(2))
    rank, sources = Rank(world, 0, emulation), (torch.full((4,), 1.0), torch.full((4,), 2.0))
    packed = bytearray(abi.pack_sources([source.data_ptr() for source in sources]))
    table = torch.frombuffer(packed, dtype=torch.uint8).data_ptr()
    expected = torch.cat(sources) if verb == "all_gather" else sources[0] + sources[1]
    output = torch.zeros_like(expected)
    pointers = output.data_ptr(), sources[0].data_ptr()
    launches: list[KernelLaunch]
    if verb == "all_gather":
        launches = rank.plan.all_gather(*pointers, (16, 16), table=table)
    else:
        arguments = (16, 0), torch.float32, ReduceOp.SUM
        launches = rank.plan.reduce_scatter(*pointers, *arguments, table=table)
    come(world, FIRST, block=0)
    with ThreadPoolExecutor(1) as beside:
        done = beside.submit(rank.run, launches)
        until(lambda: torch.equal(output, expected))
        with pytest.raises(TimeoutError):
            done.result(MOMENT)
        come(world, FIRST, block=0, phase=Phase.END)
        done.result()
