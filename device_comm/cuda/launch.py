"""What a kernel launch is, which kernels there are, and how launches are sized."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, Self

import torch

from device_comm.cuda import abi
from device_comm.cuda.abi import Job
from device_comm.reduce_op import ReduceOp

NUMBERS: Final = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_OPERATIONS: Final = frozenset(
    {ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.AVG}
)
MOVE: Final = "ipc_move"
TRANSFER: Final = "ipc_transfer"
_REDUCING: Final = ("ipc_reduce", "ipc_all_reduce", "ipc_packets")
KERNELS: Final = (
    MOVE,
    TRANSFER,
    *(f"{kernel}_{number}" for kernel in _REDUCING for number in NUMBERS.values()),
)
"""The names of all kernels, which are extern "C" in ``kernels/collectives.cu``."""


def kernels_reduce(op: ReduceOp, dtype: torch.dtype) -> bool:
    """Whether there are kernels for this reduction. For others: gather, and reduce with torch."""
    return dtype in NUMBERS and op in _OPERATIONS


class Protocol(Enum):
    """How an all-reduce is done."""

    PACKETS = "packets"
    """Everybody pushes all to all, each word with its epoch; nobody waits for anybody else."""
    ONE_SHOT = "one-shot"
    """Ranks meet, then each reads and reduces all of all."""
    TWO_SHOT = "two-shot"
    """Ranks meet, each reduces one part, they meet again and read the parts of the others."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How launches are sized, and which protocol is used. The same on all ranks of a group.

    Attributes:
        max_blocks: of a grid, up to `abi.MAX_BLOCKS`. All blocks of all ranks that share a device
            must fit on it at once: blocks that wait must not keep out those they wait for. Messages
            on other streams come on top, with up to `abi.RegionLayout.lanes` blocks each.
        threads: of a block, `abi.MIN_THREADS` to `abi.MAX_THREADS`.
        packets_up_to: the largest all-reduce in packets, in bytes.
        one_shot_up_to: the largest one in one shot; what is larger takes two.

    Raises:
        ValueError: one of them is out of range.
    """

    max_blocks: int = 36
    threads: int = abi.MAX_THREADS
    packets_up_to: int = 64 << 10
    one_shot_up_to: int = 512 << 10

    def __post_init__(self) -> None:
        for name, fewest, most in (
            ("max_blocks", 1, abi.MAX_BLOCKS),
            ("threads", abi.MIN_THREADS, abi.MAX_THREADS),
        ):
            if not fewest <= getattr(self, name) <= most:
                raise ValueError(
                    f"{name} must be from {fewest} to {most}, not {getattr(self, name)}"
                )

    @classmethod
    def for_ranks(cls, world_size: int, *, ranks_on_device: int = 1) -> Self:
        """Sizes before anything was measured, with ``ranks_on_device`` ranks on the fullest."""
        one_shot = {2: 8 << 20, 3: 512 << 10, 4: 512 << 10}.get(world_size, 256 << 10)
        blocks = max(36 // ranks_on_device, abi.MAX_LANES)
        return cls(max_blocks=blocks, one_shot_up_to=one_shot)


class Launch(NamedTuple):
    """One kernel launch.

    Attributes:
        kernel: one of `KERNELS`.
        grid: blocks.
        block: threads of each.
        args: its parameters, as they lie in memory: one, of `abi.JOB_BYTES`.
    """

    kernel: str
    grid: int
    block: int
    args: tuple[bytes, ...]


def warm_up(limits: Limits) -> list[Launch]:
    """One launch of each kernel that does nothing: after it, none has to be loaded any more."""
    idle = (Job().pack(abi.IDLE_GROUP),)
    return [Launch(kernel, 1, limits.threads, idle) for kernel in KERNELS]
