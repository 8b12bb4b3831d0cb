"""Groups of emulated ranks: memory of all ranks in one piece, and a way to run ranks as threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from device_comm import ReduceOp
from device_comm.cuda.ipc import abi
from device_comm.cuda.ipc.planner import Planner
from tests.device_comm.cuda.emulator import LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from device_comm.cuda.ipc.abi import KernelLaunch, Limits
    from tests.device_comm.cuda.emulator import Emulation

NEAR_WRAP = 2**32 - 3
"""Epochs and counts of chunks begin here, so that 32 bits of them wrap around soon."""
SECONDS = 30.0


def small_layout(n: int, **changes: int) -> abi.RegionLayout:
    """Of 1 KiB stagings, so that little data goes in many chunks."""
    sizes = {"staging_bytes": 1024, "packet_bytes": 512, "channel_bytes": 256} | changes
    return abi.RegionLayout(n, **sizes)


class World:
    """The regions and control blocks of a group. Of processes, each has its own over one file."""

    def __init__(
        self,
        layout: abi.RegionLayout,
        *,
        memory: Tensor | None = None,
        path: Path | None = None,
        fresh: bool = True,
        start: int = NEAR_WRAP,
        timeout: float = SECONDS,
        limits: Limits = LIMITS,
    ) -> None:
        """Map the memory; ``fresh``: as it is before the first launch."""
        self.layout, self.limits, self.timeout = layout, limits, timeout
        size = self.size(layout)
        self._stride = size // layout.world_size
        if memory is not None:
            self.memory = memory
        elif path is not None:
            self.memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        else:
            self.memory = torch.zeros(size, dtype=torch.uint8)
        if not fresh:
            return
        for rank in range(layout.world_size):
            region = self.region(rank)
            for word in (abi.REGION_EPOCH, abi.REGION_PACKET_EPOCH):
                region[word : word + 8].view(torch.int64).fill_(start)
            region[abi.REGION_CHANNELS : abi.REGION_STAGING].view(torch.int64).fill_(start)

    @staticmethod
    def size(layout: abi.RegionLayout) -> int:
        return -(-(layout.size + abi.CONTROL_BYTES) // 64) * 64 * layout.world_size

    def region(self, rank: int) -> Tensor:
        return self._piece(rank)[: self.layout.size]

    def control(self, rank: int) -> Tensor:
        return self._piece(rank)[-abi.CONTROL_BYTES :]

    def record(self, rank: int) -> abi.ErrorRecord:
        return abi.ErrorRecord.read(self.control(rank).numpy().tobytes())

    def epoch(self, rank: int, word: int = abi.REGION_EPOCH) -> int:
        return int(self.region(rank)[word : word + 8].view(torch.int64))

    def has_come(self, rank: int, blocks: int, at: int) -> bool:
        """Whether all blocks of ``rank`` are at the start of the kernel that ``at`` begins next."""
        region, number = self.region(at), 2 * (self.epoch(at) + 1)
        flags = [abi.REGION_FLAGS + (block * abi.MAX_RANKS + rank) * 8 for block in range(blocks)]
        return all(int(region[flag : flag + 8].view(torch.int64)) >= number for flag in flags)

    def packets(self, at: int, source: int, epoch: int) -> Tensor:
        """What ``source`` sends to ``at`` in an epoch: words, by half, cell, and place in it."""
        size = 2 * self.layout.packet_bytes
        begin = self.layout.packets + (epoch % 2 * self.layout.world_size + source) * size
        return self.region(at)[begin : begin + size].view(torch.int64).view(2, -1, 2)

    def planner(self, rank: int) -> Planner:
        regions = tuple(self.region(r).data_ptr() for r in range(self.layout.world_size))
        group = abi.Group(
            regions,
            self.control(rank).data_ptr(),
            rank,
            self.layout,
            int(self.timeout * 1e9),
        )
        return Planner(group, self.limits)

    def _piece(self, rank: int) -> Tensor:
        return self.memory[rank * self._stride : (rank + 1) * self._stride]


class Rank:
    """One emulated rank. ``plan`` makes launches."""

    def __init__(self, world: World, rank: int, emulation: Emulation) -> None:
        self.world, self.rank, self.n = world, rank, world.layout.world_size
        self.plan = world.planner(rank)
        self._emulation = emulation

    def run(self, launches: list[KernelLaunch]) -> None:
        """Run launches and require that nothing went wrong."""
        self.attempt(launches)
        record = self.world.record(self.rank)
        assert record.code is abi.ErrorCode.NONE, f"rank {self.rank}: {record}"

    def attempt(self, launches: list[KernelLaunch]) -> None:
        self._emulation.run(launches)


def run_threads(
    world: World, emulation: Emulation, body: Callable[..., Any], *args: Any
) -> list[Any]:
    """Run ``body(rank, *args)`` for all ranks at once, each in a thread; the results by rank."""
    n = world.layout.world_size
    start = threading.Barrier(n)

    def run(rank: int) -> Any:
        start.wait(SECONDS)
        return body(Rank(world, rank, emulation), *args)

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(run, range(n)))


def at(tensor: Tensor, shift: int = 0) -> Tensor:
    """A copy whose address is ``shift`` bytes from a multiple of 16."""
    room = torch.empty(tensor.nbytes + 64, dtype=torch.uint8)
    begin = -room.data_ptr() % 16 + shift
    copy = room[begin : begin + tensor.nbytes]
    return copy.view(tensor.dtype).copy_(tensor.flatten()).view(tensor.shape)


def wild(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sum depends on the order, with what is no number among them."""
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 10.0**rank
    numbers[rank::37] = (float("nan"), float("inf"), -0.0, 6e-8)[rank % 4]
    return numbers.to(dtype)


def in_rank_order(parts: list[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        if op is ReduceOp.PRODUCT:
            total = total * part.float()
        elif op is ReduceOp.MIN:
            total = torch.minimum(total, part.float())
        elif op is ReduceOp.MAX:
            total = torch.maximum(total, part.float())
        else:
            total = total + part.float()
    return (total / len(parts) if op is ReduceOp.AVG else total).to(parts[0].dtype)


def same_numbers(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def moved(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers in no order: a piece that comes to a wrong place does not fit there."""
    # of a seed torch takes the low 32 bits
    drawn = torch.Generator().manual_seed(rank << 24 ^ count)
    numbers = torch.randint(127, (count,), generator=drawn)
    return numbers % 2 == 1 if dtype is torch.bool else numbers.to(dtype)
