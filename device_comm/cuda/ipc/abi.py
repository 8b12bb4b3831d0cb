"""Lay out the memory and the launch arguments that host and kernels share.

``kernels/group.cuh`` has the same in C++; a test compares the two. All numbers are little-endian.

Region, one for each rank, zeroed before anybody else maps it
--------------------------------------------------------------
::

    0     | abort u64: code | reporter << 8 | culprit << 16; anybody |  a line of 64 bytes
          | writes it, and the rank's kernels give up                |
    64    | claimed u32: the error record has its writer             |  a line
    128   | epoch u64 | tickets u32: of kernels that meet            |  a line
    192   | epoch u64 | tickets u32: of kernels that send packets    |  a line
    256   | flags u64 [MAX_BLOCKS][MAX_RANKS]: rank r writes [*][r]  |
    4352  | words u64 [CHANNEL_SETS][4][MAX_RANKS][MAX_LANES]        |
    28928 | staging of even epochs, of odd epochs                    |  2 staging_bytes
          | packets [epoch % 2][from rank][half of a cell][cell]     |  4 n packet_bytes
          | channels [CHANNEL_SETS][from rank], of slots [lane][2]   |  3 n channel_bytes

Control block, one for each rank, in pinned host memory that kernels see
-------------------------------------------------------------------------
::

    0     | abort u32: the host sets it; kernels that wait give up             |  a line
    64    | code u32 | culprit u32 | reporter u32 | phase u32 | epoch u64      |  the error record

The record is written once, its ``code`` last. All kernels take one argument by value, a job: the
group, and the task of this launch (see `KernelJob`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Final, NamedTuple, Self

import torch

from device_comm.operation import ReduceOp
from device_comm.span import NOTHING, Span

MAX_RANKS: Final = 8
MAX_BLOCKS: Final = 64
"""The largest grid."""
MIN_THREADS: Final = 2 * MAX_RANKS
"""The smallest number of threads in a block: one for each channel that it serves."""
MAX_THREADS: Final = 512
"""The largest number of threads in a block."""
MAX_LANES: Final = 32
"""The largest number of blocks that move one message."""
ALIGN: Final = 16
"""Bytes of one memory access; everything in a region is aligned to it."""

CHANNEL_SETS: Final = 3
MESSAGES: Final = 0
"""The set of channels that ``send`` and ``recv`` use."""
EXCHANGES: Final = 1
"""The set of channels that collectives use: in one set, their data could be taken for messages."""
CAPTURED: Final = 2
"""The set of ``send`` and ``recv`` in graphs, which may be replayed beside other messages."""

REGION_ABORT: Final = 0
REGION_CLAIMED: Final = 64
REGION_EPOCH: Final = 128
REGION_PACKET_EPOCH: Final = 192
REGION_TICKETS: Final = 8
"""The offset of the tickets from their epoch."""
REGION_FLAGS: Final = 256
REGION_CHANNELS: Final = REGION_FLAGS + MAX_BLOCKS * MAX_RANKS * 8
REGION_STAGING: Final = REGION_CHANNELS + CHANNEL_SETS * 4 * MAX_RANKS * MAX_LANES * 8

CONTROL_ABORT: Final = 0
CONTROL_RECORD: Final = 64
CONTROL_BYTES: Final = 128

_GROUP: Final = struct.Struct(f"<{MAX_RANKS}Q8QIIII")
_TASK: Final = struct.Struct(f"<3QIIfI{2 * MAX_RANKS}Q{2 * MAX_RANKS}Q")
_RECORD: Final = struct.Struct("<IIIIQ")
GROUP_BYTES: Final = _GROUP.size
JOB_BYTES: Final = _GROUP.size + _TASK.size
"""Bytes of the one argument of every kernel."""
SOURCES_BYTES: Final = MAX_RANKS * 8


class ErrorCode(IntEnum):
    """Why a kernel gave up."""

    NONE = 0
    TIMEOUT = 1
    """This rank has waited too long for the culprit."""
    PEER = 2
    """Another rank, the reporter, gave up because of the culprit, and told this rank."""
    ABORTED = 3
    """The host set the abort word of the control block."""


class Phase(IntEnum):
    """What a kernel was waiting for."""

    START = 0
    """The culprit to begin a collective."""
    END = 1
    """The culprit, which had begun, to finish its part of the collective."""
    PACKET = 2
    """Packets from the culprit."""
    PUT = 3
    """The culprit to drain a channel."""
    TAKE = 4
    """The culprit to fill a channel."""


class ErrorRecord(NamedTuple):
    """The error record that a kernel writes when it gives up.

    Attributes:
        code: why it gave up; `ErrorCode.NONE` if there is no error.
        culprit: the rank that was waited for, or the rank whose host aborted.
        reporter: the rank that gave up first.
        phase: what it was waiting for.
        epoch: the number of earlier launches of the same kind; for channels, of chunks.
    """

    code: ErrorCode
    culprit: int
    reporter: int
    phase: Phase
    epoch: int

    @classmethod
    def read(cls, control: bytes | bytearray | memoryview) -> Self:
        """Read the record from a control block of `CONTROL_BYTES`."""
        code, culprit, reporter, phase, epoch = _RECORD.unpack_from(control, CONTROL_RECORD)
        return cls(ErrorCode(code), culprit, reporter, Phase(phase), epoch)


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """The layout of a region. The same on all ranks of a group.

    Attributes:
        world_size: the number of ranks, 2 to `MAX_RANKS`.
        staging_bytes: bytes of each of the two staging buffers; larger tensors go in chunks.
        packet_bytes: bytes of the largest tensor that goes in packets.
        channel_bytes: bytes of each channel: there is one for each rank that sends, in each set.
            This much of a message may be under way before any of it is taken.
    """

    world_size: int
    staging_bytes: int = 8 << 20
    packet_bytes: int = 256 << 10
    channel_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if not 2 <= self.world_size <= MAX_RANKS:
            raise ValueError(f"world_size must be from 2 to {MAX_RANKS}, not {self.world_size}")
        least = self.world_size * ALIGN
        if self.staging_bytes < least or self.staging_bytes % ALIGN:
            raise ValueError(
                f"staging_bytes must be a multiple of {ALIGN}, of {least} or more, "
                f"not {self.staging_bytes}"
            )
        for name in ("packet_bytes", "channel_bytes"):
            size = getattr(self, name)
            if size < ALIGN or size % ALIGN:
                raise ValueError(f"{name} must be a multiple of {ALIGN}, not {size}")

    @property
    def packets(self) -> int:
        """The offset of the packets."""
        return REGION_STAGING + 2 * self.staging_bytes

    @property
    def channels(self) -> int:
        """The offset of the channels' slots."""
        return self.packets + 2 * self.world_size * 2 * self.packet_bytes

    @property
    def size(self) -> int:
        """Bytes of a region: ``28928 + 2 staging_bytes + n (4 packet_bytes + 3 channel_bytes)``."""
        return self.channels + CHANNEL_SETS * self.world_size * self.channel_bytes

    def slot_bytes(self, lanes: int) -> int:
        """Bytes of each of the two slots of a lane, of ``lanes`` that share a channel.

        Raises:
            ValueError: a channel has no room for so many.
        """
        slot = self.channel_bytes // (2 * lanes) // ALIGN * ALIGN
        if not slot:
            raise ValueError(f"{lanes} lanes do not fit into channel_bytes={self.channel_bytes}")
        return slot


@dataclass(frozen=True, slots=True)
class Group:
    """What every kernel of one rank needs to know of its group.

    Attributes:
        regions: the address of each rank's region in this process, by rank.
        control: the address of this rank's control block for its device.
        rank: this rank.
        layout: the layout of all regions.
        timeout_ns: the time limit of one wait in nanoseconds; 0: none.
    """

    regions: tuple[int, ...]
    control: int
    rank: int
    layout: RegionLayout
    timeout_ns: int

    def __post_init__(self) -> None:
        if len(self.regions) != self.layout.world_size:
            raise ValueError(f"{len(self.regions)} regions for {self.layout.world_size} ranks")
        if not 0 <= self.rank < self.layout.world_size:
            raise ValueError(f"rank {self.rank} is none of {self.layout.world_size}")

    def with_timeout(self, timeout_ns: int) -> Self:
        """The same group with another time limit."""
        return replace(self, timeout_ns=timeout_ns)

    def pack(self, lanes: int) -> bytes:
        """The first `GROUP_BYTES` of a job, whose messages go through up to ``lanes`` lanes."""
        layout = self.layout
        return _GROUP.pack(
            *_filled(self.regions),
            self.control,
            self.timeout_ns,
            layout.staging_bytes,
            layout.packets,
            layout.packet_bytes,
            layout.channels,
            layout.channel_bytes,
            layout.slot_bytes(lanes),
            self.rank,
            layout.world_size,
            lanes,
            0,
        )


_NOWHERE: Final = (NOTHING,) * MAX_RANKS


class KernelJob(NamedTuple):
    """The task of one launch. Each kernel's source says which fields it uses, and how.

    Attributes:
        puts: the memory that this rank gives to each rank, by rank; or one entry, given to all.
        takes: where the data of each rank goes, by rank; or one entry.
        table: the address of a table of `SOURCES_BYTES` on the device: each rank's source address
            in this process, by rank. 0: sources are copied into the staging buffer first.
        offset: the offset of this rank's part in a source or staging buffer.
        piece: the distance between two ranks' parts in a staging buffer, in bytes.
        op: the reduction.
        channel_set: `MESSAGES`, `EXCHANGES` or `CAPTURED`.
        epsilon: what a norm adds to the mean of squares.
    """

    puts: Sequence[Span] = ()
    takes: Sequence[Span] = ()
    table: int = 0
    offset: int = 0
    piece: int = 0
    op: ReduceOp | int = 0
    channel_set: int = MESSAGES
    epsilon: float = 0.0

    def pack(self, group: bytes) -> bytes:
        """The kernel's argument, `JOB_BYTES`; ``group`` is from `Group.pack`."""
        puts, takes = (*self.puts, *_NOWHERE)[:MAX_RANKS], (*self.takes, *_NOWHERE)[:MAX_RANKS]
        return group + _TASK.pack(
            self.table,
            self.offset,
            self.piece,
            self.op,
            self.channel_set,
            self.epsilon,
            0,
            *(number for span in puts for number in span),
            *(number for span in takes for number in span),
        )


IDLE_GROUP: Final = bytes(GROUP_BYTES)
"""A group of zeros: a kernel that gets it ends at once, without accessing any region."""


def pack_sources(addresses: Sequence[int]) -> bytes:
    """The bytes of the table that `KernelJob.table` points to."""
    return struct.pack(f"<{MAX_RANKS}Q", *_filled(addresses))


def _filled(addresses: Sequence[int]) -> tuple[int, ...]:
    return (*addresses, *(0,) * (MAX_RANKS - len(addresses)))


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
        max_blocks: blocks of a grid at most, up to `MAX_BLOCKS`. The blocks of all ranks that
            share a device must fit on it at once: otherwise waiting blocks could keep the blocks
            that they wait for from running. ``all_to_all`` has up to `MAX_LANES` of them.
        lanes: blocks that move one message at most, up to `MAX_LANES`; a message has one for
            each slot that it fills. They come on top, for each message that is under way. Lanes
            cost no memory, because they share a channel. But more lanes have smaller slots, and
            must meet the peer's more often. With 16 lanes of the default channels, all threads of a
            block still have their part of a slot under way at once.
        threads: threads of a block, `MIN_THREADS` to `MAX_THREADS`.
        packets_up_to: the largest all-reduce by packets, in bytes.
        one_shot_up_to: the largest one in one shot, in bytes; larger ones use two shots.

    Raises:
        ValueError: one of them is out of range.
    """

    max_blocks: int = 36
    lanes: int = 16
    threads: int = MAX_THREADS
    packets_up_to: int = 64 << 10
    one_shot_up_to: int = 512 << 10

    def __post_init__(self) -> None:
        for name, fewest, most in (
            ("max_blocks", 1, MAX_BLOCKS),
            ("lanes", 1, MAX_LANES),
            ("threads", MIN_THREADS, MAX_THREADS),
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
        args: the bytes of its parameters: one, of `JOB_BYTES`.
    """

    kernel: str
    grid: int
    block: int
    args: tuple[bytes, ...]


def warm_up(limits: Limits) -> list[KernelLaunch]:
    """One launch of each kernel that does nothing: afterwards all kernels are loaded."""
    idle = (KernelJob().pack(IDLE_GROUP),)
    return [KernelLaunch(kernel, 1, limits.threads, idle) for kernel in KERNELS]
