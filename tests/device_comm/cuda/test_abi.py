"""Host and kernels agree, and arguments are packed as they are drawn."""

from __future__ import annotations

import ctypes
import re
import struct
from typing import TYPE_CHECKING

import pytest

from device_comm import ReduceOp
from device_comm.cuda.ipc import abi, ipc_backend
from device_comm.cuda.ipc.abi import ErrorCode, KernelJob, Phase, RegionLayout
from device_comm.span import Span

if TYPE_CHECKING:
    from pathlib import Path

AGREED = (
    abi.MAX_RANKS,
    abi.MAX_BLOCKS,
    abi.MAX_THREADS,
    abi.MIN_THREADS,
    abi.MAX_LANES,
    abi.CHANNEL_SETS,
    abi.ALIGN,
    abi.REGION_ABORT,
    abi.REGION_CLAIMED,
    abi.REGION_EPOCH,
    abi.REGION_PACKET_EPOCH,
    abi.REGION_TICKETS,
    abi.REGION_FLAGS,
    abi.REGION_CHANNELS,
    abi.REGION_STAGING,
    abi.CONTROL_ABORT,
    abi.CONTROL_RECORD,
    abi.GROUP_BYTES,
    abi.JOB_BYTES,
    ErrorCode.TIMEOUT,
    ErrorCode.PEER,
    ErrorCode.ABORTED,
    Phase.START,
    Phase.END,
    Phase.PACKET,
    Phase.PUT,
    Phase.TAKE,
    ReduceOp.SUM,
    ReduceOp.PRODUCT,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.AVG,
)


def test_kernels_say_the_same(emulation_library: Path) -> None:
    layout = ctypes.CDLL(str(emulation_library)).layout
    layout.restype = ctypes.POINTER(ctypes.c_uint64)
    assert tuple(layout()[: len(AGREED)]) == AGREED


def test_a_region_is_as_long_as_its_formula_says() -> None:
    layout = RegionLayout(3, staging_bytes=4096, packet_bytes=512, channel_bytes=1024)
    assert layout.packets == 28928 + 2 * 4096
    assert layout.channels == layout.packets + 4 * 3 * 512
    assert layout.size == 28928 + 2 * 4096 + 3 * (4 * 512 + 3 * 1024)


def test_the_memory_of_a_rank_is_what_its_page_says() -> None:
    said = re.search(r"``(\d+) MiB \+ (\d+) n MiB``", ipc_backend.__doc__ or "")
    assert said is not None
    common, each = map(int, said.groups())
    for n in (2, abi.MAX_RANKS):
        assert RegionLayout(n).size // (1 << 20) == common + each * n


def test_lanes_share_a_channel() -> None:
    layout = RegionLayout(2, channel_bytes=1024)
    assert [layout.slot_bytes(lanes) for lanes in (1, 2, 3, 32)] == [512, 256, 160, 16]
    with pytest.raises(ValueError, match="33 lanes do not fit into channel_bytes=1024"):
        layout.slot_bytes(33)
    assert RegionLayout(2).slot_bytes(abi.MAX_LANES) == 16 << 10


@pytest.mark.parametrize(
    "wrong",
    [
        {"world_size": 1},
        {"world_size": 9},
        {"world_size": 8, "staging_bytes": 112},
        {"world_size": 2, "staging_bytes": 1000},
        {"world_size": 2, "packet_bytes": 0},
        {"world_size": 2, "channel_bytes": 24},
    ],
)
def test_layouts_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        RegionLayout(**wrong)


def test_groups_that_cannot_be() -> None:
    layout = RegionLayout(2)
    with pytest.raises(ValueError, match="3 regions for 2 ranks"):
        abi.Group((1, 2, 3), 0, 0, layout, 0)
    with pytest.raises(ValueError, match="rank 2 is not one of 2 ranks"):
        abi.Group((1, 2), 0, 2, layout, 0)


def test_a_job_as_it_lies_in_memory() -> None:
    layout = RegionLayout(2, staging_bytes=64, packet_bytes=16, channel_bytes=208)
    group = abi.Group((0x1000, 0x2000), 0x3000, 1, layout, 5).with_timeout(7)
    job = KernelJob(
        (Span(1, 2),), (Span(3, 4), Span(5, 6)), 0x4000, 48, 16, ReduceOp.MAX, abi.EXCHANGES, 0.5
    )
    expected = struct.pack("<8Q", 0x1000, 0x2000, *(0,) * 6)
    expected += struct.pack("<8Q4I", 0x3000, 7, 64, 29056, 16, 29184, 208, 32, 1, 2, 3, 0)
    expected += struct.pack("<QQQIIfI", 0x4000, 48, 16, 3, 1, 0.5, 0)
    expected += struct.pack("<16Q", 1, 2, *(0,) * 14) + struct.pack("<16Q", 3, 4, 5, 6, *(0,) * 12)
    assert job.pack(group.pack(3)) == expected
    assert len(expected) == abi.JOB_BYTES
    assert abi.pack_sources((9, 8)) == struct.pack("<8Q", 9, 8, *(0,) * 6)


def test_an_error_record_as_it_lies_in_memory() -> None:
    control = bytes(64) + struct.pack("<4IQ", 2, 1, 3, 4, 2**40)
    control += bytes(abi.CONTROL_BYTES - len(control))
    record = abi.ErrorRecord.read(control)
    assert record == (ErrorCode.PEER, 1, 3, Phase.TAKE, 2**40)
    assert abi.ErrorRecord.read(bytes(abi.CONTROL_BYTES)).code is ErrorCode.NONE
