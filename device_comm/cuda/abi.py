"""What host and kernels must agree on: the region of a rank, and the arguments of a launch.

``kernels/group.cuh`` says the same in C++; a test compares the two. All numbers are little-endian.

Region, one for each rank, zeroed before anybody else maps it
--------------------------------------------------------------
::

    0     | abort u64: see `abort_word`; anybody writes it           |  a line of 64 bytes
    64    | claimed u32: the error record has its writer             |  a line
    128   | epoch u64 | tickets u32: of kernels that meet            |  a line
    192   | epoch u64 | tickets u32: of kernels that send packets    |  a line
    256   | flags u64 [MAX_BLOCKS][MAX_RANKS]: rank r writes [*][r]  |
    4352  | words u64 [CHANNEL_SETS][4][MAX_RANKS][MAX_LANES]        |
    8448  | staging of even epochs, of odd epochs                    |  2 staging_bytes
          | packets of even epochs, of odd epochs, from each rank    |  4 n packet_bytes
          | slots [CHANNEL_SETS][from rank][lane][2]                 |  4 n lanes slot_bytes

Control block, one for each rank, in pinned host memory that kernels see
-------------------------------------------------------------------------
::

    0     | abort u32: the host sets it; kernels that wait give up             |  a line
    64    | code u32 | culprit u32 | reporter u32 | phase u32 | epoch u64      |  the error record

The record is written once, its ``code`` last. All kernels take one argument by value, a job: the
group, and what is to be done (see `Job`).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

    from device_comm.reduce_op import ReduceOp

MAX_RANKS: Final = 8
MAX_BLOCKS: Final = 64
"""The largest grid."""
MIN_THREADS: Final = 2 * MAX_RANKS
"""The smallest block: one thread for each channel that it serves."""
MAX_THREADS: Final = 512
"""The largest block."""
MAX_LANES: Final = 8
ALIGN: Final = 16
"""Bytes of one access; what lies in a region is aligned to it."""

CHANNEL_SETS: Final = 2
MESSAGES: Final = 0
"""The set of channels that ``send`` and ``recv`` use."""
EXCHANGES: Final = 1
"""The set of channels that collectives use, which must not be taken for messages."""

REGION_ABORT: Final = 0
REGION_CLAIMED: Final = 64
REGION_EPOCH: Final = 128
REGION_PACKET_EPOCH: Final = 192
REGION_TICKETS: Final = 8
"""Where the tickets are, from an epoch on."""
REGION_FLAGS: Final = 256
REGION_CHANNELS: Final = REGION_FLAGS + MAX_BLOCKS * MAX_RANKS * 8
REGION_STAGING: Final = REGION_CHANNELS + CHANNEL_SETS * 4 * MAX_RANKS * MAX_LANES * 8

CONTROL_ABORT: Final = 0
CONTROL_RECORD: Final = 64
CONTROL_BYTES: Final = 128

_GROUP: Final = struct.Struct(f"<{MAX_RANKS}Q7QIIII")
_TASK: Final = struct.Struct(f"<3QII{2 * MAX_RANKS}Q{2 * MAX_RANKS}Q")
_RECORD: Final = struct.Struct("<IIIIQ")
GROUP_BYTES: Final = _GROUP.size
JOB_BYTES: Final = _GROUP.size + _TASK.size
"""Bytes of the one argument of every kernel."""
SOURCES_BYTES: Final = MAX_RANKS * 8


class ErrorCode(IntEnum):
    """Why a kernel gave up."""

    NONE = 0
    TIMEOUT = 1
    """This rank waited too long for the culprit."""
    PEER = 2
    """The reporter gave up, because of the culprit, and told this rank."""
    ABORTED = 3
    """The host asked for it, through the control block."""


class Phase(IntEnum):
    """What a kernel waited for."""

    START = 0
    """That the culprit comes to a collective."""
    END = 1
    """That the culprit, which had come, gets on with the collective."""
    PACKET = 2
    """Packets of the culprit."""
    PUT = 3
    """That the culprit drains a channel."""
    TAKE = 4
    """That the culprit fills a channel."""


class ErrorRecord(NamedTuple):
    """What a kernel that gave up has left.

    Attributes:
        code: why; `ErrorCode.NONE` if nothing is wrong.
        culprit: the rank that was waited for, or the aborted one.
        reporter: the rank that found it first.
        phase: what was waited for.
        epoch: how many launches of the kind that failed came before; for channels, chunks.
    """

    code: ErrorCode
    culprit: int
    reporter: int
    phase: Phase
    epoch: int

    @classmethod
    def read(cls, control: bytes | bytearray | memoryview) -> Self:
        """Read the record of a control block, of `CONTROL_BYTES`."""
        code, culprit, reporter, phase, epoch = _RECORD.unpack_from(control, CONTROL_RECORD)
        return cls(ErrorCode(code), culprit, reporter, Phase(phase), epoch)


def abort_word(code: ErrorCode, reporter: int, culprit: int) -> int:
    """What stands at `REGION_ABORT` of a rank that shall give up."""
    return code | reporter << 8 | culprit << 16


@dataclass(frozen=True, slots=True)
class RegionLayout:
    """Where everything lies in a region. The same on all ranks of a group.

    Attributes:
        world_size: ranks of the group, 2 to `MAX_RANKS`.
        staging_bytes: of one of the two stagings; what is larger goes in chunks.
        packet_bytes: the most that goes in packets.
        slot_bytes: of one slot; two for each pair of ranks, direction, lane and set.
        lanes: how many blocks may move one message at a time, up to `MAX_LANES`.
    """

    world_size: int
    staging_bytes: int = 8 << 20
    packet_bytes: int = 64 << 10
    slot_bytes: int = 64 << 10
    lanes: int = MAX_LANES

    def __post_init__(self) -> None:
        if not 2 <= self.world_size <= MAX_RANKS:
            raise ValueError(f"world_size must be from 2 to {MAX_RANKS}, not {self.world_size}")
        if not 1 <= self.lanes <= MAX_LANES:
            raise ValueError(f"lanes must be from 1 to {MAX_LANES}, not {self.lanes}")
        least = self.world_size * ALIGN
        if self.staging_bytes < least or self.staging_bytes % ALIGN:
            raise ValueError(
                f"staging_bytes must be a multiple of {ALIGN}, of {least} or more, "
                f"not {self.staging_bytes}"
            )
        for name in ("packet_bytes", "slot_bytes"):
            size = getattr(self, name)
            if size < ALIGN or size % ALIGN:
                raise ValueError(f"{name} must be a multiple of {ALIGN}, not {size}")

    @property
    def packets(self) -> int:
        """Where the packets begin."""
        return REGION_STAGING + 2 * self.staging_bytes

    @property
    def channels(self) -> int:
        """Where the slots of the channels begin."""
        return self.packets + 2 * self.world_size * 2 * self.packet_bytes

    @property
    def size(self) -> int:
        """Bytes of a region: ``8448 + 2 staging_bytes + 4 n (packet_bytes + lanes slot_bytes)``."""
        return self.channels + CHANNEL_SETS * self.world_size * self.lanes * 2 * self.slot_bytes


@dataclass(frozen=True, slots=True)
class Group:
    """What every kernel of one rank knows of its group.

    Attributes:
        regions: by rank, the address of its region as this rank sees it.
        control: the address of this rank's control block as its device sees it.
        rank: this rank.
        layout: of all regions.
        timeout_ns: for one wait; 0: for ever.
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
        """The same group, with waits of another length."""
        return replace(self, timeout_ns=timeout_ns)

    def pack(self) -> bytes:
        """The first `GROUP_BYTES` of a job."""
        layout = self.layout
        return _GROUP.pack(
            *_filled(self.regions),
            self.control,
            self.timeout_ns,
            layout.staging_bytes,
            layout.packets,
            layout.packet_bytes,
            layout.channels,
            layout.slot_bytes,
            self.rank,
            layout.world_size,
            layout.lanes,
            0,
        )


class Span(NamedTuple):
    """A piece of device memory: its address, and its size in bytes."""

    address: int
    size: int


NOTHING: Final = Span(0, 0)
_NOWHERE: Final = (NOTHING,) * MAX_RANKS


class Job(NamedTuple):
    """What one launch does, besides its group. Each kernel says how it takes it.

    Attributes:
        puts: by rank, what this rank gives to it; or only the first one, given to all.
        takes: by rank, where what it gives goes; or only the first one.
        table: the address of `SOURCES_BYTES` on the device: by rank, the address of its source as
            this rank sees it. 0: sources are put into the staging first.
        offset: where, from the beginning of a source or staging, the part of this rank is.
        piece: bytes from one part to the next in a staging.
        op: a reduction.
        channel_set: `MESSAGES` or `EXCHANGES`.
    """

    puts: Sequence[Span] = ()
    takes: Sequence[Span] = ()
    table: int = 0
    offset: int = 0
    piece: int = 0
    op: ReduceOp | int = 0
    channel_set: int = MESSAGES

    def pack(self, group: bytes) -> bytes:
        """The argument of a kernel: `JOB_BYTES`, of which ``group`` is the beginning."""
        puts, takes = (*self.puts, *_NOWHERE)[:MAX_RANKS], (*self.takes, *_NOWHERE)[:MAX_RANKS]
        return group + _TASK.pack(
            self.table,
            self.offset,
            self.piece,
            self.op,
            self.channel_set,
            *(number for span in puts for number in span),
            *(number for span in takes for number in span),
        )


IDLE_GROUP: Final = bytes(GROUP_BYTES)
"""The beginning of a job of nobody: the kernel ends at once, without a look at any region."""


def pack_sources(addresses: Sequence[int]) -> bytes:
    """The table of `Job.table`: by rank, the address of its source as this rank sees it."""
    return struct.pack(f"<{MAX_RANKS}Q", *_filled(addresses))


def _filled(addresses: Sequence[int]) -> tuple[int, ...]:
    return (*addresses, *(0,) * (MAX_RANKS - len(addresses)))
