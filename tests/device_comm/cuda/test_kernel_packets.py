"""Packets written by hand: what a rank takes for the numbers of its peer, and what it does not."""

from __future__ import annotations

import itertools
import struct
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch

from device_comm import ReduceOp
from device_comm.cuda.ipc.abi import ErrorCode
from tests.device_comm.cuda.emulated_world import NEAR_WRAP, Rank, World, run_threads, small_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.device_comm.cuda.emulator import Emulation

MINE = [1.0, 2.0, 3.0, 4.0]
THEIRS = [10.0, 20.0, 30.0, 40.0]
BOTH = [11.0, 22.0, 33.0, 44.0]
FIRST = NEAR_WRAP + 1
"""The epoch of the first launch."""


def cell(world: World, epoch: int, *, at: int = 0, source: int = 1) -> torch.Tensor:
    """Where the first cell of an epoch arrives, as two halves of two words."""
    return world.packets(at, source, epoch)[:, 0]


def words(numbers: Sequence[float], epoch: int) -> torch.Tensor:
    """A cell as it travels: each number with the epoch above it."""
    bits = struct.unpack("<4I", struct.pack("<4f", *numbers))
    packed = struct.pack("<4Q", *(low | epoch % 2**32 << 32 for low in bits))
    return torch.frombuffer(bytearray(packed), dtype=torch.int64).view(2, 2)


def reduce_one_cell(world: World, emulation: Emulation) -> list[float]:
    rank, numbers = Rank(world, 0, emulation), torch.tensor(MINE)
    pointer = numbers.data_ptr()
    rank.run(rank.plan.all_reduce(pointer, pointer, 16, torch.float32, ReduceOp.SUM))
    return numbers.tolist()


@pytest.mark.parametrize("late", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_cell_counts_when_all_its_words_are_of_the_epoch(
    emulation: Emulation, late: tuple[int, int]
) -> None:
    world = World(small_layout(2))
    theirs, arrived = words(THEIRS, FIRST), cell(world, FIRST)
    arrived.copy_(theirs)
    arrived[late] = words([99.0] * 4, FIRST - 2)[late]
    with ThreadPoolExecutor(1) as beside:
        result: Future[list[float]] = beside.submit(reduce_one_cell, world, emulation)
        with pytest.raises(TimeoutError):
            result.result(0.05)
        arrived[late] = theirs[late]
        assert result.result() == BOTH


def test_a_peer_may_be_one_epoch_ahead(emulation: Emulation) -> None:
    world = World(small_layout(2))
    cell(world, FIRST).copy_(words(THEIRS, FIRST))
    cell(world, FIRST + 1).copy_(words(MINE, FIRST + 1))
    assert reduce_one_cell(world, emulation) == BOTH
    assert reduce_one_cell(world, emulation) == [2.0, 4.0, 6.0, 8.0]
    for epoch in (FIRST, FIRST + 1):
        sent = cell(world, epoch, at=1, source=0)
        assert torch.equal(sent, words(MINE, epoch))


def test_halves_of_all_cells_lie_side_by_side(emulation: Emulation) -> None:
    """So that threads that write at the same time write one piece of memory."""

    def body(rank: Rank) -> None:
        numbers = torch.arange(20.0) + rank.rank
        pointers = numbers.data_ptr(), numbers.data_ptr()
        rank.run(rank.plan.all_reduce(*pointers, numbers.nbytes, torch.float32, ReduceOp.SUM))

    world = World(small_layout(2))
    run_threads(world, emulation, body)
    first, second = world.packets(0, 1, FIRST).reshape(2, -1)[:, :10].int().view(torch.float32)
    given = torch.arange(20.0).view(5, 2, 2) + 1
    assert torch.equal(first, given[:, 0].flatten())
    assert torch.equal(second, given[:, 1].flatten())


@pytest.mark.parametrize("start", [-1, 2**32 - 1])
def test_what_a_region_is_filled_with_is_of_no_epoch(emulation: Emulation, start: int) -> None:
    """Not even of one whose 32 bits are 0."""
    world = World(small_layout(2), start=start, timeout=0.05)
    with pytest.raises(AssertionError, match="culprit=1"):
        reduce_one_cell(world, emulation)
    assert world.record(0).code is ErrorCode.TIMEOUT


def test_no_packet_lives_to_see_its_epoch_again(emulation: Emulation) -> None:
    """Cells that are not used are wiped in turn: 4 cells in each of 2 areas, by 8 launches."""
    world = World(small_layout(2, packet_bytes=64))
    layout = world.layout
    for rank in range(2):
        world.region(rank)[layout.packets : layout.channels].fill_(0x55)

    def body(rank: Rank) -> None:
        for _ in range(8):
            number = torch.ones(1)
            pointers = number.data_ptr(), number.data_ptr()
            rank.run(rank.plan.all_reduce(*pointers, 4, torch.float32, ReduceOp.SUM))
            assert number.item() == 2.0

    run_threads(world, emulation, body)
    for at, source, epoch in itertools.product(range(2), repeat=3):
        assert not world.packets(at, source, epoch)[:, 1:].any()
