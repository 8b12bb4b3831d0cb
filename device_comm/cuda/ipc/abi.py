"""Define the layout of memory and launch arguments that host and kernels share.

``kernels/group.cuh`` has the same in C++; a test compares both. Numbers are little-endian.

Region, one for each rank, zeroed before any peer maps it
---------------------------------------------------------
::

    0     | abort u64: code | reporter << 8 | culprit << 16; any rank |  a line of 64 bytes
          | writes it, and the rank's waiting kernels end             |
    64    | claimed u32: the error record has its writer              |  a line
    128   | epoch u64 | tickets u32: of kernels with barriers         |  a line
    192   | epoch u64 | tickets u32: of kernels that send packets     |  a line
    256   | flags u64 [MAX_BLOCKS][MAX_RANKS]: rank r writes [*][r]   |
    4352  | words u64 [CHANNEL_SETS][4][MAX_RANKS][MAX_LANES]         |
    28928 | staging of even epochs, of odd epochs                     |  2 staging_bytes
          | packets [epoch % 2][from rank][half of a cell][cell]      |  4 n packet_bytes
          | channels [CHANNEL_SETS][from rank], of slots [lane][2]    |  3 n channel_bytes

Control block, one for each rank, in pinned host memory that kernels access
----------------------------------------------------------------------------
::

    0     | abort u32: the host sets it; waiting kernels end                   |  a line
    64    | code u32 | culprit u32 | reporter u32 | phase u32 | epoch u64      |  the error record

The record is written once, its ``code`` last. All kernels have one parameter by value, a
`KernelJob` after its `Group`.
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
"""The smallest block: one thread for each of its channels."""
MAX_THREADS: Final = 512
"""The largest block, in threads."""
MAX_LANES: Final = 32
"""The most blocks for one message."""
ALIGN: Final = 16
"""Bytes of one memory access, and the alignment in a region."""

CHANNEL_SETS: Final = 3
MESSAGES: Final = 0
"""The channel set of ``send`` and ``recv``."""
EXCHANGES: Final = 1
"""The channel set of collectives, whose data must not match messages."""
CAPTURED: Final = 2
"""The channel set of ``send`` and ``recv`` in graphs, which run beside other messages."""

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
"""Bytes of every kernel's parameter."""
SOURCES_BYTES: Final = MAX_RANKS * 8


class ErrorCode(IntEnum):
    """The reason why a kernel ended early."""

    NONE = 0
    TIMEOUT = 1
    """This rank's wait for the culprit timed out."""
    PEER = 2
    """Another rank, the reporter, ended early because of the culprit."""
    ABORTED = 3
    """The host set the abort word of the control block."""


class Phase(IntEnum):
    """The event that a kernel waited for."""

    START = 0
    """The culprit begins a collective."""
    END = 1
    """The culprit, which has begun, finishes its part of the collective."""
    PACKET = 2
    """Packets from the culprit."""
    PUT = 3
    """The culprit drains a channel."""
    TAKE = 4
    """The culprit fills a channel."""


class ErrorRecord(NamedTuple):
    """The error record of a kernel that ended early; ``code`` `ErrorCode.NONE`: no error.

    Attributes:
        culprit: the rank that was waited for, or whose host aborted.
        reporter: the first rank that ended early.
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
    """The layout of a region; the same on all ranks of a group.

    Attributes:
        world_size: 2 to `MAX_RANKS`.
        staging_bytes: of each of the two staging buffers; larger tensors are cut into chunks.
        packet_bytes: of the largest tensor in packets.
        channel_bytes: of each channel, one for each sending rank in each set. An eager send fits
            into it.
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
        """Return the offset of the packets."""
        return REGION_STAGING + 2 * self.staging_bytes

    @property
    def channels(self) -> int:
        """Return the offset of the channels' slots."""
        return self.packets + 2 * self.world_size * 2 * self.packet_bytes

    @property
    def size(self) -> int:
        """Return ``28928 + 2 staging_bytes + n (4 packet_bytes + 3 channel_bytes)`` bytes."""
        return self.channels + CHANNEL_SETS * self.world_size * self.channel_bytes

    def slot_bytes(self, lanes: int) -> int:
        """Return the bytes of each of a lane's two slots, with ``lanes`` in a channel.

        Raises `ValueError` if a channel has no room for so many.
        """
        slot = self.channel_bytes // (2 * lanes) // ALIGN * ALIGN
        if not slot:
            raise ValueError(f"{lanes} lanes do not fit into channel_bytes={self.channel_bytes}")
        return slot


@dataclass(frozen=True, slots=True)
class Group:
    """The group, as every kernel of one rank needs it.

    ``regions`` has each rank's region in this process, by rank; ``control`` is the device address
    of this rank's control block. ``timeout_ns`` limits one wait; 0: unlimited.
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
            raise ValueError(f"rank {self.rank} is not one of {self.layout.world_size} ranks")

    def with_timeout(self, timeout_ns: int) -> Self:
        """Return the same group with another time limit."""
        return replace(self, timeout_ns=timeout_ns)

    def pack(self, lanes: int) -> bytes:
        """Return the first `GROUP_BYTES` of a job; messages use up to ``lanes`` lanes."""
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
    """The task of one launch. Each kernel's source documents its use of the fields.

    Attributes:
        puts: memory that this rank sends to each rank, by rank; or one entry, sent to all.
        takes: memory for the data of each rank, by rank; or one entry.
        table: the address of a device table of `SOURCES_BYTES`: each rank's source in this process.
            0: sources are copied into the staging buffer first.
        offset: bytes before this rank's part in a source or staging buffer.
        piece: bytes between two ranks' parts in a staging buffer.
        channel_set: `MESSAGES`, `EXCHANGES` or `CAPTURED`.
        epsilon: added to a norm's mean of squares.
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
        """Return the kernel's parameter, `JOB_BYTES`; ``group`` is from `Group.pack`."""
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
"""A group of zeros, with which a kernel returns at once, without accessing any region."""


def pack_sources(addresses: Sequence[int]) -> bytes:
    """Return the bytes of the table of `KernelJob.table`."""
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
"""The names of all kernels, extern "C" in ``kernels/collectives.cu``."""


def kernels_reduce(op: ReduceOp, dtype: torch.dtype) -> bool:
    """Return True if a kernel runs this reduction; otherwise gather, and reduce with torch."""
    return dtype in NUMBERS and op in _OPERATIONS


class Algorithm(Enum):
    """The algorithm of an all-reduce."""

    PACKETS = "packets"
    """Each rank writes its tensor to all ranks, each word with the epoch; no barrier."""
    ONE_SHOT = "one-shot"
    """After a barrier each rank reads all tensors and reduces them completely."""
    TWO_SHOT = "two-shot"
    """After a barrier each rank reduces one part; after another it reads the other parts."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes of launches, and of the algorithms' ranges; the same on all ranks of a group.

    Raises `ValueError` if one is out of range.

    Attributes:
        max_blocks: the largest grid, up to `MAX_BLOCKS`; `MAX_LANES` for ``all_to_all``. The blocks
            of all ranks on a device must fit on it at once: waiting blocks could prevent the
            awaited ones from running.
        lanes: the most blocks of one message, up to `MAX_LANES`, in addition to ``max_blocks``; a
            message has one for each slot that it fills. Lanes share a channel, so more lanes have
            smaller slots and synchronise more often. With 16 lanes of the default channels, all
            threads of a block still have work in a slot.
        threads: threads of a block, `MIN_THREADS` to `MAX_THREADS`.
        packets_up_to: the largest all-reduce by packets, in bytes.
        one_shot_up_to: the largest one in one shot, in bytes; larger ones use two shots.
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
        """Return defaults for up to ``ranks_on_device`` ranks on one device.

        If each rank of a device exchanges messages with all others at once, fewer than 256 blocks
        run. Once more than half of them run, two of them have met and progress. So 64
        multiprocessors with two blocks each suffice.
        """
        one_shot = {2: 8 << 20, 3: 512 << 10, 4: 512 << 10}.get(world_size, 256 << 10)
        blocks = max(36 // ranks_on_device, 8)
        lanes = min(128 // (world_size * ranks_on_device), 16)
        return cls(max_blocks=blocks, lanes=lanes, one_shot_up_to=one_shot)


class KernelLaunch(NamedTuple):
    """One launch of ``grid`` blocks of ``block`` threads; ``args`` has one job's bytes."""

    kernel: str
    grid: int
    block: int
    args: tuple[bytes, ...]


def warm_up(limits: Limits) -> list[KernelLaunch]:
    """Return one idle launch of each kernel, to load all kernels."""
    idle = (KernelJob().pack(IDLE_GROUP),)
    return [KernelLaunch(kernel, 1, limits.threads, idle) for kernel in KERNELS]
