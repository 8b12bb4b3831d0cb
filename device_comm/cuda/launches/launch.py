"""Kernel launches as data: the kernels' names, and the sizes of launches."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, Self

import torch

from device_comm.cuda.launches import abi
from device_comm.cuda.launches.abi import KernelJob
from device_comm.reduce_op import ReduceOp

NUMBERS: Final = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_OPERATIONS: Final = frozenset(
    {ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG}
)
MOVE_KERNEL: Final = "ipc_move"
TRANSFER: Final = "ipc_transfer"
_REDUCING: Final = ("ipc_reduce", "ipc_all_reduce", "ipc_packets", "ipc_packets_norm")
KERNELS: Final = (
    MOVE_KERNEL,
    TRANSFER,
    *(f"{kernel}_{number}" for kernel in _REDUCING for number in NUMBERS.values()),
)
"""The names of all kernels, which are extern "C" in ``kernels/collectives.cu``."""


def kernels_reduce(op: ReduceOp, dtype: torch.dtype) -> bool:
    """Whether a kernel does this reduction. If not, the tensors are gathered and torch reduces."""
    return dtype in NUMBERS and op in _OPERATIONS


class Algorithm(Enum):
    """The algorithm of an all-reduce."""

    PACKETS = "packets"
    """Each rank writes its tensor to all ranks, each word with the epoch; no synchronisation."""
    ONE_SHOT = "one-shot"
    """The ranks synchronise; then each reads all tensors and reduces them completely."""
    TWO_SHOT = "two-shot"
    """The ranks synchronise, each reduces one part, they synchronise again and read the other
    parts."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes of launches, and of the algorithms' ranges. The same on all ranks of a group.

    Attributes:
        max_blocks: blocks of a grid at most, up to `abi.MAX_BLOCKS`. The blocks of all ranks that
            share a device must fit on it at once: otherwise waiting blocks could keep the blocks
            that they wait for from running. ``all_to_all`` has up to `abi.MAX_LANES` of them.
        lanes: blocks that move one message at most, up to `abi.MAX_LANES`; a message has one for
            each slot that it fills. They come on top, for each message that is under way. Lanes
            cost no memory, because they share a channel. But more lanes have smaller slots, and
            must meet the peer's more often. With 16 lanes of the default channels, all threads of a
            block still have their part of a slot under way at once.
        threads: threads of a block, `abi.MIN_THREADS` to `abi.MAX_THREADS`.
        packets_up_to: the largest all-reduce by packets, in bytes.
        one_shot_up_to: the largest one in one shot, in bytes; larger ones use two shots.

    Raises:
        ValueError: one of them is out of range.
    """

    max_blocks: int = 36
    lanes: int = 16
    threads: int = abi.MAX_THREADS
    packets_up_to: int = 64 << 10
    one_shot_up_to: int = 512 << 10

    def __post_init__(self) -> None:
        for name, fewest, most in (
            ("max_blocks", 1, abi.MAX_BLOCKS),
            ("lanes", 1, abi.MAX_LANES),
            ("threads", abi.MIN_THREADS, abi.MAX_THREADS),
        ):
            if not fewest <= getattr(self, name) <= most:
                raise ValueError(
                    f"{name} must be from {fewest} to {most}, not {getattr(self, name)}"
                )

    @classmethod
    def for_ranks(cls, world_size: int, *, ranks_on_device: int = 1) -> Self:
        """Defaults; ``ranks_on_device`` is the largest number of ranks that share a device.

        If each rank of a device sends to all others and receives from all of them at once, that
        takes fewer than 256 blocks. Once more than half of them run, two of them have met, and make
        progress. So 64 multiprocessors are enough, each of which holds two blocks.
        """
        one_shot = {2: 8 << 20, 3: 512 << 10, 4: 512 << 10}.get(world_size, 256 << 10)
        blocks = max(36 // ranks_on_device, 8)
        lanes = min(128 // (world_size * ranks_on_device), 16)
        return cls(max_blocks=blocks, lanes=lanes, one_shot_up_to=one_shot)


class KernelLaunch(NamedTuple):
    """One kernel launch.

    Attributes:
        kernel: one of `KERNELS`.
        grid: the number of blocks.
        block: the number of threads per block.
        args: the bytes of its parameters: one, of `abi.JOB_BYTES`.
    """

    kernel: str
    grid: int
    block: int
    args: tuple[bytes, ...]


def warm_up(limits: Limits) -> list[KernelLaunch]:
    """One launch of each kernel that does nothing: afterwards all kernels are loaded."""
    idle = (KernelJob().pack(abi.IDLE_GROUP),)
    return [KernelLaunch(kernel, 1, limits.threads, idle) for kernel in KERNELS]
